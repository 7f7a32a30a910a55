"""Base of all synchronous rounds: arrays, reports, transfers, an owner's update.

Each rank contributes a gradient and a `Report` to a round. It gets the new parameters and the sum
of all reports.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from struct import Struct
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mpips.health import status_board
from mpips.kernels.vectors import scale, sum_rows, sum_squares
from mpips.layout import Shard
from mpips.mpi.collectives import begin_sum, cluster_subset, free, gather_polled
from mpips.mpi.start import Comm, Request
from mpips.mpi.waiting import all_done
from mpips.mpi.world import Cluster
from mpips.optim import Part, Ranges, Rule, Slots, Sum, clip_factor, common
from mpips.planning.job import STOPPED, Job

if TYPE_CHECKING:
    from mpips.rounds.survivable import Slice
    from mpips.tables.hybrid import HybridTables
    from mpips.tables.rounds import RoundTables


Weights: TypeAlias = np.ndarray | Sequence[float]
# Arrays that a rank keeps from round to round beside its shard. For each name: the index of the
# array's first element in the flat vector of that name, and a view of the array.
OwnState: TypeAlias = dict[str, list[tuple[int, np.ndarray]]]


class Report(NamedTuple):
    """Numbers that each rank contributes to a round; the round adds them up.

    Attributes:
        loss_sum: Loss summed over the rank's samples.
        checkpoint: 1 if a checkpoint is due.
        diverged: 1 if the loss was not finite.
        found: One of `RESULTS` as `report_one` encodes it: an evaluation asks to end the run.
        stopped: One of `STOPS`, likewise: a worker's program asks to end the run, or has ended.
        signals: One of `SIGNALS`, likewise: the rank has received this signal.
        rate: Difference of the rank's factor of the learning rate from 1, times the rank's share
            of the samples. The sum plus 1 is the mean factor, and is exactly 1 if no program sets
            a factor.
        frozen: 1 if a worker's program freezes other arrays than the ranks have agreed on.
    """

    loss_sum: float = 0.0
    checkpoint: float = 0.0
    diverged: float = 0.0
    found: float = 0.0
    stopped: float = 0.0
    signals: float = 0.0
    rate: float = 0.0
    frozen: float = 0.0


REPORT = Struct(f"{len(Report._fields)}d")  # writes and reads reports faster than NumPy
RATE, FROZEN = map(Report._fields.index, ("rate", "frozen"))
SIGNALS = ("SIGUSR1", "SIGTERM", "SIGINT")
RESULTS = ("target", "patience")
STOPS = (STOPPED, "left")
DIGIT = 1 << 17  # base of the number system in which a report counts ranks by name


def report_one(names: Sequence[str], name: str) -> float:
    """Return the number that reports one of several names, or 0 for any other name."""
    return float(DIGIT ** names.index(name)) if name in names else 0.0


def first_reported(names: Sequence[str], total: float) -> str:
    """Return the first name that any rank has reported, or an empty string if there is none.

    Args:
        names: The names, as in `report_one`.
        total: Sum of all ranks' numbers.
    """
    counts = int(total)
    for name in names:
        counts, told = divmod(counts, DIGIT)
        if told:
            return name
    return ""


class Transfers:
    """Counters of traffic and time; several rounds may share them.

    An Allreduce counts as a reduce-scatter of sums and an all-gather of results over the nodes.
    Each node sends, and receives, all but its own share, and each of its ranks an equal part.

    Attributes:
        waited_s: Seconds that this rank waited for other ranks.
        busy_s: Seconds that it spent in updates.
        bytes_sent: Bytes of sums that it sent to other nodes.
        bytes_received: Bytes of results that it received from other nodes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.waited_s = self.busy_s = 0.0
        self.bytes_sent = self.bytes_received = 0.0

    def begin_sum(self, comm: Comm, part: np.ndarray) -> Request:
        """Begin an in-place Allreduce of `part` over all ranks, or over one rank of each node."""
        nodes, here = self._cluster.nodes, len(self._cluster.my_node)
        crosses = part.nbytes * (nodes - 1) / nodes / (here if comm.size > nodes else 1)
        self.bytes_sent += crosses
        self.bytes_received += crosses
        return begin_sum(comm, part)

    def wait(self, requests: list[Request]) -> None:
        """Wait until all are complete."""
        self.wait_until(lambda: all_done(requests))

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`."""
        self.waited_s += self._cluster.wait(done, status_board.ROUND)


class Round(ABC):
    """Synchronous round of all ranks.

    Attributes:
        replica: All parameters, shape (n_params,). Between rounds they are the same on every
            worker, unless a pull codec compresses the slices that other nodes own.
        grad: A worker's gradient, shape (n_params,).
        params: An owner's shard of `replica`, shape (shard.size,).
        slots: An owner's slots, each of shape (shard.size,).
        transfers: Counters of traffic and time.
        tables: Embedding tables of the job, or None.
        left: For each rank that has died, the number of the first round without it.
    """

    tables: "RoundTables | HybridTables | None" = None
    left: Mapping[int, int] = MappingProxyType({})

    def __init__(
        self, job: Job, rule: Rule | None = None, transfers: Transfers | None = None
    ) -> None:
        """Make the round of a job. Collective: yes.

        Args:
            job: The run.
            rule: Rule that gets the sum without clipping, in place of the job's rule.
            transfers: Counters to use; by default new ones.
        """
        self._job, self._cluster = job, job.cluster
        self._rule, self._max_norm = rule or job.rule, 0.0 if rule else job.config.clip
        self._sets_rate = job.sets_rate and rule is None
        self._frozen: Ranges = ()  # what this rank's program had frozen when all agreed
        self._owners = cluster_subset(self._cluster, self._cluster.roles.owners)
        self.transfers = transfers or Transfers(self._cluster)
        self.replica = self.grad = self.params = np.zeros(0, job.dtype)
        self.slots: Slots = ()

    @abstractmethod
    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """Sum the gradients, update the parameters, and share the result.

        Args:
            step: Number of this update; the first of a run is 1.
            weights: Weight of each worker in the mean, shape (workers,), best as float64. A
                gradient of weight 0 is not read.
            report: This rank's report.

        Returns:
            The sum of all reports, the same on every rank.

        Collective: yes. Blocks: until the round is over; never inside MPI.
        """

    @property
    def frozen_anew(self) -> bool:
        """Whether this rank's program freezes other arrays than the ranks have agreed on."""
        return self._sets_rate and self._job.frozen != self._frozen

    def owners(self) -> list[int]:
        """Return the rank that owns each shard, between two rounds."""
        return [*self._cluster.roles.owners]

    def slice_of(self, number: int) -> "Round | Slice":
        """Return the object that holds parameters and slots of a shard that this rank owns."""
        return self

    def own_state(self) -> OwnState:
        """Return views of the arrays that this rank keeps for its node between rounds."""
        return {}

    @abstractmethod
    def publish_start(self) -> None:
        """Share the owners' initial parameters with all ranks. Collective: yes."""

    def compare(self, step: int) -> None:  # noqa: B027  (most rounds have nothing to compare)
        """Compare the parameters that each node computes for itself, after round `step`.

        Collective: yes. Blocks: until all ranks have called it; never inside MPI.

        Raises:
            UserError: On every rank, if the bits differ between nodes.
        """

    def free(self) -> None:
        """Free the round's memory and communicators; may be called twice. Collective: yes."""
        self.replica = self.grad = self.params = np.zeros(0)
        self.slots = ()
        free(self._owners)

    def _leave_frozen(self, anew: float) -> None:
        """Exclude the arrays from this update that every worker's program has frozen.

        Args:
            anew: Sum of `Report.frozen`. If it is not 0, the ranks first agree on the arrays.

        Collective: yes, if `anew` is not 0. Blocks: then until all ranks have called it.
        """
        leaving, cluster = self._job.leaving, self._cluster
        if anew:
            self._frozen = self._job.frozen
            found = gather_polled(
                cluster.comm, self._frozen, lambda one: self.transfers.wait([one])
            )
            if leaving.leave(common(found[rank] for rank in cluster.roles.workers)):
                self._apply_by(leaving.rule)
        leaving.count()

    def _apply_by(self, rule: Rule) -> None:  # noqa: B027  (rounds that are given a rule keep it)
        """Use another rule, from this update on."""

    def _clip(self, grad: np.ndarray, more: float = 0.0) -> float:
        """Clip an owner's slice of the mean gradient by the norm of the whole gradient.

        Args:
            grad: The slice; scaled in place.
            more: Sum of squares of the owner's further part of the gradient: rows of tables.

        Returns:
            The factor by which the slice was scaled.
        """
        grad = grad[: max(0, self._job.trained - self._job.shard.begin)]
        total = np.array([sum_squares(grad) + more])
        self.transfers.wait([begin_sum(self._owners, total)])
        factor = clip_factor(float(total[0]), self._max_norm)
        scale(grad, factor)
        return factor


BLOCK_BYTES = 1 << 17  # a block of the sum; it stays in the CPU's cache until the rule reads it


class ShardUpdate:
    """Update of one shard by a rule.

    Args:
        job: The run.
        shard: The shard.
        rule: The rule.
        params: The shard's parameters, shape (shard.size,).
        slots: Its slots, each of shape (shard.size,).
        grad: Memory for the whole gradient, shape (shard.size,), or for one block of it.
        transfers: Counters of time.
    """

    def __init__(
        self,
        job: Job,
        shard: Shard,
        rule: Rule,
        params: np.ndarray,
        slots: Slots,
        grad: np.ndarray,
        transfers: Transfers,
    ) -> None:
        self._cluster, self._rate = job.cluster, job.rate()
        self._transfers = transfers
        self._shard, self._params, self._slots, self._grad = shard, params, slots, grad
        self._blocks: list[tuple[Part, np.ndarray, np.ndarray, Slots]] = []
        self.cut(rule)

    def cut(self, rule: Rule) -> None:
        """Use this rule from now on, and make the views of its blocks."""
        params, grad, begin = self._params, self._grad, self._shard.begin
        whole = grad.size == params.size
        self._blocks.clear()
        most = BLOCK_BYTES // grad.itemsize if self._cluster.nodes > 1 else max(1, params.size)
        for part in _cut(rule.parts(begin, self._shard.end), most):
            block = slice(part.begin - begin, part.end - begin)
            of_block = grad[block] if whole else grad[: part.end - part.begin]
            views = tuple(slot[block] for slot in self._slots)
            self._blocks.append((part, params[block], of_block, views))

    def arguments(self, rows: np.ndarray) -> tuple[Any, ...] | None:
        """Return the loop of a whole round, and its arguments from the parameters to the buffer.

        Return None if the update is not one call of one loop.

        Args:
            rows: Addresses of the gradients.
        """
        if len(self._blocks) != 1 or self._blocks[0][0].rule.kernel is None:
            return None
        (begin, _, rule, _), params, _, slots = self._blocks[0]
        return rule.round_loop, params, *slots, rows, begin, self._grad

    def rates(self, step: int, factor: float) -> tuple[float, ...]:
        """Return the rates of the rule's step in update `step`, for the loop of `arguments`."""
        _, _, rule, of_part = self._blocks[0][0]
        return rule.scalars(step, self._rate(step) * factor * of_part)

    def apply(
        self, step: int, factor: float = 1.0, sources: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """Make update number `step`.

        Args:
            step: Number of the update.
            factor: Factor of the learning rate.
            sources: Addresses and weights of the gradients to sum. None if the gradient is in the
                memory given for it.
        """
        start = perf_counter()
        lr, remote = self._rate(step) * factor, self._cluster.nodes > 1
        for (begin, _, rule, of_part), params, grad, slots in self._blocks:
            if sources and not rule.whole:
                rule.apply_sum(params, Sum(*sources, begin, grad), slots, step, lr * of_part)
            else:
                if sources:
                    sum_rows(*sources, begin, grad)
                rule.apply(params, grad, slots, step, lr * of_part)
            if remote:
                self._cluster.progress()
        self._transfers.busy_s += perf_counter() - start


def _cut(parts: Iterable[Part], size: int) -> Iterator[Part]:
    """Divide parts into blocks of at most `size` elements, except for rules of whole arrays."""
    for part in parts:
        step = part.end - part.begin if part.rule.whole else size
        for begin in range(part.begin, part.end, step):
            yield part._replace(begin=begin, end=min(begin + step, part.end))
