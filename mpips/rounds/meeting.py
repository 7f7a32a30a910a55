"""What every synchronous round has, and how the ranks of a node meet in it.

A rank brings a `Report` into a round beside its gradient, and takes the sum of all reports home.
The ranks of a node share memory in a `NodeRound`: between two meetings each writes what is its
own, and after the next meeting all may read it. What nodes have to agree on goes through their
leaders, the first rank of each.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from struct import Struct
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np

from mpips.cluster.window import Field, Plan, Window
from mpips.cluster.world import Comm, Request, all_done, begin_sum, cluster_subset, free
from mpips.kernels.barrier import meet, meet_and_add
from mpips.kernels.vectors import addresses_of, sum_rows, sum_squares
from mpips.layout import Shard
from mpips.optim import Rule, Slots, clip_factor
from mpips.planning.job import Job

LOOKS = 30_000  # at a word before the core is offered: 10 to 30 us
BLOCK_BYTES = 1 << 17  # of the sum, which stays in the cache until the rule has used it

Weights: TypeAlias = np.ndarray | Sequence[float]
# Arrays that a rank keeps from round to round beside its shard: by name, the position of the first
# element of each in the vector of that name, and a view.
OwnState: TypeAlias = dict[str, list[tuple[int, np.ndarray]]]


class Report(NamedTuple):
    """What each rank brings into a round beside its gradient; rounds add them up.

    Attributes:
        loss_sum: Loss summed over the rank's samples.
        samples: Number of its samples.
        checkpoint: 1 if a checkpoint is due.
        diverged: 1 if the loss was not finite.
        target: 1 if the accuracy aimed at was reached.
        sigusr1: 1 if that signal came; `sigterm` and `sigint` likewise.
    """

    loss_sum: float = 0.0
    samples: float = 0.0
    checkpoint: float = 0.0
    diverged: float = 0.0
    target: float = 0.0
    sigusr1: float = 0.0
    sigterm: float = 0.0
    sigint: float = 0.0


REPORT = Struct(f"{len(Report._fields)}d")  # writes and reads reports faster than NumPy


class Round(ABC):
    """One world's synchronous round.

    Attributes:
        replica: All parameters, shape (n_params,); between rounds the same on every worker, but
            for what a pull codec makes of the slices that other nodes own.
        grad: This worker's gradient, shape (n_params,).
        params: The owner's shard of `replica`, shape (shard.size,).
        slots: The owner's slots, each of that shape.
        waited_s: Seconds that this rank waited for others; `busy_s`, that it updated.
        bytes_sent: Sums that this rank sent to owners on other nodes, or gave an Allreduce.
        bytes_received: Results that it had from owners on other nodes, or from an Allreduce.
    """

    replica: np.ndarray
    grad: np.ndarray
    params: np.ndarray
    slots: tuple[np.ndarray, ...]

    def __init__(self, job: Job, rule: Rule | None = None) -> None:
        """Make the round of `job`, or one whose sum goes to `rule` as it is, not clipped."""
        self._job, self._cluster = job, job.cluster
        self._rule, self._max_norm = rule or job.rule, 0.0 if rule else job.config.clip
        self._rate = job.rate()
        self._owners = cluster_subset(self._cluster, self._cluster.roles.owners)
        self.waited_s = self.busy_s = 0.0
        self.bytes_sent = self.bytes_received = 0
        self._blocks: list[tuple[int, np.ndarray, np.ndarray, Slots]] = []

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
        self.slots, self._blocks = (), []
        free(self._owners)

    def _add_up(self, comm: Comm, part: np.ndarray) -> Request:
        """Begin to add up `part` in place over ranks of all nodes."""
        if self._cluster.nodes > 1:
            self.bytes_sent += part.nbytes
            self.bytes_received += part.nbytes
        return begin_sum(comm, part)

    def _wait(self, requests: list[Request]) -> None:
        self.waited_s += self._cluster.wait(lambda: all_done(requests))

    def _cut(self, shard: Shard, grad: np.ndarray) -> None:
        """Cut the shard into blocks; `grad` is as large as it, or one block that serves for all."""
        size, whole = BLOCK_BYTES // grad.itemsize, grad.size == shard.size
        for begin in range(0, shard.size, size):
            block = slice(begin, min(begin + size, shard.size))
            part = grad[block] if whole else grad[: block.stop - begin]
            slots = tuple(slot[block] for slot in self.slots)
            self._blocks.append((shard.begin + begin, self.params[block], part, slots))

    def _apply(self, step: int, sources: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        """Apply the rule block by block; a block's gradient is the sum of rows with weights."""
        start = perf_counter()
        apply, lr, far = self._rule.apply, self._rate(step), self._cluster.nodes > 1
        for begin, params, grad, slots in self._blocks:
            if sources:
                sum_rows(*sources, begin, grad)
            apply(params, grad, slots, step, lr)
            if far:
                self._cluster.progress()
        self.busy_s += perf_counter() - start

    def _clip(self, grad: np.ndarray) -> None:
        """Scale an owner's slice of the mean gradient by the norm of the whole."""
        total = np.array([sum_squares(grad)])
        self._wait([begin_sum(self._owners, total)])
        grad *= grad.dtype.type(clip_factor(float(total[0]), self._max_norm))


