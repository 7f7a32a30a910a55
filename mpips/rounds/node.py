"""Base of rounds in which the ranks of a node share memory.

The leader of a node is its first rank.
"""

from collections.abc import Sequence

from mpips.kernels.vectors import addresses_of
from mpips.mpi.collectives import cluster_subset, free
from mpips.mpi.start import Request
from mpips.mpi.window import Field, Plan, Window
from mpips.optim import Rule
from mpips.planning.job import Job
from mpips.rounds import barrier
from mpips.rounds.barrier import NodeBarrier
from mpips.rounds.base import Round, Transfers


class NodeRound(Round):
    """A round of ranks that share the memory of their node. Collective: yes, construction too."""

    def __init__(
        self,
        job: Job,
        rule: Rule | None,
        transfers: Transfers | None,
        fields: Sequence[Sequence[Field]],
    ) -> None:
        """Make the round, with `fields` of each rank's segment beside those that all rounds have.

        See `Round.__init__`.
        """
        super().__init__(job, rule, transfers)
        cluster = self._cluster
        plans = [Plan((*_fields(job, rank), *fields[rank])) for rank in range(cluster.world)]
        self._window = Window(cluster, plans, job.config.window == "shared", remote_reads=False)
        view = self._window.view
        self._leader = cluster.my_node[0]
        self._leads = cluster.rank == self._leader
        self._leaders = cluster_subset(cluster, leaders(cluster.node_of))
        self._barrier = NodeBarrier(cluster, self._window, self.transfers)
        self.replica = view(self._leader, "replica")
        local = [(w, r) for w, r in enumerate(cluster.roles.workers) if cluster.is_local(r)]
        self._workers = [worker for worker, _ in local]
        self._addresses = addresses_of([view(rank, "grad") for _, rank in local])
        if job.worker_id is not None:
            self.grad = view(cluster.rank, "grad")

    def _begin_report_sum(self) -> list[Request]:
        """Begin to add up the nodes' reports, on leaders; then comes `_publish_report_sum`."""
        return [self.transfers.begin_sum(self._leaders, self._barrier.sums)] if self._leads else []

    def _publish_report_sum(self) -> None:
        """Let the node read the sum of all reports, on leaders."""
        if self._leads:
            self._barrier.publish_sums()

    def free(self) -> None:
        """See `Round.free`."""
        super().free()
        self._barrier.free()
        self._window.free()
        free(self._leaders)


def _fields(job: Job, rank: int) -> list[Field]:
    """Return what the segment of a rank holds in every round."""
    cluster, dtype, n = job.cluster, job.config.dtype, job.layout.size
    found = [*barrier.FIELDS]
    if rank in leaders(cluster.node_of):
        found.append(Field("replica", dtype, (n,)))
    if rank in cluster.roles.workers:
        found.append(Field("grad", dtype, (n,)))
    return found


def leaders(node_of: Sequence[int]) -> list[int]:
    """Return the first rank of each node."""
    return sorted({node_of.index(node) for node in node_of})
