"""Bytes on each node's link in a step, and their least time.

Let M be the bytes of all parameters, m_i the bytes of node i's shards, w_i its workers, and n the
number of nodes with workers. B is the rate of a link, which carries both directions at once.
Traffic within a node costs nothing here.

**Modes with servers** (async). In a step, node i sends p_i (M - m_i) bytes of gradients and
receives q_i (M - m_i) bytes of parameters. Its servers receive m_i sum_j p_j and send m_i sum_j
q_j, over the other nodes j. By default p_i = q_i = w_i. With ``--node-aggregation`` p_i = 1, and if
the workers of a node share their pulls, q_i = 1. With k servers on nodes of their own and one
worker on each of n nodes, this is max(M, n M / k) each way (Jiang et al., OSDI 2020, section 2).
Both directions, and pushes and pulls, run at once. So a step takes max(bytes / B, t + pull), where
t is the time to compute. The pull takes (M - m_i) / B; with ``--prefetch`` it is hidden and takes
no time. With ``--delay-compensation``, a push also contains the parameters from which the gradient
was computed. So it is twice as large.

**Rounds** (sync). Each node first sums its gradients. Node i sends M - m_i bytes of sums and
receives M - m_i of results. Its owners exchange m_i each way with each other node that has workers.
With one owner on each of n nodes, this is 2 (n - 1) M / n each way, the same as the best Allreduce
(Thakur, Rabenseifner and Gropp, IJHPCA 2005; Patarasuk and Yuan, JPDC 2009). With servers on k
nodes without workers, each of these owns 2 (n - 1) M / (n^2 + k n - 2 k), and each of n nodes with
workers (n - k) M / (n^2 + k n - 2 k). Then no link carries more than 2 n (n - 1) M / (n^2 + k n - 2
k) each way, if n > 2 (Jiang et al., section 4.1); see `mpips.layout.roles.with_portions`. Results
of one part of a slice arrive while sums of the next part leave. Packed slices are sent as a whole:
their results arrive after the sums, and the times add up. The exchange follows the gradient, so its
time is added. If local steps continue meanwhile (``--overlap-steps``), only the part of the
exchange that outlasts them counts.

**Rounds by MPI_Allreduce** (``--reduce allreduce``): at least 2 (n - 1) M / n each way for the
Allreduce between n nodes. Then each node receives M - m_i in broadcasts.

**Rounds of codec powersgd**: Allreduces between n nodes of r (m + n) elements for each matrix of
shape (m, n), and of the uncompressed arrays: 2 (n - 1) / n times their bytes each way, and no
parameters.

**Rows of tables** are extra. In a step, each worker reads R bytes of rows and pushes R bytes,
spread evenly over all owners. Row numbers are counted with the gradients. In mode hybrid, rows are
transferred while workers compute. A step then takes the longer of two times: the busiest link's for
all traffic, or computing and the exchange of parameters.

If k batches are accumulated before a push or a round, everything is divided by k. If a codec packs
gradients or parameters, their bytes are multiplied by its ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mpips.kernels.row_groups import most_bytes
from mpips.layout.roles import Roles

# Axes of the array of flows, after the nodes: roles, gradients and parameters, both directions.
WORKERS, SERVERS = range(2)
GRADS, PARAMS = range(2)
OUT, IN = range(2)
Share = Callable[[int], float]
# Of each table: rows, numbers of a row, rows that a batch needs.
Tables = tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Rows:
    """Bytes of tables' rows that one worker transfers in a step, local owners included.

    Attributes:
        grads: Bytes of pushed rows, and of the numbers of rows that are read and pushed.
        params: Bytes of rows that are read.
    """

    grads: float = 0.0
    params: float = 0.0

    @classmethod
    def of(cls, tables: Tables, itemsize: int, grads: Share, params: Share) -> "Rows":
        """Return the bytes for some tables.

        Args:
            tables: Rows of each table, numbers of a row, and different rows that a batch needs.
            itemsize: Bytes of a number.
            grads: Returns the packed size of a row's gradient, divided by its size in memory, by
                the numbers of the row.
            params: The same for rows that are read.
        """
        pushed = read = 0.0
        for rows, dim, needed in tables:
            nbytes = needed * dim * itemsize
            pushed += nbytes * grads(dim) + 2 * needed * most_bytes(int(rows / max(1.0, needed)))
            read += nbytes * params(dim)
        return cls(pushed, read)


@dataclass(frozen=True)
class Case:
    """Quantities that determine a job's traffic.

    Attributes:
        roles: Roles of the ranks.
        node_of: Node number of each rank.
        shards: Bytes of each owner's shard.
        rounds: Whether the mode works in rounds; else workers pull from servers and push to them.
        allreduce: Whether a round is an MPI_Allreduce, of whole gradients or of their factors.
        one_push: Whether a node sends its gradients as one.
        one_pull: Whether a node fetches each remote shard once.
        prefetch: Whether computing hides pulls.
        every: Steps between two pushes or rounds.
        hidden: Share of a round's computing that its exchange may overlap with.
        grads: Bytes of a gradient on the wire, and of the parameters sent with it, divided by the
            bytes of a gradient in memory.
        params: Bytes of parameters on the wire, divided by their bytes in memory.
        streamed: Whether results of a round arrive while sums leave, part by part.
        behind: Whether rows are transferred while workers compute, so that no round waits for them.
        rows: Bytes of tables' rows on the wire.
    """

    roles: Roles
    node_of: tuple[int, ...]
    shards: tuple[int, ...]
    rounds: bool = False
    allreduce: bool = False
    one_push: bool = False
    one_pull: bool = False
    prefetch: bool = False
    every: int = 1
    hidden: float = 0.0
    grads: float = 1.0
    params: float = 1.0
    streamed: bool = False
    behind: bool = False
    rows: Rows = Rows()

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(self.node_of) + 1

    @property
    def vector(self) -> int:
        """Bytes of all parameters."""
        return sum(self.shards)

    @property
    def row_shares(self) -> tuple[int, ...]:
        """Relative share of all rows that each owner has: 1, and 0 for spares."""
        spares = self.roles.spares
        return (1,) * (len(self.roles.owners) - spares) + (0,) * spares

    @cached_property
    def workers(self) -> np.ndarray:
        """Number of workers on each node, shape (nodes,)."""
        return self._by_node(self.roles.workers)

    @cached_property
    def servers(self) -> np.ndarray:
        """Number of servers on each node, shape (nodes,)."""
        return self._by_node(self.roles.servers)

    @cached_property
    def remote(self) -> np.ndarray:
        """Bytes of the shards on other nodes, for each node, shape (nodes,)."""
        return self.vector - self._by_node(self.roles.owners, self.shards)

    def _by_node(
        self, ranks: tuple[int, ...], of_each: tuple[int, ...] | None = None
    ) -> np.ndarray:
        nodes = np.array([self.node_of[rank] for rank in ranks], int)
        return np.bincount(nodes, of_each, self.nodes)

    @property
    def pushes(self) -> np.ndarray:
        """Number of gradients that each node sends to every other owner, shape (nodes,)."""
        return np.minimum(1, self.workers) if self.one_push or self.rounds else self.workers

    @property
    def pulls(self) -> np.ndarray:
        """How many times each node fetches the parameters of other nodes, shape (nodes,)."""
        return np.minimum(1, self.workers) if self.one_pull or self.rounds else self.workers


def flows(case: Case) -> np.ndarray:
    """Return the bytes on each node's link in a step, shape (nodes, roles, kinds, directions)."""
    allreduced = case.rounds and case.allreduce
    dense = _allreduced(case) if allreduced else _moved(case, case.pushes, case.pulls)
    rows = _moved(replace(case, shards=case.row_shares), case.workers, case.workers)
    shares = np.array([case.rows.grads, case.rows.params]) / sum(case.row_shares)
    packed = np.array([case.grads, case.params]) / case.every
    return dense * packed[:, None] + rows * shares[:, None]


