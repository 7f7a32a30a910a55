"""Rounds of one node that go on without a dead worker.

All that a round needs lies in the memory of the node: parameters, slots, gradients, and the old
values of what an owner is about to change (`SliceUpdate`). The coordinator alone acts on a death,
and only while all others that live stand in a barrier that the dead rank D has not reached: then
nobody reads or writes anything, and nobody can go on before the coordinator lets them. (The death
of the coordinator ends the job.) Its states:

    RUNNING    nobody is missing
    LOST       MPI says that D has died, and all that live stand in the barrier
    FENCED     the process of D is gone, so that the words and arrays of D have no other writer
    RECOVERED  D's word says that it is past all barriers, and the others leave this one

The word of D, its number of barriers reached, tells where in round t it died:

    before the first barrier   Its gradient may be half written, and is not read. The round is made
                               by the others; D's samples are assigned again.
    behind the first barrier   Its gradient is whole, and counts. The coordinator completes the
                               update of D's slices, and then lets the others leave.
    behind the second barrier  As before the first one of round t + 1.

What is decided is ``left``, the first round without each dead rank, ``owner``, who updates each
slice from then on, and the number of ``deaths``. They lie in the coordinator's segment, and are
written before D's word: so all ranks read the same of them behind the same barrier. If who takes a
slice over dies too, it is D.

Where servers own all, they must live, and on one node nothing is kept: see
`mpips.rounds.survivable_hybrid`.

In mode local_sgd a worker's replica stands in place of its gradient, and the means of the slots are
taken in the same round: each can be taken again, for the workers' vectors stay until the next one.
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

PAST_ALL = np.iinfo(np.int64).max  # barriers
PIECE_BYTES = 1 << 16  # of parameters: with gradients, slots and old values in the L2 cache


def next_owner(owners: Sequence[int], living: Collection[int]) -> int:
    """Return who takes a slice over: the first of those that live who own the fewest."""
    load = Counter(owners)
    return min(living, key=lambda rank: (load[rank], rank))


class SliceUpdate(ShardUpdate):
    """Updates a slice piece by piece, so that another rank can complete it.

    Before a piece of update t is changed its old values are kept, in one half of the memory for
    them, and then its number is published: that of t, and of the piece. So whoever makes update t
    once more finds the pieces before it whole, sets it back, and goes on from there; if its number
    is not one of t, nothing is changed yet. Gradients are the same: nothing was changed before all
    of them that count were whole.

    Args:
        old: Memory for old values, shape (2, 1 + slots, elements of a piece).
        words: In which the number of the piece is.
    """

    def __init__(self, old: np.ndarray, words: np.ndarray, *given: Any) -> None:
        """See `ShardUpdate`, too."""
        self._old, self._words = old, words
        super().__init__(*given)

    def apply(
        self, step: int, factor: float = 1.0, sources: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """See `ShardUpdate.apply`; the sources are given."""
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
    """A slice of the parameters, which any rank of the node may update.

    Args:
        job: The run.
        number: Of the slice.
        rule: Of its parameters and slots.
        live: Its parameters, shape (shard.size,), and its slots, each of that shape.
        means: Arrays of that shape to which means are written: slots too, the first ones, of the
            job's rule.
        old: See `SliceUpdate`.
        words: See `SliceUpdate`.
        transfers: Where the time is counted.

    Attributes:
        results: What all nodes are to have of it after an update.
    """

    def __init__(
        self, job: Job, number: int, rule: Rule, live: Slots, means: Slots, old: np.ndarray,
        words: np.ndarray, transfers: Transfers,
    ) -> None:  # fmt: skip
        params, *slots = self.live = live  # what an update changes step by step
        self.params, self.slots, self.results = params, (*means, *slots), (params, *means)
        self.old, self.words = old, words
        self._job, self._begin, self._means = job, job.shards[number].begin, means
        room = np.zeros(old.shape[2], params.dtype)
        args = job, job.shards[number], rule, params, tuple(slots), room, transfers
        self._update = SliceUpdate(old, words, *args)

    def apply(self, step: int, rows: Sequence[np.ndarray], weights: np.ndarray) -> None:
        """Make update `step`, perhaps once more: who began with it may have died.

        Args:
            step: Its number.
            rows: Addresses of the workers' gradients, then of their vectors for each mean.
            weights: Their weights.
        """
        for mean, vectors in zip(self._means, rows[1:], strict=True):
            sum_rows(vectors, weights, self._begin, mean)
        self._update.apply(step, self._job.lr_scale, (rows[0], weights))


class SurvivableRound(SharedRound):
    """Rounds in the memory of one node, whose workers may die, but for the coordinator.

    Attributes:
        replicas: Its own one, then those to which means are written.
        rows_here: Addresses of the vectors of the node's workers, for each of them.
        memory: What the node's ranks share beside that of all rounds.
        turns: Words of each rank of this node: of barriers that it has reached.
    """

    def __init__(
        self,
        job: Job,
        rule: Rule | None = None,
        transfers: Transfers | None = None,
        means: Sequence[SharedRound] = (),
    ) -> None:
        """See `Round.__init__`; the means of the vectors of `means` are taken in the same rounds.

        Args:
            job: The run.
            rule: See there.
            transfers: See there.
            means: What has vectors beside this; its own `exchange` is not called.
        """
        super().__init__(job, rule, transfers)
        cluster = self._cluster
        self._moved = [self, *means]
        self.replicas = [each.replica for each in self._moved]
        self.rows_here = [each._addresses for each in self._moved]
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
        self._known = 0  # of the deaths
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
        """See `Round.publish_start`; from then on workers may die."""
        workers = self._cluster.roles.workers
        self._cluster.failures.spare(survivable(self._job), [workers])
        super().publish_start()

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`; the weights of those who die before it are divided."""
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
        """Return the weights in this round, without those of ranks that are not in it."""
        self._note_deaths(self._step)
        found, absent = np.array(weights), self._absent(self._step)
        if found[absent].any():
            found[absent] = 0
            found /= found.sum() or 1
        return found

    def _absent(self, step: int) -> np.ndarray:
        """Return which workers are not in a round."""
        firsts = self._left[[*self._cluster.roles.workers]]
        found: np.ndarray = (firsts > 0) & (firsts <= step)
        return found

    def _note_deaths(self, step: int) -> None:
        """Note who has died, and how many workers are left in a round."""
        if self._deaths[0] != self._known:
            self._known, self._numbers = self._deaths[0], self._owned()
            self.left = {rank: int(first) for rank, first in enumerate(self._left) if first}
        if self._job.config.scale_lr:
            self._job.lr_scale = 1 - float(self._absent(step).mean())

    def _apply(self, number: int) -> None:
        if not self._known or self._weights.any():
            self.slice_of(number).apply(self._step, self.rows_here, self._weights)

    def _recover(self, turn: int) -> None:
        """Let the others go on from barrier `turn`, if all that live wait for those that are dead.

        Raises:
            Lost: If that cannot be.
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
        """Return whether the gradient of a rank that has died counts in this round."""
        return self._updates

    def free(self) -> None:
        """See `Round.free`."""
        self._made.clear()
        self._moved, self.replicas = [], []
        self._left = self._owner = np.zeros(0, "i8")
        self._deaths = self._left.data
        self.turns = []
        self.memory.free()
        super().free()


def _fields(job: Job, rule: Rule, rank: int) -> tuple[Field, ...]:
    """Return what the memory of a rank holds beside that of all rounds."""
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
    """Compile, or load from the cache on disk, the loop that only such rounds need."""
    params, grad, *slots = np.zeros((2 + len(rule.slots), 1), dtype)
    undo = Undo(np.zeros((HALVES, 1 + len(slots), 1), dtype), np.zeros(8, np.int64), PIECE, 0)
    total = Sum(addresses_of([grad]), np.ones(1), 0, np.zeros(1, dtype))
    rule.apply_sum(params, total, tuple(slots), 1, 0.1, undo)


def kind_of(job: Job) -> type[SurvivableRound]:
    """Return the rounds of a job whose workers may die."""
    if job.config.mode == "hybrid":
        from mpips.rounds.survivable_hybrid import HybridNodesRound, HybridRound

        return HybridRound if job.cluster.nodes == 1 else HybridNodesRound
    if job.cluster.nodes > 1:
        from mpips.rounds.survivable_nodes import NodesRound

        return NodesRound
    return SurvivableRound


class SurvivableAveraging(AveragingRound):
    """Averages whose workers may die: of all vectors in one round."""

    def _make_round(self, job: Job, of_slots: Sequence[Round]) -> SurvivableRound:
        """See `AveragingRound`."""
        means = [each for each in of_slots if isinstance(each, SharedRound)]
        self._meeting = kind_of(job)(job, outer_rule(job), self.transfers, means)
        return self._meeting

    def owners(self) -> list[int]:
        """See `Round.owners`."""
        return self._meeting.owners()

    def slice_of(self, number: int) -> Slice:
        """See `Round.slice_of`."""
        return self._meeting.slice_of(number)

    def _exchange_all(self, step: int, weights: Weights, report: Report) -> Report:
        """See `AveragingRound`."""
        agreed = self._meeting.exchange(step, weights, report)
        self.left = self._meeting.left
        return agreed
