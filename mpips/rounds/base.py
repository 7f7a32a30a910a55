"""Base of all synchronous rounds: arrays, reports, transfers, an owner's update.

A rank brings a `Report` into a round beside its gradient, and takes the sum of all reports home.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from struct import Struct
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mpips.health import status_board
from mpips.kernels.vectors import sum_rows, sum_squares
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
# Arrays that a rank keeps from round to round beside its shard: by name, the position of the first
# element of each in the vector of that name, and a view.
OwnState: TypeAlias = dict[str, list[tuple[int, np.ndarray]]]


class Report(NamedTuple):
    """What each rank brings into a round beside its gradient; rounds add them up.

    Attributes:
        loss_sum: Loss summed over the rank's samples.
        checkpoint: 1 if a checkpoint is due.
        diverged: 1 if the loss was not finite.
        found: What `report_one` says of what evaluations have come to, one of `RESULTS`.
        stopped: What it says of one of `STOPS`: a worker's program asked for the end, or has left.
        signals: What it says of one of `SIGNALS` that came; see `first_reported`.
        rate: How far the rank's factor of the learning rate is from 1, times its share of the
            samples: 1 and the sum are the mean factor, exactly 1 where nobody sets any.
        frozen: 1 if a worker's program has frozen other arrays than the ranks have agreed on.
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
DIGIT = 1 << 17  # counts of so many ranks stand side by side in a double


def report_one(names: Sequence[str], name: str) -> float:
    """Return what a report says of one of several names; 0 of anything else."""
    return float(DIGIT ** names.index(name)) if name in names else 0.0


def first_reported(names: Sequence[str], total: float) -> str:
    """Return the first of some names that any rank has reported, by the sum; empty if none."""
    counts = int(total)
    for name in names:
        counts, told = divmod(counts, DIGIT)
        if told:
            return name
    return ""


