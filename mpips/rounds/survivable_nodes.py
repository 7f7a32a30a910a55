"""Rounds of several nodes that continue without a dead worker.

The leaders, which are the first ranks of the nodes, act on a death. The death of a leader ends the
job, so the leaders need no vote: the first one, the arbiter, decides, by messages. A round without
a death sends no more messages than one of `mpips.rounds.shared`.

**State after a round.** An owner updates its slice in round t only when the sums of all nodes have
arrived. A node leaves its last barrier of t only with the results of all owners. So no rank is more
than one round ahead, and

- once a node has left t, all owners have updated in t. A node that is still in t lacks only
  results, and the replica of the first node has them. No owner updates in t + 1 before all nodes
  have left t.
- before that, all gradients of t are still in place, and an owner has a copy of the old slice
  (`mpips.rounds.survivable.Slice`). So t can be repeated, by other owners too, as often as ranks
  die in it. In mode local_sgd the workers' replicas and slots take the place of gradients: no
  worker makes a step on them before its node has left t.

**A node is held** when its leader knows of a death and none of its ranks can continue by itself.
Each living rank waits in the leader's barrier, or has given up its part of the round, and a rank is
missing in the barrier. A rank that knows of a death, by itself or from its leader (ALARM), gives up
wherever it waits for other nodes. It publishes this (GIVEN_UP), and touches no shared memory until
its leader continues. The leader of a held node kills the processes of its dead ranks, and reports
its position to the arbiter. The leader of another node reports the number of rounds that it has
left, wherever it waits: a node that is ahead may wait in an evaluation for one that is behind. From
the reports the arbiter decides one of

    COMPLETED  for a held node in a round that another node has left: that node's leader sends its
               replica, and that of each averaged slot, which have the same bits as the results. The
               held node leaves the round. Its dead ranks are handled in the next round.
    AGAIN      for all nodes, when all are held in the same round t: they repeat it without the dead
               ranks. The gradient of a dead rank counts if its node was past the first barrier of
               t; else its samples are assigned again. Its slices go to ranks of its node, and its
               part of the transfers goes to the next rank of the node.

A leader writes the changes, then the VERDICT, then the number of the EPISODE, and then the words of
the dead ranks in the barrier. So a rank that passes the barrier sees the episode, and reads the
reason. Further deaths hold the nodes again, wherever they are. A new owner that dies leaves the
copy. A rank that dies after it has given up is missing in the barrier. The death of a leader raises
`mpips.mpi.abort.Lost` wherever the others wait.

**Messages.** The messages of an attempt have the tags of its ERA, the number of repeated rounds. So
a message to a rank that had given up is never mistaken for another. In AGAIN a rank cancels its
open receives; in COMPLETED the living ranks have sent all messages that it waits for. A message
that a dead rank has begun may never end. Its receive is left open, with memory that nothing else
uses. So results arrive beside the replica, and are copied into it when all are here. Ranks send
nothing to a rank known to be dead, and do not wait for it.

After the last round no node is held: a death then, or one that keeps another node in the last
round, ends the job, which resumes from a checkpoint.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpips.failover.policy import survivable
from mpips.kernels.atomics import observe, publish
from mpips.mpi.start import Request
from mpips.mpi.waiting import duties
from mpips.planning.job import Job
from mpips.rounds import recovery
from mpips.rounds.base import Report, Weights
from mpips.rounds.crossing import Crossing
from mpips.rounds.shared import SharedRound
from mpips.rounds.survivable import SurvivableRound


class NodesRound(SurvivableRound):
    """Rounds of several nodes; any worker but the first of each node may die."""

    def __init__(self, job: Job, *args: Any) -> None:
        """See `SurvivableRound`."""
        super().__init__(job, *args)
        self.job, self.cluster, self.workers_here = job, self._cluster, self._workers
        self._words, self._leader_words = map(self.words_of, (self._cluster.rank, self._leader))
        self._episode = 0
        self._crossing: Crossing | None = None
        self._past: list[Crossing] = []
        self._recovery = recovery.Recovery(self) if self._leads else None
        if self._recovery is not None:
            duties.append(self._recovery.advance)

    def publish_start(self) -> None:
        """See `Round.publish_start`; workers may die from then on."""
        SharedRound.publish_start(self)
        for each in self._averaged:
            each._slices.free()
        workers = self._cluster.roles.workers
        self._cluster.failures.spare(survivable(self._job), [workers])

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        self._step = step
        self._set_state(recovery.ENTERING)
        self._barrier.enter(report)
        self._episode = observe(self._leader_words, recovery.EPISODE)
        reports = self._begin_report_sum()
        while True:
            self._set_state(recovery.BETWEEN)
            self._attempt(weights, reports)
            self._set_state(recovery.LEAVING)
            agreed = self._barrier.leave()
            before, self._episode = self._episode, observe(self._leader_words, recovery.EPISODE)
            verdict = observe(self._leader_words, recovery.VERDICT)
            if self._episode == before or verdict != recovery.AGAIN:
                break
        self._set_state(recovery.ELSEWHERE)
        if self._deaths[0]:
            self._note_deaths(step + 1)
        return agreed

    def _set_state(self, state: int) -> None:
        """Set the state of this rank, if it is a leader."""
        if self._recovery is not None:
            self._recovery.set_state(state, self._step, self._barrier.turn)

    def _attempt(self, weights: Weights, reports: list[Request]) -> None:
        """Make the transfers of the round, or give up and wait for the verdict."""
        self._weights = self._divided(weights) if self._deaths[0] else np.asarray(weights)
        crossing = self._crossing = self._crossing_now()
        if not crossing.run(self._step, self._weights, reports):
            self._set_state(recovery.UP)
            publish(self._words, recovery.GIVEN_UP, self._episode + 1)
            self.transfers.wait_until(
                lambda: observe(self._leader_words, recovery.EPISODE) > self._episode
            )
            self._set_state(recovery.BETWEEN)
            again = observe(self._leader_words, recovery.VERDICT) == recovery.AGAIN
            crossing.settle(again)
            if again:
                return
            self.transfers.wait_until(lambda: self.done(reports))
        self._publish_report_sum()

    def _crossing_now(self) -> Crossing:
        """Return the transfers between the living ranks, made anew after deaths."""
        era = observe(self._leader_words, recovery.ERA)
        if self._crossing is not None and self._crossing.era == era:
            return self._crossing
        if self._crossing is not None:
            self._past.append(self._crossing)
        dead = set(map(int, np.flatnonzero(self._left)))
        self._cluster.failures.lost |= dead
        return Crossing(self, era, dead)

    def gives_up(self) -> bool:
        """Return whether this rank knows of a death of a rank that is still in the rounds."""
        lost, crossing = self._cluster.failures.lost, self._crossing
        if lost and (crossing is None or not lost <= crossing.dead):
            return True
        return observe(self._leader_words, recovery.ALARM) > self._episode

    def words_of(self, rank: int) -> np.ndarray:
        """Return the words of a rank of this node about deaths; see `mpips.rounds.recovery`."""
        return self.memory.view(rank, "recovery")

    def counts(self, rank: int, entered: bool) -> bool:
        """Return whether the gradient of a dead rank of this node counts in the present round.

        Args:
            rank: The dead rank; its process is gone.
            entered: Whether the node is past the first barrier.
        """
        return entered

    def leave_out(self, first: Mapping[int, int], owners: Sequence[int]) -> None:
        """Write the dead ranks and the new owners, on the leader of a held node.

        Args:
            first: The first round without each dead rank.
            owners: Owner of each slice.
        """
        for rank, step in first.items():
            self._left[rank] = step
            if self._cluster.is_local(rank):
                self._window.view(rank, "report").fill(0)
        self._owner[:] = owners
        self._deaths[0] = int(np.count_nonzero(self._left))

    def done(self, requests: list[Request]) -> bool:
        """Return whether requests among the leaders are complete."""
        return self._cluster.failures.done(requests)

    def free(self) -> None:
        """See `Round.free`."""
        if self._recovery is not None:
            duties.remove(self._recovery.advance)
            self._recovery = None
        self._words = self._leader_words = np.zeros(0, "i8")
        self._crossing = None
        super().free()