class NodeRound(Round):
    """A round of ranks that share the memory of their node. Collective: yes, construction too.

    A subclass adds its own fields to each rank's segment in `_fields`.
    """

    def __init__(self, job: Job, rule: Rule | None = None) -> None:
        super().__init__(job, rule)
        cluster = self._cluster
        plans = [self._plan(rank) for rank in range(cluster.world)]
        self._window = Window(cluster, plans, job.config.window == "shared", far_reads=False)
        view = self._window.view
        self._leader = cluster.my_node[0]
        self._leads = cluster.rank == self._leader
        self._leaders = cluster_subset(cluster, leaders(cluster.node_of))
        self._turn = 0
        ranks = [cluster.rank, *(r for r in cluster.my_node if r != cluster.rank)]
        self._words = addresses_of([view(r, "header") for r in ranks])
        # Whoever offers the core may get it back late, and other nodes may wait for this rank.
        self._looks = LOOKS if not cluster.crowded else 1 if cluster.nodes == 1 else 0
        self._report = view(cluster.rank, "report").data
        self._reports = addresses_of([view(r, "report") for r in cluster.my_node])
        self._sums = np.zeros(8)
        self._agreed = (view(self._leader, "agreed") if cluster.nodes > 1 else self._sums).data
        self.replica = view(self._leader, "replica")
        self._workers = [w for w, r in enumerate(cluster.roles.workers) if cluster.near(r)]
        near = [r for r in cluster.roles.workers if cluster.near(r)]
        self._addresses = addresses_of([view(r, "grad") for r in near])
        if job.worker_id is not None:
            self.grad = view(cluster.rank, "grad")
        self._owner = cluster.rank in cluster.roles.owners

    def _plan(self, rank: int) -> Plan:
        cluster, dtype, n = self._cluster, self._job.config.dtype, self._job.layout.size
        found = [Field("header", "i8", (8,)), Field("report", "f8", (8,))]
        found.append(Field("agreed", "f8", (8,)))
        if rank in leaders(cluster.node_of):
            found.append(Field("replica", dtype, (n,)))
        if rank in cluster.roles.workers:
            found.append(Field("grad", dtype, (n,)))
        return Plan((*found, *self._fields(rank)))

    @abstractmethod
    def _fields(self, rank: int) -> list[Field]:
        """Return what else the segment of a rank holds."""

    def _meet(self, met: Callable[..., bool] = meet, *rows: np.ndarray) -> None:
        """Wait for the node's ranks; their stores before are seen after. Collective: node."""
        start = perf_counter()
        self._turn += 1
        if not met(self._words, self._turn, self._looks, *rows):
            self._cluster.wait(lambda: met(self._words, self._turn, 0, *rows))
        self.waited_s += perf_counter() - start

    def _enter(self, report: Report) -> None:
        """Bring a report, meet, and add up the reports of the node. Collective: node."""
        REPORT.pack_into(self._report, 0, *report)
        self._meet(meet_and_add, self._reports, self._sums)

    def _begin_agreeing(self) -> list[Request]:
        """Begin to add up the nodes' reports, on leaders; `_agree` comes when it is done."""
        return [self._add_up(self._leaders, self._sums)] if self._leads else []

    def _agree(self) -> None:
        """Tell the node the sum of all reports, on leaders."""
        if self._leads:
            self._agreed[:] = self._sums.data

    def _leave(self) -> Report:
        """Meet again, and return the sum of all reports. Collective: node."""
        self._meet()
        return Report._make(REPORT.unpack_from(self._agreed))

    def free(self) -> None:
        """See `Round.free`."""
        super().free()
        self._report = self._agreed = memoryview(b"")
        self._window.free()
        free(self._leaders)


def leaders(node_of: Sequence[int]) -> list[int]:
    """Return the first rank of each node."""
    return sorted({node_of.index(node) for node in node_of})
