"""Rounds of one node that continue without a dead worker.

All data of a round is in the memory of the node: parameters, slots, gradients, and the old values
of an update under way (`SliceUpdate`). Only the coordinator acts on a death, once all other living
ranks wait in a barrier that the dead rank D has not reached. Then no rank reads or writes, and none
can continue before the coordinator releases the barrier. (The death of the coordinator ends the
job.) Its states:

    RUNNING    no rank is missing
    LOST       MPI has reported the death of D, and all living ranks wait in the barrier
    FENCED     the process of D is gone, so that the words and arrays of D have no other writer
    RECOVERED  D's word is set past all barriers, and the others leave this one

The word of D, its number of barriers reached, tells its position in round t:

    before the first barrier   Its gradient may be incomplete, and is not read. The others make the
                               round; D's samples are assigned again.
    after the first barrier    Its gradient is complete, and counts. The coordinator completes the
                               update of D's slices, and then releases the barrier.
    after the second barrier   As before the first one of round t + 1.

The coordinator decides ``left``, the first round without each dead rank; ``owner``, the new owner
of each slice; and the number of ``deaths``. It writes them to its segment before D's word. So all
ranks read the same values after the same barrier. If the new owner of a slice dies too, it is the
next D.

With servers as owners, the servers must stay alive, and on one node no old values are kept: see
`mpips.rounds.survivable_hybrid`.

In mode local_sgd a worker's replica takes the place of its gradient, and the slots are averaged in
the same round. Each average can be repeated, since the workers' vectors do not change until the
next round.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from mpips.failover.policy import survivable
from mpips.failover.takeover import fence
from mpips.failover.undo_log import HALVES, UndoLog
from mpips.kernels.atomics import observe, publish
from mpips.kernels.exchange import NUMBER_BITS, PIECE
from mpips.kernels.rule_loops import Undo
from mpips.kernels.vectors import addresses_of, sum_rows
from mpips.mpi.collectives import first_ranks
from mpips.mpi.window import Field, Plan, Window
from mpips.optim import Rule, Slots, Sum
from mpips.planning.job import Job
from mpips.rounds.averaging import AveragingRound, outer_rule
from mpips.rounds.base import Report, Round, ShardUpdate, Transfers, Weights
from mpips.rounds.node import TURN
from mpips.rounds.shared import SharedRound

PAST_ALL = np.iinfo(np.int64).max  # number of barriers
PIECE_BYTES = 1 << 16  # of parameters: with gradients, slots and old values in the L2 cache


def next_owner(owners: Sequence[int], living: Collection[int]) -> int:
    """Return the new owner of a slice: the first living rank among those with the fewest slices."""
    load = Counter(owners)
    return min(living, key=lambda rank: (load[rank], rank))


class SliceUpdate(ShardUpdate):
    """Update of a slice piece by piece, so that another rank can complete it.

    Before a piece of update t changes, its old values are copied to one half of their memory. Then
    a number is published that contains t and the number of the piece. A rank that repeats update t
    finds the earlier pieces updated. It restores this piece, and continues there. If the published
    number is not of t, nothing has changed yet. The gradients are the same: no piece changes before
    all gradients that count are complete.

    Args:
        old: Memory for old values, shape (2, 1 + slots, elements of a piece).
        words: Words that contain the number of the piece.
    """

    def __init__(self, old: np.ndarray, words: np.ndarray, *args: Any) -> None:
        """See `ShardUpdate`, too."""
        self._old, self._words = old, words
        super().__init__(*args)

    def apply(
        self, step: int, factor: float = 1.0, sources: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """See `ShardUpdate.apply`; the sources are required."""
        assert sources is not None
        start, number, remote = perf_counter(), step << NUMBER_BITS, self._cluster.nodes > 1
        noted, lr = observe(self._words, PIECE), self._rate(step) * factor
        for (begin, _, rule, scale), params, grad, slots in self._blocks:
            live, size = [params, *slots], params.size if rule.whole else grad.size
            end = number + -(-params.size // size)
            if number <= noted < end:
                at = (noted - number) * size
                live, begin, number = [each[at:] for each in live], begin + at, noted
                self._undo(number).put_back(live)
            if noted < end and rule.whole:
                sum_rows(*sources, begin, grad)
                self._undo(number).keep(live)
                rule.apply(params, grad, slots, step, lr * scale)
            elif noted < end:
                total, undo = Sum(*sources, begin, grad), self._undo(number)
                rule.apply_sum(live[0], total, tuple(live[1:]), step, lr * scale, undo)
            number = end
            if remote:
                self._cluster.progress()
        self._transfers.busy_s += perf_counter() - start

    def _undo(self, number: int) -> Undo:
        return Undo(self._old, self._words, PIECE, number)


class Slice:
    """Slice of the parameters, which any rank of the node may update.

    Args:
        job: The run.
        number: Number of the slice.
        rule: Update rule of the slice.
        live: Its parameters, shape (shard.size,), and its slots, each of that shape.
        means: Arrays of that shape that get means; they are the first slots, those of the job's
            rule.
        old: See `SliceUpdate`.
        words: See `SliceUpdate`.
        transfers: Counts the time.

    Attributes:
        results: Arrays that all nodes need after an update.
    """

    def __init__(
        self, job: Job, number: int, rule: Rule, live: Slots, means: Slots, old: np.ndarray,
        words: np.ndarray, transfers: Transfers,
    ) -> None:  # fmt: skip
        params, *slots = self.live = live  # changes piece by piece in an update
        self.params, self.slots, self.results = params, (*means, *slots), (params, *means)
        self.old, self.words = old, words
        self._job, self._begin, self._means = job, job.shards[number].begin, means
        room = np.zeros(old.shape[2], params.dtype)
        args = job, job.shards[number], rule, params, tuple(slots), room, transfers
        self._update = SliceUpdate(old, words, *args)

    def apply(self, step: int, rows: Sequence[np.ndarray], weights: np.ndarray) -> None:
        """Make update `step`, or repeat it after the death of the rank that began it.

        Args:
            step: Number of the update.
            rows: Addresses of the workers' gradients, then of their vectors for each mean.
            weights: Weights of the workers.
        """
        for mean, vectors in zip(self._means, rows[1:], strict=True):
            sum_rows(vectors, weights, self._begin, mean)
        self._update.apply(step, self._job.lr_scale, (rows[0], weights))


class SurvivableRound(SharedRound):
    """Rounds in the memory of one node; any worker but the coordinator may die.

    Attributes:
        replicas: Its own replica, then the vectors that get means.
        rows_here: For each of these, addresses of the vectors of the node's workers.
        memory: Additional shared memory of the node's ranks.
        turns: Words of each rank of this node, with the number of barriers that it has reached.
    """

    def __init__(
        self,
        job: Job,
        rule: Rule | None = None,
        transfers: Transfers | None = None,
        means: Sequence[SharedRound] = (),
    ) -> None:
        """See `Round.__init__`; the vectors of `means` are averaged in the same rounds.

        Args:
            job: The run.
            rule: See there.
            transfers: See there.
            means: Rounds with further vectors; their `exchange` is not called.
        """
        super().__init__(job, rule, transfers)
        cluster = self._cluster
        self._averaged = [self, *means]
        self.replicas = [each.replica for each in self._averaged]
        self.rows_here = [each._addresses for each in self._averaged]
        plans = [Plan(_fields(job, self._rule, rank)) for rank in range(cluster.world)]
        self.memory = Window(cluster, plans, remote_reads=False)
        UndoLog(self.memory.view(cluster.rank, "undo_log")).sign()
        view = self.memory.view
        self._left, self._owner = (view(self._leader, name) for name in ("left", "owner"))
        self._deaths = view(self._leader, "deaths").data
        if self._leads:
            self._owner[:] = cluster.roles.owners
            if cluster.nodes == 1:
                self._barrier.recover = self._recover
        self.memory.make_visible()
        self.turns = [
            self._window.view(rank, "header") if cluster.is_local(rank) else np.zeros(8, "i8")
            for rank in range(cluster.world)
        ]
        self._made: dict[int, Slice] = {}
        self._step, self._updates, self._weights = 0, False, np.zeros(0)
        self._known = 0  # number of deaths
        self._numbers = self._owned()

    def owners(self) -> list[int]:
        """Return the rank that owns each slice. Between two rounds the same on all ranks."""
        return [int(rank) for rank in self._owner]

    def slice_of(self, number: int) -> Slice:
        """Return a slice of the parameters, by its number."""
        if number not in self._made:
            rank, view = self._cluster.roles.owners[number], self.memory.view
            part = self._job.shards[number].range
            slots = tuple(self._window.view(rank, f"slots/{s}") for s in self._rule.slots)
            params, *means = (replica[part] for replica in self.replicas)
            args = (params, *slots), tuple(means), view(rank, "old"), view(rank, "undo_log")
            self._made[number] = Slice(self._job, number, self._rule, *args, self.transfers)
        return self._made[number]

    def publish_start(self) -> None:
        """See `Round.publish_start`; workers may die from then on."""
        workers = self._cluster.roles.workers
        self._cluster.failures.spare(survivable(self._job), [workers])
        super().publish_start()

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`; the weights of workers that died before it go to the others."""
        self._step = step
        self._barrier.enter(report)
        self._weights = self._divided(weights) if self._deaths[0] else np.asarray(weights)
        self._updates = True
        for number in self._numbers:
            self._apply(number)
        agreed = self._barrier.leave()
        self._updates = False
        if self._deaths[0]:
            self._note_deaths(step + 1)
        return agreed

    def _owned(self) -> list[int]:
        return [number for number, owner in enumerate(self._owner) if owner == self._cluster.rank]

    def _divided(self, weights: Weights) -> np.ndarray:
        """Return the weights of this round; those of absent ranks are divided among the others."""
        self._note_deaths(self._step)
        found, absent = np.array(weights), self._absent(self._step)
        if found[absent].any():
            found[absent] = 0
            found /= found.sum() or 1
        return found

    def _absent(self, step: int) -> np.ndarray:
        """Return for each worker whether it is absent from a round."""
        firsts = self._left[[*self._cluster.roles.workers]]
        found: np.ndarray = (firsts > 0) & (firsts <= step)
        return found

    def _note_deaths(self, step: int) -> None:
        """Read the dead ranks, and scale the learning rate by the share of present workers."""
        if self._deaths[0] != self._known:
            self._known, self._numbers = self._deaths[0], self._owned()
            self.left = {rank: int(first) for rank, first in enumerate(self._left) if first}
        if self._job.config.scale_lr:
            self._job.lr_scale = 1 - float(self._absent(step).mean())

    def _apply(self, number: int) -> None:
        if not self._known or self._weights.any():
            self.slice_of(number).apply(self._step, self.rows_here, self._weights)

    def _recover(self, turn: int) -> None:
        """Release barrier `turn`, if all living ranks wait there for dead ones.

        Raises:
            Lost: If the round cannot continue.
        """
        if not (lost := self._cluster.failures.lost):
            return
        behind = [r for r, words in enumerate(self.turns) if observe(words, TURN) < turn]
        if not lost.issuperset(behind):
            return
        if not self._step:
            raise self._cluster.failures.needed()
        for rank in behind:
            fence(self.memory, rank)
        dead = [rank for rank in behind if observe(self.turns[rank], TURN) < turn]
        orphans = [number for number, owner in enumerate(self._owner) if owner in dead]
        for number in orphans:
            if self._updates:
                self._apply(number)
            self._owner[number] = next_owner(self.owners(), set(range(self._cluster.world)) - lost)
        for rank in dead:
            self._window.view(rank, "report").fill(0)
            self._left[rank] = self._step + self._counts(rank)
        self._deaths[0] = int(np.count_nonzero(self._left))
        for rank in dead:
            publish(self.turns[rank], TURN, PAST_ALL)

    def _counts(self, rank: int) -> bool:
        """Return whether the gradient of a dead rank counts in this round."""
        return self._updates

    def free(self) -> None:
        """See `Round.free`."""
        self._made.clear()
        self._averaged, self.replicas = [], []
        self._left = self._owner = np.zeros(0, "i8")
        self._deaths = self._left.data
        self.turns = []
        self.memory.free()
        super().free()


