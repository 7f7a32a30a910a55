"""Bytes on each node's link in a step, and their least time.

M bytes are all parameters, m_i the shards of node i, w_i its workers, n the nodes with workers, B
the rate of a link, which carries both directions at once. What stays on a node costs nothing here.

**Served modes** (async). In a step node i sends p_i (M - m_i) of gradients and receives
q_i (M - m_i) of parameters, and its servers receive m_i sum_j p_j and send m_i sum_j q_j, over the
other nodes j. p_i = q_i = w_i; with ``--node-aggregation`` p_i = 1 and, where the workers of a node
share their pulls, q_i = 1. With k servers on nodes of their own and one worker on each of n nodes
this is max(M, n M / k) each way (Jiang et al., OSDI 2020, section 2). Both directions and both
kinds run at once, so a step takes max(bytes / B, t + pull), with t for computing and for the pull
(M - m_i) / B, which is hidden too, so nothing, with ``--prefetch``. ``--delay-compensation`` sends
the parameters that a gradient was computed from behind it, so that a push takes twice as much.

**Rounds** (sync). Gradients are summed on each node first. Node i sends M - m_i of sums and
receives M - m_i of results; its owners receive m_i from, and send m_i to, each other node that has
workers. With one owner on each of n nodes that makes 2 (n - 1) M / n each way, as the best
Allreduce (Thakur, Rabenseifner and Gropp, IJHPCA 2005; Patarasuk and Yuan, JPDC 2009).
With servers on k nodes without workers, each of those owns 2 (n - 1) M / (n^2 + k n - 2 k) and each
of n nodes with workers (n - k) M / (n^2 + k n - 2 k), so that no link carries more than
2 n (n - 1) M / (n^2 + k n - 2 k) each way, if n > 2 (Jiang et al., section 4.1); see
`mpips.layout.roles.with_portions`. Results of a part of a slice come while sums of the next leave;
but where slices go whole, as packed ones, results come after the sums, and the times add up. Both
come after the gradient, whose time is added; but where local
steps go on meanwhile (``--overlap-steps``), only what of the exchange is longer than those counts.

**Rounds by MPI_Allreduce** (``--reduce allreduce``): at least 2 (n - 1) M / n each way for the
Allreduce between n nodes, and then each node receives M - m_i of the broadcasts.

**Rounds of codec powersgd**: Allreduces between n nodes of r (m + n) elements for each matrix of
shape (m, n), and of what is sent as it is: 2 (n - 1) / n of those each way, and no parameters.

**Rows of tables** come beside, of each worker by itself: R bytes that it reads and R that it pushes
in a step, from and to all owners alike, and what says which rows these are, with the gradients.
In mode hybrid they cross while workers compute: a step takes the longer of what all of it keeps the
busiest link for, and of computing and the exchange of the parameters.

Where k batches are accumulated before a push or a round, all is divided by k. Where a codec packs
gradients or parameters, theirs are multiplied by what it makes of a byte.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mpips.kernels.row_groups import most_bytes
from mpips.layout.roles import Roles

# Axes of what crosses links behind the nodes: roles, gradients and parameters, both ways.
WORKERS, SERVERS = range(2)
GRADS, PARAMS = range(2)
OUT, IN = range(2)
Share = Callable[[int], float]
Tables = tuple[tuple[int, int, float], ...]  # of each its rows, their numbers, rows a batch needs


@dataclass(frozen=True)
class Rows:
    """Bytes of rows of tables, of one worker in a step, whoever owns them.

    Attributes:
        grads: Of what it pushes, and of what says which rows it reads and pushes.
        params: Of what it reads.
    """

    grads: float = 0.0
    params: float = 0.0

    @classmethod
    def of(cls, tables: Tables, itemsize: int, grads: Share, params: Share) -> "Rows":
        """Return those of some tables.

        Args:
            tables: Of each its rows, their numbers, and how many different rows a batch needs.
            itemsize: Bytes of a number.
            grads: Returns of rows of so many numbers the bytes of their gradients on the wire
                over those in memory.
            params: Likewise, of what is read.
        """
        pushed = read = 0.0
        for rows, dim, needed in tables:
            nbytes = needed * dim * itemsize
            pushed += nbytes * grads(dim) + 2 * needed * most_bytes(int(rows / max(1.0, needed)))
            read += nbytes * params(dim)
        return cls(pushed, read)


@dataclass(frozen=True)
class Case:
    """What the bytes depend on.

    Attributes:
        roles: Who is a server and who is a worker.
        node_of: Node number of each rank.
        shards: Bytes of each owner's shard.
        rounds: Whether all go in rounds; else servers are pulled from and pushed to.
        allreduce: Whether a round is MPI_Allreduce, of whole gradients or of their factors.
        one_push: Whether a node sends its gradients as one.
        one_pull: Whether a node fetches each remote shard once.
        prefetch: Whether pulls are hidden behind computing.
        every: Steps between two pushes, or rounds.
        hidden: Share of the computing of a round during which its exchange may be under way.
        grads: Bytes of a gradient on the wire, and of what it was computed from where that goes
            with it, over those of a gradient in memory.
        params: Likewise, of parameters.
        streamed: Whether results of a round come while sums leave, part by part.
        behind: Whether rows cross nodes while workers compute, and no round waits for them.
        rows: Rows of tables, on the wire.
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
        """How many parts of all rows of tables each owner has: one each, and spares none."""
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
        """Bytes of the shards of other nodes than each, shape (nodes,)."""
        return self.vector - self._by_node(self.roles.owners, self.shards)

    def _by_node(
        self, ranks: tuple[int, ...], of_each: tuple[int, ...] | None = None
    ) -> np.ndarray:
        nodes = np.array([self.node_of[rank] for rank in ranks], int)
        return np.bincount(nodes, of_each, self.nodes)

    @property
    def pushes(self) -> np.ndarray:
        """How many gradients each node sends to every other owner, of each of its workers' one."""
        return np.minimum(1, self.workers) if self.one_push or self.rounds else self.workers

    @property
    def pulls(self) -> np.ndarray:
        """How many times each node fetches the parameters of other nodes."""
        return np.minimum(1, self.workers) if self.one_pull or self.rounds else self.workers


