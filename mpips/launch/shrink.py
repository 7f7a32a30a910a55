"""Options that change where a job has fewer ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from mpips.config import OPTIONS, Config
from mpips.layout.roles import Roles, assign, default_servers, matching, training


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    found = []
    for name, value in options.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        found.append(f"{OPTIONS[name].flag}={text}")
    return found


def changed_options(given: Mapping[str, Any], ranks: int, nodes: Sequence[str]) -> dict[str, Any]:
    """Return the options of a job that are to be others on fewer ranks.

    A number of servers that was given shrinks as the ranks do. Servers that were placed by rank or
    by host stay so on the ranks and hosts that are left; where none of them is, they are spread
    over the nodes as if nothing had been said. As many evaluate as before. Some of the backup
    workers go, if a round would wait for nobody, and all spares.

    Args:
        given: Values of the job, without defaults.
        ranks: That it was asked for.
        nodes: The host of each rank that it has now.

    Raises:
        UserError: If a job of its mode cannot be on so few ranks.
    """
    evaluators = given.get("evaluators") or 0
    nodes, ranks = nodes[: training(len(nodes), evaluators)], ranks - evaluators
    world = len(nodes)
    if world == ranks:
        return {}
    mode = given.get("mode", Config.mode)
    by_hand, glob = tuple(given.get("server_ranks") or ()), given.get("server_hosts") or ""
    asked = given.get("servers")
    changes: dict[str, Any] = {}
    if by_hand:
        kept = tuple(rank for rank in by_hand if rank < world)
        if len(kept) == world or not kept:
            changes = {"server_ranks": (), "servers": _share(len(by_hand), ranks, world)}
        elif kept != by_hand:
            changes = {"server_ranks": kept}
            if asked is not None:
                changes["servers"] = len(kept)
    elif asked:
        changes = {"servers": _share(asked, ranks, world)}
    roles = _roles(mode, nodes, {**given, **changes})
    if roles is None:
        there = len(matching(nodes, glob))
        count = changes.get("servers", default_servers(mode, world) if asked is None else asked)
        changes["servers"] = min(count, there) or count
        if not there:
            changes["server_hosts"] = ""
        roles = _roles(mode, nodes, {**given, **changes})
        assert roles is not None, "they fit"
    if given.get("spares"):
        changes["spares"] = 0
    most = len(roles.workers) - 1
    if given.get("backup_workers", 0) > most:
        changes["backup_workers"] = most
    return {name: value for name, value in changes.items() if given.get(name) != value}


def _share(count: int, ranks: int, world: int) -> int:
    """Return the servers of `world` ranks, where `count` were asked for on `ranks`."""
    return max(1, min(world - 1, round(count * world / ranks)))


def _roles(mode: str, nodes: Sequence[str], given: Mapping[str, Any]) -> Roles | None:
    """Return who is a server then, or None where the hosts that match have too few ranks.

    Raises:
        UserError: If something else is wrong.
    """
    names, servers = sorted(set(nodes)), given.get("servers")
    glob = given.get("server_hosts") or ""
    count = default_servers(mode, len(nodes)) if servers is None else servers
    if len(matching(nodes, glob)) < count:
        return None
    node_of = [names.index(node) for node in nodes]
    return assign(mode, nodes, node_of, servers, given.get("server_ranks") or (), glob)
