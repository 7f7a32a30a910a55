"""Base of rounds in a node's shared memory, and their barrier.

Between two barriers each rank writes its own memory only; after the next barrier all ranks of the
node may read it. The barrier also adds up the ranks' reports. The leader of a node is its first
rank.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias

import numpy as np

from mpips.health import status_board
from mpips.kernels.atomics import meet, meet_and_add
from mpips.kernels.vectors import addresses_of
from mpips.mpi.collectives import cluster_subset, first_ranks, free
from mpips.mpi.start import Request
from mpips.mpi.window import Field, Parts, Plan, Window
from mpips.mpi.world import Cluster
from mpips.optim import Rule
from mpips.planning.job import Job
from mpips.rounds.base import FROZEN, RATE, REPORT, Report, Round, Transfers
from mpips.rounds.internode import agent_of

CompiledRound: TypeAlias = Callable[[Report, np.ndarray, Iterable[float]], Report]
LOOKS = 30_000  # failed polls before a rank yields its core: 10 to 30 us
TURN, BEGUN = 0, 1  # words of a rank's header: last barrier it reached, number of its `begin`s
# Fields of each rank's segment.
FIELDS = Field("header", "i8", (8,)), Field("report", "f8", (8,)), Field("agreed", "f8", (8,))


class NodeBarrier:
    """Barrier of this rank's node. Its methods are collective on the node.

    Args:
        cluster: The job's ranks.
        window: Window shared by the ranks of the node; each segment has `FIELDS`.
        transfers: Counters of the time spent waiting.

    Attributes:
        sums: Sum of the node's reports, shape (8,). With several nodes, each node's leader makes
            it the sum over all nodes before it calls `publish_sums`.
        recover: Function called with the barrier's number while this rank waits, or None.
    """

    recover: Callable[[int], object] | None = None

    def __init__(self, cluster: Cluster, window: Window, transfers: Transfers) -> None:
        view, leader = window.view, cluster.my_node[0]
        self._cluster, self._transfers = cluster, transfers
        self._turn = 0
        ranks = [cluster.rank, *(r for r in cluster.my_node if r != cluster.rank)]
        headers = [view(r, "header") for r in ranks]
        self._words, self._begun_words = (addresses_of(headers, word) for word in (TURN, BEGUN))
        self._begun = 0
        # A rank that yields its core may get it back late, while other nodes wait for this rank.
        self._looks = LOOKS if cluster.ranks_per_core <= 1 else 1 if cluster.nodes == 1 else 0
        self._report = view(cluster.rank, "report")
        self._reports = addresses_of([view(r, "report") for r in cluster.my_node])
        self.sums, self._seconds = np.zeros(8), np.zeros(2)
        self._agreed = (view(leader, "agreed") if cluster.nodes > 1 else self.sums).data

    @property
    def turn(self) -> int:
        """Number of barriers that this rank has reached."""
        return self._turn

    def enter(self, report: Report) -> None:
        """Wait for all ranks of the node, and add up their reports."""
        REPORT.pack_into(self._report.data, 0, *report)
        self._meet(meet_and_add, self._reports, self.sums)

    def wait(self) -> None:
        """Wait for all ranks of the node; all that they wrote before is then visible."""
        self._meet(meet)

    def _meet(self, arrive: Callable[..., bool], *sums: np.ndarray) -> None:
        start = perf_counter()
        self._turn += 1
        met = arrive(self._words, self._turn, self._looks, *sums)
        self._transfers.waited_s += perf_counter() - start
        if not met:
            self._look_on(arrive, *sums)

    def begin(self) -> None:
        """Count that this rank has begun a piece of work; see `all_begun`. Blocks: no."""
        self._begun += 1
        meet(self._begun_words, self._begun, 0)

    def all_begun(self) -> bool:
        """Return whether all ranks of the node have called `begin` as often as this rank.

        If so, all that they wrote before is visible. Blocks: no.
        """
        return meet(self._begun_words, self._begun, 0)

    def publish_sums(self) -> None:
        """Copy `sums` to shared memory, on the leader, for the other ranks of the node."""
        self._agreed[:] = self.sums.data

    @property
    def factor(self) -> float:
        """Mean factor of the learning rate; valid once the reports are added up."""
        return 1 + self._agreed[RATE]

    @property
    def frozen(self) -> float:
        """Number of ranks that freeze other arrays than before; valid likewise."""
        return self._agreed[FROZEN]

    def leave(self) -> Report:
        """Wait for all ranks of the node, and return the sum of all reports."""
        self._meet(meet)
        return self._sum()

    def round_of(self, loop: Callable[..., int], *args: object) -> CompiledRound:
        """Make a function that makes a whole round by one loop.

        Args:
            loop: A loop of `mpips.kernels.exchange.whole_round`.
            args: The loop's arguments from the parameters to the buffer.

        Returns:
            A function of this rank's report, the weights of the gradients, and the rates of the
            rule's step. It returns the sum of all reports.
        """
        barriers = self._words, self._looks, self._reports, self.sums, self._report, self._seconds
        bound = partial(loop, *barriers, *args)

        def run(report: Report, weights: np.ndarray, rates: Iterable[float]) -> Report:
            self._turn = turn = self._turn + 1
            reached = bound(weights, turn, 0, *rates, *report)
            if not reached:
                self._look_on(meet_and_add, self._reports, self.sums)
                reached = bound(weights, turn, 1, *rates, *report)
            self._turn += 1
            waited_s, busy_s = self._seconds.tolist()
            self._transfers.waited_s += waited_s
            self._transfers.busy_s += busy_s
            if reached < 2:
                self._look_on(meet)
            return self._sum()

        return run

    def _sum(self) -> Report:
        return tuple.__new__(Report, REPORT.unpack_from(self._agreed))  # `_make` is a call more

    def _look_on(self, met: Callable[..., bool], *rows: np.ndarray) -> None:
        def has_met() -> bool:
            if met(self._words, self._turn, 0, *rows):
                return True
            if self.recover is not None:
                self.recover(self._turn)
            return False

        self._transfers.waited_s += self._cluster.wait(has_met, status_board.ROUND)

    def free(self) -> None:
        """Drop the views of the window; may be called twice."""
        self.recover = None
        self._report, self._agreed = np.zeros(0), memoryview(b"")


class NodeRound(Round):
    """Round of ranks that share the memory of their node. Collective: yes, construction too."""

    def __init__(
        self,
        job: Job,
        rule: Rule | None,
        transfers: Transfers | None,
        fields: Sequence[Sequence[Field]] | None = None,
        parts: Parts = (),
    ) -> None:
        """Make the round; see `Round.__init__`.

        Args:
            job: The run.
            rule: See `Round.__init__`.
            transfers: See `Round.__init__`.
            fields: Further fields of each rank's segment; by default the owners' slots.
            parts: Writing rank and range of each part of this node's replica; by default the
                shards, written by their owners or by agents of remote owners.
        """
        super().__init__(job, rule, transfers)
        cluster, found = self._cluster, fields or _slot_fields(job, self._rule)
        common = _fields(job, parts or _shard_parts(job))
        plans = [Plan((*common[rank], *found[rank])) for rank in range(cluster.world)]
        self._window = Window(cluster, plans, job.config.window == "shared", remote_reads=False)
        view = self._window.view
        self._leader = cluster.my_node[0]
        self._leads = cluster.rank == self._leader
        self._leaders = cluster_subset(cluster, first_ranks(cluster.node_of))
        self._barrier = NodeBarrier(cluster, self._window, self.transfers)
        self.replica = view(self._leader, "replica")
        if cluster.rank in cluster.roles.owners:
            self.params = self.replica[job.shard.range]
            if fields is None:
                self.slots = tuple(view(cluster.rank, f"slots/{s}") for s in self._rule.slots)
        local = [(w, r) for w, r in enumerate(cluster.roles.workers) if cluster.is_local(r)]
        self._workers = [worker for worker, _ in local]
        self._addresses = addresses_of([view(rank, "grad") for _, rank in local])
        if job.worker_id is not None:
            self.grad = view(cluster.rank, "grad")

    def _begin_report_sum(self) -> list[Request]:
        """Begin to add up the nodes' reports, on leaders, before `_publish_report_sum`."""
        return [self.transfers.begin_sum(self._leaders, self._barrier.sums)] if self._leads else []

    def _publish_report_sum(self) -> None:
        """Copy the sum of all reports to the node's shared memory, on leaders."""
        if self._leads:
            self._barrier.publish_sums()

    def free(self) -> None:
        """See `Round.free`."""
        super().free()
        self._barrier.free()
        self._window.free()
        free(self._leaders)