def flows(case: Case) -> np.ndarray:
    """Return the bytes of each node's link in a step, shape (nodes, roles, kinds, ways)."""
    allreduced = case.rounds and case.allreduce
    found = _allreduced(case) if allreduced else _moved(case, case.pushes, case.pulls)
    rows = _moved(replace(case, shards=case.row_shares), case.workers, case.workers)
    shares = np.array([case.rows.grads, case.rows.params]) / sum(case.row_shares)
    packed = np.array([case.grads, case.params]) / case.every
    return found * packed[:, None] + rows * shares[:, None]


def _moved(case: Case, pushes: np.ndarray, pulls: np.ndarray) -> np.ndarray:
    """Return `flows`, from how many gradients and parameters each node moves."""
    found = np.zeros((case.nodes, 2, 2, 2))
    owned = case.vector - case.remote
    found[:, WORKERS, GRADS, OUT] = pushes * case.remote
    found[:, WORKERS, PARAMS, IN] = pulls * case.remote
    nodes, owning = range(case.nodes), np.where(case.servers > 0, SERVERS, WORKERS)
    found[nodes, owning, GRADS, IN] = owned * (pushes.sum() - pushes)
    found[nodes, owning, PARAMS, OUT] = owned * (pulls.sum() - pulls)
    return found


def _allreduced(case: Case) -> np.ndarray:
    """Return what is needed at the least: how MPI does it is not known."""
    found, nodes = np.zeros((case.nodes, 2, 2, 2)), range(case.nodes)
    role = np.where(case.workers, WORKERS, SERVERS)
    found[nodes, role, GRADS] = 2 * (case.nodes - 1) * case.vector / case.nodes
    found[nodes, role, PARAMS, OUT] = case.vector - case.remote
    found[nodes, role, PARAMS, IN] = case.remote
    return found * (case.nodes > 1)


def link_s(case: Case, rate: float) -> float:
    """Return the least seconds that the busiest link is busy for in a step.

    Args:
        case: The job.
        rate: Of a link, each way, in bytes a second.
    """
    return busy_s(case, flows(case).sum(axis=1), rate)


def busy_s(case: Case, links: np.ndarray, rate: float) -> float:
    """Return the least seconds in which links, at once, move that, shape (n, kinds, ways)."""
    if case.rounds and (case.allreduce or not case.streamed):  # results come after the sums
        return float(links.max(axis=(0, 2)).sum() / rate)
    return float(links.sum(axis=1).max() / rate)


def pull_s(case: Case, rate: float) -> float:
    """Return the least seconds that a worker of a served mode waits for its pull in a step."""
    if case.rounds or case.prefetch or case.nodes == 1:
        return 0.0
    return float(case.remote[case.workers > 0].max() * case.params / case.every / rate)


def step_s(case: Case, rate: float, compute_s: float = 0.0) -> float:
    """Return the least seconds between two steps of a worker.

    Args:
        case: The job.
        rate: Of a link, each way, in bytes a second.
        compute_s: For computing a gradient.
    """
    if case.behind:
        dense = replace(case, behind=False, rows=Rows())
        return max(link_s(case, rate), step_s(dense, rate, compute_s))
    if case.rounds:
        return compute_s + max(0.0, link_s(case, rate) - case.hidden * compute_s)
    return max(link_s(case, rate), compute_s + pull_s(case, rate))