def _moved(case: Case, pushes: np.ndarray, pulls: np.ndarray) -> np.ndarray:
    """Return `flows` for given numbers of gradients and parameters that each node transfers."""
    found = np.zeros((case.nodes, 2, 2, 2))
    owned = case.vector - case.remote
    found[:, WORKERS, GRADS, OUT] = pushes * case.remote
    found[:, WORKERS, PARAMS, IN] = pulls * case.remote
    nodes, role = range(case.nodes), np.where(case.servers > 0, SERVERS, WORKERS)
    found[nodes, role, GRADS, IN] = owned * (pushes.sum() - pushes)
    found[nodes, role, PARAMS, OUT] = owned * (pulls.sum() - pulls)
    return found


def _allreduced(case: Case) -> np.ndarray:
    """Return a lower bound of `flows`: MPI's algorithm is unknown."""
    found, nodes = np.zeros((case.nodes, 2, 2, 2)), range(case.nodes)
    role = np.where(case.workers, WORKERS, SERVERS)
    found[nodes, role, GRADS] = 2 * (case.nodes - 1) * case.vector / case.nodes
    found[nodes, role, PARAMS, OUT] = case.vector - case.remote
    found[nodes, role, PARAMS, IN] = case.remote
    return found * (case.nodes > 1)


def link_s(case: Case, rate: float) -> float:
    """Return the least seconds of a step in which the busiest link is busy.

    Args:
        case: The job.
        rate: Rate of a link each way, in bytes per second.
    """
    return busy_s(case, flows(case).sum(axis=1), rate)


def busy_s(case: Case, links: np.ndarray, rate: float) -> float:
    """Return the least seconds in which links transfer given bytes at the same time.

    Args:
        case: The job.
        links: Bytes, shape (n, kinds, directions).
        rate: Rate of a link each way, in bytes per second.
    """
    if case.rounds and (case.allreduce or not case.streamed):  # results arrive after the sums
        return float(links.max(axis=(0, 2)).sum() / rate)
    return float(links.sum(axis=1).max() / rate)


def pull_s(case: Case, rate: float) -> float:
    """Return the least seconds of a step that a worker waits for its pull; 0 in rounds."""
    if case.rounds or case.prefetch or case.nodes == 1:
        return 0.0
    return float(case.remote[case.workers > 0].max() * case.params / case.every / rate)


def step_s(case: Case, rate: float, compute_s: float = 0.0) -> float:
    """Return the least seconds between two steps of a worker.

    Args:
        case: The job.
        rate: Rate of a link each way, in bytes per second.
        compute_s: Seconds to compute a gradient.
    """
    if case.behind:
        dense = replace(case, behind=False, rows=Rows())
        return max(link_s(case, rate), step_s(dense, rate, compute_s))
    if case.rounds:
        return compute_s + max(0.0, link_s(case, rate) - case.hidden * compute_s)
    return max(link_s(case, rate), compute_s + pull_s(case, rate))
