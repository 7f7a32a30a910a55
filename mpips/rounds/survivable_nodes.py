"""Rounds of several nodes that go on without a dead worker.

The leaders, the first ranks of the nodes, act on a death. The death of a leader ends the job, so
what leaders agree on needs no vote: the first one, the arbiter, decides by messages. A round
without a death costs no message more than one of `mpips.rounds.shared`.

**What a round leaves behind.** An owner updates its slice in round t only when the sums of all
nodes are there, and a node leaves its last barrier of t only with the results of all owners. So
nobody is more than one round ahead, and

- once a node has left t, all owners have updated in t. Who is still in t lacks results, and nothing
  else: the replica of that node has them. No owner updates in t + 1 before all nodes have left t.
- before, all gradients of t lie where they were computed, and an owner has a copy of what its slice
  was (`mpips.rounds.survivable.Slice`). So t can be made again, by other owners too, as often as
  ranks die in it. In mode local_sgd the workers' replicas and slots stand in place of gradients:
  nobody makes a step on them before its node has left t.

**A node is held** when its leader knows of a death, and none of its ranks can go on by itself: each
that lives stands in the barrier that its leader is in, or has given its part of the round up, and
one is missing there. Who knows of a death, or is told by its leader (ALARM), gives up wherever it
waits for other nodes, says so (GIVEN_UP), and touches no shared memory until its leader goes on. A
leader whose node is held kills the processes of its dead ranks, and tells the arbiter where it
stands; one whose node is not held, how many rounds it has left behind, whatever it waits for: a
node that is ahead may wait in an evaluation for one that is behind. By this the arbiter tells

    COMPLETED  a held node in a round that another has left: that one's leader sends its replica,
               and that of each slot that is averaged, of the same bits as the results, and the held
               node leaves the round. The dead stay what they are, and are met in the next round.
    AGAIN      all nodes, when all are held in one round t: it is made again without the dead. The
               gradient of a dead rank counts if its node was past the first barrier of t, else its
               samples are assigned again. Its slices go to ranks of its node, and its part of the
               transfers to the next rank of it.

A leader writes what has changed, then the VERDICT, then the number of the EPISODE, and then the
words of the dead in the barrier that holds the others: so whoever passes it sees the episode, and
is told what the barrier has ended. Further deaths hold the nodes once more, wherever they have got
to: a new owner that dies leaves the copy, a rank that dies as it has given up is missing in the
barrier, and the death of a leader raises `mpips.mpi.abort.Lost` in whatever the others wait for.

**Messages.** Those of an attempt have tags of its ERA, the number of rounds made again: what was
sent to somebody who had given up is never taken for something else. In AGAIN a rank cancels what it
has not received; in COMPLETED those that live have sent all that it waits for. What has begun to
come from a dead rank may come for ever: it is left alone, and comes into memory that nothing else
uses. So results come beside the replica, and are copied into it when all are here. Nothing is sent
to a rank known to be dead, nor awaited.

Behind the last round nobody is held: a death that comes then, or that keeps another node in the
last round, ends the job, which goes on from a checkpoint.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpips.failover.policy import survivable
from mpips.kernels.atomics import observe, publish
from mpips.mpi.start import Request
from mpips.mpi.waiting import duties
from mpips.planning.job import Job
from mpips.rounds.base import Report, Weights
from mpips.rounds.crossing import Crossing
from mpips.rounds.recovery import (
    AGAIN,
    ALARM,
    BETWEEN,
    COMPLETED,
    ELSEWHERE,
    ENTERING,
    EPISODE,
    ERA,
    GIVEN_UP,
    LEAVING,
    UP,
    VERDICT,
    Recovery,
)  # fmt: skip
from mpips.rounds.shared import SharedRound
from mpips.rounds.survivable import SurvivableRound


class NodesRound(SurvivableRound):
    """Rounds of several nodes, whose workers may die, but for the first of each."""

    def __init__(self, job: Job, *given: Any) -> None:
        """See `SurvivableRound`."""
        super().__init__(job, *given)
        self.job, self.cluster, self.workers_here = job, self._cluster, self._workers
        self._mine, self._led = self.words_of(self._cluster.rank), self.words_of(self._leader)
        self._episode = 0
        self._crossing: Crossing | None = None
        self._past: list[Crossing] = []
        self._recovery = Recovery(self) if self._leads else None
        if self._recovery is not None:
            duties.append(self._recovery.advance)

    def publish_start(self) -> None:
        """See `Round.publish_start`; from then on workers may die."""
        SharedRound.publish_start(self)
        for each in self._moved:
            each._slices.free()
        workers = self._cluster.roles.workers
        self._cluster.failures.spare(survivable(self._job), [workers])

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        self._step = step
        self._stand(ENTERING)
        self._barrier.enter(report)
        self._episode = observe(self._led, EPISODE)
        reports = self._begin_report_sum()
        verdict = AGAIN
        while verdict == AGAIN:
            self._stand(BETWEEN)
            self._attempt(weights, reports)
            self._stand(LEAVING)
            agreed = self._barrier.leave()
            before, self._episode = self._episode, observe(self._led, EPISODE)
            verdict = observe(self._led, VERDICT) if self._episode > before else COMPLETED
        self._stand(ELSEWHERE)
        if self._deaths[0]:
            self._note_deaths(step + 1)
        return agreed

    def _stand(self, where: int) -> None:
        """Note where this rank is, if it leads."""
        if self._recovery is not None:
            self._recovery.stand(where, self._step, self._barrier.turn)

    def _attempt(self, weights: Weights, reports: list[Request]) -> None:
        """Do what the round needs of other nodes, or give it up and wait for the verdict."""
        self._weights = self._divided(weights) if self._deaths[0] else np.asarray(weights)
        crossing = self._crossing = self._crossing_now()
        if not crossing.run(self._step, self._weights, reports):
            self._stand(UP)
            publish(self._mine, GIVEN_UP, self._episode + 1)
            self.transfers.wait_until(lambda: observe(self._led, EPISODE) > self._episode)
            self._stand(BETWEEN)
            again = observe(self._led, VERDICT) == AGAIN
            crossing.settle(again)
            if again:
                return
            self.transfers.wait_until(lambda: self.done(reports))
        self._publish_report_sum()

    def _crossing_now(self) -> Crossing:
        """Return the transfers between those that live, made anew where some have died."""
        era = observe(self._led, ERA)
        if self._crossing is not None and self._crossing.era == era:
            return self._crossing
        if self._crossing is not None:
            self._past.append(self._crossing)
        dead = set(map(int, np.flatnonzero(self._left)))
        self._cluster.failures.lost |= dead
        return Crossing(self, era, dead)

    def gives_up(self) -> bool:
        """Return whether a rank has died that is still in the rounds, as far as this one knows."""
        lost, crossing = self._cluster.failures.lost, self._crossing
        if lost and (crossing is None or not lost <= crossing.dead):
            return True
        return observe(self._led, ALARM) > self._episode

    def words_of(self, rank: int) -> np.ndarray:
        """Return what a rank of this node says of deaths; see `mpips.rounds.recovery`."""
        return self.memory.view(rank, "recovery")

    def counts(self, rank: int, entered: bool) -> bool:
        """Return whether the gradient of a dead rank of this node counts in the round in work.

        Args:
            rank: Whose process is gone.
            entered: Whether the node is past the first barrier.
        """
        return entered

    def leave_out(self, first: Mapping[int, int], owners: Sequence[int]) -> None:
        """Note who is in the rounds, on the leader of a node that is held.

        Args:
            first: The first round without each rank that has died.
            owners: Who owns each slice.
        """
        for rank, step in first.items():
            self._left[rank] = step
            if self._cluster.is_local(rank):
                self._window.view(rank, "report").fill(0)
        self._owner[:] = owners
        self._deaths[0] = int(np.count_nonzero(self._left))

    def done(self, requests: list[Request]) -> bool:
        """Return whether operations among the leaders are complete."""
        return self._cluster.failures.done(requests)

    def free(self) -> None:
        """See `Round.free`."""
        if self._recovery is not None:
            duties.remove(self._recovery.advance)
            self._recovery = None
        self._mine = self._led = np.zeros(0, "i8")
        self._crossing = None
        super().free()