def _fields(job: Job, rule: Rule, rank: int) -> tuple[Field, ...]:
    """Return the additional fields of a rank's segment for recovery."""
    owners = job.cluster.roles.owners
    found = [Field("undo_log", "i8", (8,)), Field("recovery", "i8", (8,))]
    if rank in owners and (job.cluster.nodes > 1 or not job.cluster.roles.servers):
        size, dtype = job.shards[owners.index(rank)].size, job.config.dtype
        most = size if rule.whole else min(size, PIECE_BYTES // np.dtype(dtype).itemsize)
        found.append(Field("old", dtype, (HALVES, 1 + len(rule.slots), most)))
    if rank in first_ranks(job.cluster.node_of):
        found.append(Field("deaths", "i8", (8,)))
        found.append(Field("left", "i8", (job.cluster.world,)))
        found.append(Field("owner", "i8", (len(owners),)))
    return tuple(found)


def warm(rule: Rule, dtype: str) -> None:
    """Compile the loop that only such rounds need, or load it from the cache on disk."""
    params, grad, *slots = np.zeros((2 + len(rule.slots), 1), dtype)
    undo = Undo(np.zeros((HALVES, 1 + len(slots), 1), dtype), np.zeros(8, np.int64), PIECE, 0)
    total = Sum(addresses_of([grad]), np.ones(1), 0, np.zeros(1, dtype))
    rule.apply_sum(params, total, tuple(slots), 1, 0.1, undo)


def kind_of(job: Job) -> type[SurvivableRound]:
    """Return the class of rounds of a job whose workers may die."""
    if job.config.mode == "hybrid":
        from mpips.rounds.survivable_hybrid import HybridNodesRound, HybridRound

        return HybridRound if job.cluster.nodes == 1 else HybridNodesRound
    if job.cluster.nodes > 1:
        from mpips.rounds.survivable_nodes import NodesRound

        return NodesRound
    return SurvivableRound


class SurvivableAveraging(AveragingRound):
    """Averages of all vectors in one round, whose workers may die."""

    def _make_round(self, job: Job, of_slots: Sequence[Round]) -> SurvivableRound:
        """See `AveragingRound`."""
        means = [each for each in of_slots if isinstance(each, SharedRound)]
        self._round = kind_of(job)(job, outer_rule(job), self.transfers, means)
        return self._round

    def owners(self) -> list[int]:
        """See `Round.owners`."""
        return self._round.owners()

    def slice_of(self, number: int) -> Slice:
        """See `Round.slice_of`."""
        return self._round.slice_of(number)

    def _exchange_all(self, step: int, weights: Weights, report: Report) -> Report:
        """See `AveragingRound`."""
        agreed = self._round.exchange(step, weights, report)
        self.left = self._round.left
        return agreed