class Transfers:
    """What a round sends and waits for, counted; several rounds may count in one.

    An Allreduce counts as what it stands for: a reduce-scatter of sums and an all-gather of results
    over the nodes, in which each node sends and has all but its own share, and its ranks equal
    parts of that.

    Attributes:
        waited_s: Seconds that this rank waited for others; `busy_s`, that it updated.
        bytes_sent: Sums that this rank sent to other nodes.
        bytes_received: Results that it had from other nodes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.waited_s = self.busy_s = 0.0
        self.bytes_sent = self.bytes_received = 0.0

    def begin_sum(self, comm: Comm, part: np.ndarray) -> Request:
        """Begin to add up `part` in place over all ranks, or one of each node."""
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
    """One world's synchronous round.

    Attributes:
        replica: All parameters, shape (n_params,); between rounds the same on every worker, but
            for what a pull codec makes of the slices that other nodes own.
        grad: A worker's gradient, shape (n_params,).
        params: An owner's shard of `replica`, shape (shard.size,).
        slots: An owner's slots, each of that shape.
        transfers: What was sent, and how long this rank waited.
        tables: Tables of rows beside the parameters; None without any.
        left: The first round without each rank that has died, by rank.
    """

    tables: "RoundTables | HybridTables | None" = None
    left: Mapping[int, int] = MappingProxyType({})

    def __init__(
        self, job: Job, rule: Rule | None = None, transfers: Transfers | None = None
    ) -> None:
        """Make the round of a job. Collective: yes.

        Args:
            job: The run.
            rule: Takes the sum as it is, not clipped, in place of the job's rule.
            transfers: Where to count, by default a fresh one.
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
        """Sum the gradients, update the parameters, share the result.

        Args:
            step: Number of this update, 1 for the first of a run.
            weights: Each worker's share in the mean, best as float64 of shape (workers,);
                gradients of weight 0 are not read.
            report: This rank's part.

        Returns:
            The sum of all reports, the same on every rank.

        Collective: yes. Blocks: until the round is over; never inside MPI.
        """

    @property
    def frozen_anew(self) -> bool:
        """Whether this rank's program has frozen other arrays than all have agreed on."""
        return self._sets_rate and self._job.frozen != self._frozen

    def owners(self) -> list[int]:
        """Return the rank that owns each shard, between two rounds."""
        return [*self._cluster.roles.owners]

    def slice_of(self, number: int) -> "Round | Slice":
        """Return what has the parameters and slots of a shard that this rank owns."""
        return self

    def own_state(self) -> OwnState:
        """Return what this rank keeps for its node between rounds, as views; {} if nothing."""
        return {}

    @abstractmethod
    def publish_start(self) -> None:
        """Share what the owners have filled in before the first round. Collective: yes."""

    def compare(self, step: int) -> None:  # noqa: B027  (most rounds have nothing to compare)
        """Compare what several nodes compute for themselves, after round `step`.

        Collective: yes. Blocks: until all have come; never inside MPI.

        Raises:
            UserError: On every rank, if it is not the same on all nodes, bit for bit.
        """

    def free(self) -> None:
        """Free what the round holds; may be called twice. Collective: yes."""
        self.replica = self.grad = self.params = np.zeros(0)
        self.slots = ()
        free(self._owners)

    def _leave_frozen(self, anew: float) -> None:
        """Leave alone in this update what every worker has frozen.

        Args:
            anew: Sum of `Report.frozen`; where it is not zero they agree first.

        Collective: yes, where they agree. Blocks: until all have come then.
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
        """Apply another rule from this update on."""

    def _clip(self, grad: np.ndarray, more: float = 0.0) -> float:
        """Scale an owner's slice of the mean gradient by the norm of the whole.

        Args:
            grad: The slice.
            more: Sum of the squares of what the owner has beside it, in the whole too.

        Returns:
            The factor.
        """
        grad = grad[: max(0, self._job.trained - self._job.shard.begin)]
        total = np.array([sum_squares(grad) + more])
        self.transfers.wait([begin_sum(self._owners, total)])
        factor = clip_factor(float(total[0]), self._max_norm)
        grad *= grad.dtype.type(factor)
        return factor


BLOCK_BYTES = 1 << 17  # of the sum, which stays in the cache until the rule has used it


class ShardUpdate:
    """Applies a rule to what this owner updates.

    Args:
        job: The run.
        shard: What is updated.
        rule: The rule.
        params: The shard's parameters, shape (shard.size,).
        slots: Its slots, each of that shape.
        grad: As large as the shard, or room for a block of what is summed.
        transfers: Where the time is counted.
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
        """Apply this rule from now on, in blocks; views of them are made once."""
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

        None if the rule has several loops, or none.

        Args:
            rows: Addresses of the gradients.
        """
        if len(self._blocks) != 1 or self._blocks[0][0].rule.kernel is None:
            return None
        (begin, _, rule, _), params, _, slots = self._blocks[0]
        return rule.round_loop, params, *slots, rows, begin, self._grad

    def rates(self, step: int, factor: float) -> tuple[float, ...]:
        """Return the rates of the step in update `step`, where the rule has one loop."""
        _, _, rule, scale = self._blocks[0][0]
        return rule.scalars(step, self._rate(step) * factor * scale)

    def apply(
        self, step: int, factor: float = 1.0, sources: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """Make update `step`.

        Args:
            step: Its number.
            factor: Of the learning rate.
            sources: Addresses and weights of the rows whose sum is the gradient; None where it is
                in its place.
        """
        start = perf_counter()
        lr, remote = self._rate(step) * factor, self._cluster.nodes > 1
        for (begin, _, rule, scale), params, grad, slots in self._blocks:
            if sources and params.size > grad.size:
                rule.apply_sum(params, Sum(*sources, begin, grad), slots, step, lr * scale)
            else:  # of what fits into the room, two calls are sooner made than one that cuts it
                if sources:
                    sum_rows(*sources, begin, grad)
                rule.apply(params, grad, slots, step, lr * scale)
            if remote:
                self._cluster.progress()
        self._transfers.busy_s += perf_counter() - start


def _cut(parts: Iterable[Part], size: int) -> Iterator[Part]:
    """Cut parts into blocks of at most so many elements, but for rules that take whole arrays."""
    for part in parts:
        step = part.end - part.begin if part.rule.whole else size
        for begin in range(part.begin, part.end, step):
            yield part._replace(begin=begin, end=min(begin + step, part.end))