def _slot_fields(job: Job, rule: Rule) -> list[list[Field]]:
    """Return the fields of each rank's segment that hold slots."""
    found: list[list[Field]] = [[] for _ in range(job.cluster.world)]
    for rank, shard in zip(job.cluster.roles.owners, job.shards, strict=True):
        found[rank] = [Field(f"slots/{s}", job.config.dtype, (shard.size,)) for s in rule.slots]
    return found


def _shard_parts(job: Job) -> Parts:
    """Return writing rank and range of each shard of this node's replica.

    The owner writes its shard on its own node. On another node the owner's agent writes it.
    """
    cluster, found = job.cluster, []
    for owner, (rank, shard) in enumerate(zip(cluster.roles.owners, job.shards, strict=True)):
        writer = rank if cluster.is_local(rank) else agent_of(cluster.my_node, owner)
        found.append((writer, shard.begin, shard.end))
    return tuple(found)


def _fields(job: Job, parts: Parts) -> list[list[Field]]:
    """Return the fields of each rank's segment that all rounds have."""
    cluster, dtype, n = job.cluster, job.config.dtype, job.layout.size
    found = [[*FIELDS] for _ in range(cluster.world)]
    for rank in first_ranks(cluster.node_of):
        found[rank].append(Field("replica", dtype, (n,), parts=parts * cluster.is_local(rank)))
    for rank in cluster.roles.workers:
        found[rank].append(Field("grad", dtype, (n,)))
    return found
