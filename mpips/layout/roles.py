"""Roles of MPI ranks: servers, workers and spares.

`assign` chooses the servers from the mode, the options, and the host and node of each rank. All
functions here are pure, so ``mpips plan`` uses them before a job runs.
"""

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpips.config import Config
from mpips.config.names import ROUND_MODES
from mpips.errors import UserError, counted
from mpips.layout import Shard, cut


@dataclass(frozen=True)
class Roles:
    """The ranks of each role.

    Attributes:
        servers: Ranks of the servers by number, ascending, and then those of spares. Empty if every
            rank is a worker.
        workers: Ranks of the workers by number, ascending.
        spares: Number of spares, the last of `servers`. A spare owns no shard until it takes over
            the shard of a dead server.
        successor: Rank that has become the coordinator after owner 0 died; None while it lives.
        portions: Fraction of the parameters of each owner, servers first. Then servers and workers
            both own shards. Empty if shards are equal.
    """

    servers: tuple[int, ...]
    workers: tuple[int, ...]
    spares: int = 0
    successor: int | None = None
    portions: tuple[float, ...] = ()

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that own a shard: the servers, or the workers if there are none, or both."""
        return (*self.servers, *self.workers) if self.portions else self.servers or self.workers

    @property
    def coordinator(self) -> int:
        """Rank that assigns batches, starts checkpoints and prints: owner 0, or its successor."""
        return self.owners[0] if self.successor is None else self.successor

    def name(self, rank: int) -> str:
        """Return ``server 0``, ``spare 1`` or ``worker 3``; spares are numbered with servers."""
        if rank in self.servers:
            number = self.servers.index(rank)
            kind = "server" if number < len(self.servers) - self.spares else "spare"
            return f"{kind} {number}"
        return f"worker {self.workers.index(rank)}"


def default_servers(mode: str, world: int) -> int:
    """Return the number of servers if the user gives none."""
    return 0 if mode in ROUND_MODES else max(1, world // 4)


def training(world: int, evaluators: int) -> int:
    """Return the number of ranks that train; the last ranks of the world are evaluators.

    Raises:
        UserError: If no rank would train.
    """
    if evaluators >= world:
        got = f"evaluators={evaluators} in a world of {world}"
        raise UserError(got, f"evaluators <= {world - 1}", "the other ranks train")
    return world - evaluators


def assign(
    mode: str,
    hosts: Sequence[str],
    node_of: Sequence[int],
    servers: int | None = None,
    server_ranks: Sequence[int] = (),
    server_hosts: str = "",
    evaluators: int = 0,
) -> Roles:
    """Split the ranks that train into servers and workers.

    Args:
        mode: As in `mpips.config.Config`; the modes of `ROUND_MODES` need no server.
        hosts: Host name of each rank that trains.
        node_of: Node number of each rank.
        servers: Number of servers, or None for the mode's default.
        server_ranks: Ranks that the user chose as servers; empty to let this function choose.
        server_hosts: Globs of host names, separated by commas. Only hosts that match one of them
            get servers; empty for all hosts.
        evaluators: Number of evaluators, for messages; `hosts` does not contain them.

    Raises:
        UserError: If there is no worker, or no server in a mode that needs one, or if the options
            do not fit the world.
    """
    world = len(hosts)
    chosen = tuple(sorted(server_ranks))
    if chosen and chosen[-1] >= world:
        raise UserError(f"server_ranks has rank {chosen[-1]}", f"ranks 0 to {world - 1}")
    count = len(chosen) or (default_servers(mode, world) if servers is None else servers)
    _check_count(mode, count, world, evaluators, asked=servers is not None or bool(chosen))
    if not chosen:
        chosen = spread_over(count, _eligible(hosts, server_hosts, count), node_of)
    return Roles(chosen, tuple(sorted(set(range(world)).difference(chosen))))


def with_spares(roles: Roles, count: int, node_of: Sequence[int]) -> Roles:
    """Turn workers into spares.

    Spares are taken from the nodes with servers in turn: on each node, the first workers of a
    higher rank than its last server. If there are too few, the first workers of a higher rank than
    all servers follow.

    Args:
        roles: The ranks of each role.
        count: Number of spares.
        node_of: Node number of each rank.

    Raises:
        UserError: If there are too few such workers, or no worker would be left.
    """
    if not count:
        return roles
    last = {node_of[rank]: rank for rank in roles.servers}
    beside = [rank for rank in roles.workers if rank > last.get(node_of[rank], rank)]
    near = spread_over(min(count, len(beside)), beside, node_of)
    behind = [rank for rank in roles.workers if rank > roles.servers[-1] and rank not in near]
    spares = (*near, *behind[: count - len(near)])
    workers = tuple(rank for rank in roles.workers if rank not in spares)
    if len(spares) < count or not workers:
        got = f"spares={count} with {len(roles.workers)} other ranks"
        remedy = "use more ranks, or fewer --spares"
        raise UserError(got, "at least 1 worker left, and spares after servers in rank", remedy)
    return Roles((*roles.servers, *spares), workers, count)


def roles_of(config: Config, hosts: Sequence[str], node_of: Sequence[int]) -> Roles:
    """Return the roles of a job's ranks, spares included.

    Args:
        config: The job's configuration.
        hosts: Host name of each rank that trains.
        node_of: Node number of each rank.

    Raises:
        UserError: As `assign` and `with_spares`, or if every worker is a backup worker.
    """
    c = config
    found = assign(c.mode, hosts, node_of, c.servers, c.server_ranks, c.server_hosts, c.evaluators)
    found = with_spares(found, c.spares, node_of)
    if c.backup_workers >= (workers := len(found.workers)):
        got = f"backup_workers {c.backup_workers} of {workers} workers"
        raise UserError(got, f"backup_workers <= {workers - 1}", "a round needs a gradient")
    return found


def with_portions(
    roles: Roles, config: Config, node_of: Sequence[int], whole: bool = False, tables: bool = False
) -> Roles:
    """Divide the parameters of rounds between workers and servers on nodes of their own.

    Let n nodes have workers, and k nodes servers but no workers. Let ``parts = n^2 + k n - 2 k``.
    For k < n, each node with workers owns ``(n - k) / parts`` of the parameters, and each node with
    servers ``2 (n - 1) / parts``. Then a link needs at most ``2 n (n - 1) / parts`` times as long
    for a round as for one vector in each direction. For k >= n, the servers own all parameters.

    Servers cannot make rounds shorter if n is at most 2, if the rule updates whole arrays, or if
    all sums come before all results. Then they own nothing, and the workers' nodes own equal parts.

    Args:
        roles: The ranks of each role.
        config: The job's configuration.
        node_of: Node number of each rank.
        whole: Whether the rule updates whole arrays.
        tables: Whether the job has tables; their rows are on the servers.

    Returns:
        The roles with `Roles.portions`. The portions are empty if the job has tables, no servers,
        or a node with both servers and workers. They are also empty if only workers may own slices
        of its rounds.

    References: Jiang et al., OSDI 2020, section 4.1.
    """
    of_workers = {node_of[rank] for rank in roles.workers}
    of_servers = {node_of[rank] for rank in roles.servers}
    if tables or not _divides(config) or not of_servers or of_workers & of_servers:
        return replace(roles, portions=())
    n, k = len(of_workers), len(of_servers)
    parts = n * n + k * n - 2 * k
    each, spare = ((n - k) / parts, 2 * (n - 1) / parts) if k < n else (0.0, 1 / k)
    if n <= 2 or whole or not streams(config):
        each, spare = 1 / n, 0.0
    owners = Counter(node_of)
    portions = [spare / owners[node_of[rank]] for rank in roles.servers]
    portions += [each / owners[node_of[rank]] for rank in roles.workers]
    return replace(roles, portions=tuple(portions))


def _divides(config: Config) -> bool:
    """Return whether a job makes rounds whose slices ranks of any role may own."""
    c = config
    whole = c.reduce == "allreduce" or c.codec == "powersgd"
    return c.mode in ROUND_MODES and c.in_rounds and not whole


def streams(config: Config) -> bool:
    """Return whether a round may send results of one part while it still sums others."""
    c = config
    clips = c.mode == "sync" and c.clip
    return c.codec == c.pull_codec == "none" and not clips


def shares(
    size: int, roles: Roles, itemsize: int, between: Sequence[int] = ()
) -> tuple[Shard, ...]:
    """Cut a vector of `size` elements into one shard for each owner; those of spares are empty.

    Args:
        size: Number of elements.
        roles: The ranks of each role.
        itemsize: Bytes of an element.
        between: See `mpips.layout.cut`.
    """
    count = len(roles.owners) - roles.spares
    shards = cut(size, count, itemsize, between, roles.portions)
    return (*shards, *(Shard(size, size) for _ in range(roles.spares)))


def _check_count(mode: str, count: int, world: int, evaluators: int, asked: bool) -> None:
    beside = f" beside evaluators={evaluators}" if evaluators else ""
    if world == 1 and mode not in ROUND_MODES:
        got = f"mode={mode} in a world of 1 rank{beside}"
        remedy = f"use mpirun -n {2 + evaluators} or more, or --mode sync"
        raise UserError(got, "at least 2 ranks, a server and a worker", remedy)
    if count >= world:
        got = f"servers={count} leaves no worker in a world of {world}{beside}"
        remedy = f"use mpirun -n {count + 1 + evaluators}" if asked else ""
        raise UserError(got, f"servers <= {world - 1}", remedy)


def matching(hosts: Sequence[str], glob: str) -> list[int]:
    """Return the ranks whose host matches one of the comma-separated globs, or all without any."""
    globs = [each.strip() for each in glob.split(",")] if glob else ["*"]
    found = {host for host in set(hosts) if any(fnmatch.fnmatch(host, one) for one in globs)}
    return [rank for rank, host in enumerate(hosts) if host in found]


def _eligible(hosts: Sequence[str], glob: str, count: int) -> list[int]:
    ranks = matching(hosts, glob)
    if len(ranks) < count:
        got = f"server_hosts={glob!r} matches {counted(len(ranks), 'rank')}"
        remedy = f"hosts are {', '.join(sorted(set(hosts)))}"
        raise UserError(got, f"at least servers={count} of them", remedy)
    return ranks


def spread_over(count: int, ranks: Sequence[int], node_of: Sequence[int]) -> tuple[int, ...]:
    """Choose `count` of `ranks`: from each node in turn, its lowest ranks first."""
    free: dict[int, list[int]] = {node: [] for node in sorted({node_of[r] for r in ranks})}
    for rank in reversed(ranks):
        free[node_of[rank]].append(rank)
    chosen: list[int] = []
    while len(chosen) < count:
        nodes = [n for n in free if free[n]]
        turn = min(len(nodes), count - len(chosen))
        for k in range(turn):  # evenly spaced nodes, if fewer servers than nodes remain
            chosen.append(free[nodes[k * len(nodes) // turn]].pop())
    return tuple(sorted(chosen))
