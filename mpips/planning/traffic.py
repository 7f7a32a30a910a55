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
The results come after the sums, and both after the gradient: the times add up; but where local
steps go on meanwhile (``--overlap-steps``), only what of the exchange is longer than those counts.

**Rounds by MPI_Allreduce** (``--reduce allreduce``): at least 2 (n - 1) M / n each way for the
Allreduce between n nodes, and then each node receives M - m_i of the broadcasts.

**Rounds of codec powersgd**: Allreduces between n nodes of r (m + n) elements for each matrix of
shape (m, n), and of what is sent as it is: 2 (n - 1) / n of those each way, and no parameters.

**Rows of tables** come beside, of each worker by itself: R bytes that it reads and R that it pushes
in a step, from and to all owners alike, and what says which rows these are, with the gradients.

Where k batches are accumulated before a push or a round, all is divided by k. Where a codec packs
gradients or parameters, theirs are multiplied by what it makes of a byte.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

from mpips.kernels.row_groups import most_bytes
from mpips.layout.roles import Roles

SERVERS, WORKERS = "servers", "workers"
Share = Callable[[int], float]
Tables = tuple[tuple[int, int, float], ...]  # of each its rows, their numbers, rows a batch needs


@dataclass(frozen=True)
class Flow:
    """Bytes a step that the ranks of one role on one node bring over its link.

    Attributes:
        grads_out: Gradients sent.
        grads_in: Gradients received.
        params_out: Parameters sent.
        params_in: Parameters received.
    """

    grads_out: float = 0.0
    grads_in: float = 0.0
    params_out: float = 0.0
    params_in: float = 0.0

    def __add__(self, other: "Flow") -> "Flow":
        """Return the two together."""
        return Flow(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def scaled(self, grads: float, params: float) -> "Flow":
        """Return the gradients and the parameters each times a factor."""
        return Flow(
            self.grads_out * grads,
            self.grads_in * grads,
            self.params_out * params,
            self.params_in * params,
        )

    @property
    def sent(self) -> float:
        """Bytes that leave the node."""
        return self.grads_out + self.params_out

    @property
    def received(self) -> float:
        """Bytes that come to the node."""
        return self.grads_in + self.params_in


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

    @property
    def pushes(self) -> list[int]:
        """How many gradients each node sends to every other owner, of each of its workers' one."""
        return self._moves(self.one_push)

    @property
    def pulls(self) -> list[int]:
        """How many times each node fetches the parameters of other nodes."""
        return self._moves(self.one_pull)

    def _moves(self, once: bool) -> list[int]:
        workers = [self.ranks(WORKERS, node) for node in range(self.nodes)]
        return [min(1, count) for count in workers] if once or self.rounds else workers

    def ranks(self, role: str, node: int) -> int:
        """Return the number of ranks of a role on a node."""
        ranks = self.roles.servers if role == SERVERS else self.roles.workers
        return sum(self.node_of[rank] == node for rank in ranks)

    def owned(self, node: int) -> int:
        """Return the bytes of the shards of a node."""
        pairs = zip(self.roles.owners, self.shards, strict=True)
        return sum(size for rank, size in pairs if self.node_of[rank] == node)


Flows = list[dict[str, Flow]]


def flows(case: Case) -> Flows:
    """Return what crosses each node's link in a step, by node and then by role."""
    found: Flows = [{WORKERS: Flow(), SERVERS: Flow()}]
    if case.nodes > 1:
        allreduced = case.rounds and case.allreduce
        found = _allreduced(case) if allreduced else _moved(case, case.pushes, case.pulls)
    share, rows = 1 / case.every, _rows(case)
    return [
        {role: flow.scaled(case.grads * share, case.params * share) + rows[node][role]
         for role, flow in each.items()}
        for node, each in enumerate(found)
    ]  # fmt: skip


def _rows(case: Case) -> Flows:
    """Return the flows of rows: of each batch, and of each worker by itself."""
    alike = replace(case, shards=case.row_shares)
    rows, whole = case.rows, sum(case.row_shares)
    grads, params = rows.grads / whole, rows.params / whole
    each = [case.ranks(WORKERS, node) for node in range(case.nodes)]
    found = _moved(alike, each, each)
    return [{role: flow.scaled(grads, params) for role, flow in node.items()} for node in found]


def _moved(case: Case, pushes: Sequence[int], pulls: Sequence[int]) -> Flows:
    """Return the flows of nodes, from how many gradients and parameters each of them moves."""
    found: Flows = []
    for node in range(case.nodes):
        owned = case.owned(node)
        remote = case.vector - owned
        working = Flow(grads_out=pushes[node] * remote, params_in=pulls[node] * remote)
        owning = Flow(
            grads_in=owned * (sum(pushes) - pushes[node]),
            params_out=owned * (sum(pulls) - pulls[node]),
        )
        if not case.roles.servers:
            working, owning = working + owning, Flow()
        found.append({WORKERS: working, SERVERS: owning})
    return found


def _allreduced(case: Case) -> Flows:
    """Return what is needed at the least: how MPI does it is not known."""
    around = 2 * (case.nodes - 1) * case.vector / case.nodes
    found: Flows = []
    for node in range(case.nodes):
        owned = case.owned(node)
        whole = Flow(around, around, owned, case.vector - owned)
        servers = case.ranks(WORKERS, node) == 0
        found.append({WORKERS: Flow() if servers else whole, SERVERS: whole if servers else Flow()})
    return found


def totals(found: Flows) -> list[Flow]:
    """Return what crosses each node's link, of all roles together."""
    return [node[WORKERS] + node[SERVERS] for node in found]


def link_s(case: Case, rate: float) -> float:
    """Return the least seconds that the busiest link is busy for in a step.

    Args:
        case: The job.
        rate: Of a link, each way, in bytes a second.
    """
    return busy_s(case, totals(flows(case)), rate)


def busy_s(case: Case, links: Sequence[Flow], rate: float) -> float:
    """Return the least seconds in which these links, at once, move that in a step."""
    if not case.rounds:
        return max(max(f.sent, f.received) for f in links) / rate
    sums = max(max(f.grads_out, f.grads_in) for f in links)
    return (sums + max(max(f.params_out, f.params_in) for f in links)) / rate


def pull_s(case: Case, rate: float) -> float:
    """Return the least seconds that a worker of a served mode waits for its pull in a step."""
    if case.rounds or case.prefetch or case.nodes == 1:
        return 0.0
    nodes = {case.node_of[rank] for rank in case.roles.workers}
    remote = max(case.vector - case.owned(node) for node in nodes)
    return remote * case.params / case.every / rate


def step_s(case: Case, rate: float, compute_s: float = 0.0) -> float:
    """Return the least seconds between two steps of a worker.

    Args:
        case: The job.
        rate: Of a link, each way, in bytes a second.
        compute_s: For computing a gradient.
    """
    if case.rounds:
        return compute_s + max(0.0, link_s(case, rate) - case.hidden * compute_s)
    return max(link_s(case, rate), compute_s + pull_s(case, rate))
