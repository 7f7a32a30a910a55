"""NUMA nodes of a host, and how its ranks are bound.

The kernel lists the cores of each NUMA node (``/sys/devices/system/node``). If a rank may run on
cores of several NUMA nodes, the kernel may move it away from its memory, which it then reads more
slowly.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpips.config import Config
from mpips.errors import counted, listed
from mpips.layout.roles import assign, spread_over, training
from mpips.mpi.pages import text_of

SYSTEM = Path("/sys/devices/system")
SHOWN = 3  # number of hosts listed by name
Cores = frozenset[int]
Nodes = Mapping[int, Cores]
Bound = tuple[Cores, Nodes]  # of a rank: the cores that it may run on, and its host's NUMA nodes


def numa_nodes(system: Path = SYSTEM) -> dict[int, Cores]:
    """Return the online cores of each NUMA node that has any; {} if the kernel lists no nodes."""
    online, found = _cores(system / "cpu" / "online"), dict[int, Cores]()
    for path in (system / "node").glob("node[0-9]*/cpulist"):
        found[int(path.parent.name.removeprefix("node"))] = _cores(path) & online
    return {node: found[node] for node in sorted(found) if found[node]}


def _cores(path: Path) -> Cores:
    """Return the cores in a file with a list such as ``0-3,8``; none if there is no such file."""
    ends = [part.partition("-") for part in text_of(path).split(",") if part]
    return frozenset(k for a, _, b in ends for k in range(int(a), int(b or a) + 1))


def bound() -> Bound:
    """Return the cores that this process may run on, and the NUMA nodes of its host."""
    return frozenset(os.sched_getaffinity(0)), numa_nodes()


def touched(cores: Cores, nodes: Nodes) -> list[int]:
    """Return the NUMA nodes of some cores."""
    return [node for node, node_cores in nodes.items() if cores & node_cores]


def judge_binding(masks: Sequence[Cores], nodes: Nodes) -> tuple[str, str]:
    """Check how the ranks of a host are bound.

    Args:
        masks: Cores that each rank may run on.
        nodes: Cores of each NUMA node.

    Returns:
        The problem and its remedy; empty texts if there is none.
    """
    all_cores, allowed = frozenset[int]().union(*nodes.values()), frozenset[int]().union(*masks)
    for mask in masks:
        shared = sum(other <= mask for other in masks)
        # If there are more ranks than cores, sharing is expected.
        if shared > len(mask) and mask != all_cores:
            found = f"{shared} of them are bound to {counted(len(mask), 'core')}"
            return found, "bind ranks to cores of their own, or to none: mpirun --bind-to none"
    used = touched(allowed, nodes)
    wide = [mask for mask in masks if len(touched(mask, nodes)) > 1]
    if not wide or len(masks) < len(used):  # a rank alone on several NUMA nodes needs all of them
        return "", ""
    found = f"{len(wide)} of them may run on several of {len(used)} NUMA nodes"
    free = all(mask == allowed for mask in masks)
    found += ", as they are not bound" * free
    remedy = "bind each rank to one: mpirun --map-by numa --bind-to numa (MPICH: -bind-to numa), "
    sizes = [len(nodes[node] & allowed if free else nodes[node]) for node in used]
    each = cores_a_rank(len(masks), sizes)
    return found, f"{remedy}srun --cpus-per-task={each} --cpu-bind=ldoms"


def cores_a_rank(ranks: int, sizes: Sequence[int]) -> int:
    """Return the largest number of cores for each rank, so that no rank spans two NUMA nodes.

    Ranks get their cores in order.

    Args:
        ranks: Number of ranks on the host; at most the number of cores.
        sizes: Number of cores of each NUMA node.
    """
    least = min(sizes)
    most = max(1, least // -(-ranks // len(sizes)))
    return max(k for k in range(1, most + 1) if least % k == 0)


def spread_text(masks: Sequence[Cores], nodes: Nodes) -> str:
    """Return over how many NUMA nodes a host's ranks are spread, as text; empty for one node."""
    used = touched(frozenset[int]().union(*masks), nodes)
    counts = [sum(touched(mask, nodes) == [node] for mask in masks) for node in used]
    text = f" of {len(used)} NUMA nodes" if len(used) > 1 else ""
    if not text or sum(counts) < len(masks):
        return text
    each = f"{counts[0]} on each" if len(set(counts)) == 1 else f"{listed(counts, 8)} on them"
    return f"{text}, {each}"


# Lines of --explain ------------------------------------------------------------------------------


def binding_text(
    config: Config, hosts: Sequence[str], node_of: Sequence[int], ranks: Sequence[Bound]
) -> str:
    """Return lines about the binding of all ranks; empty if there is nothing to report.

    Args:
        config: The job.
        hosts: Host name of each rank.
        node_of: Node number of each rank.
        ranks: Binding of each rank.
    """
    lines_of: dict[str, list[str]] = {}
    for host in dict.fromkeys(hosts):
        bindings = [binding for other, binding in zip(hosts, ranks, strict=True) if other == host]
        masks, nodes = [mask for mask, _ in bindings], bindings[0][1]
        cores, (found, remedy) = len(frozenset().union(*masks)), judge_binding(masks, nodes)
        spread = "" if found else spread_text(masks, nodes)
        if found or spread:
            text = f"{counted(len(masks), 'rank')} on {counted(cores, 'core')}{spread}"
            lines_of.setdefault(text + f", but {found}; {remedy}" * bool(found), []).append(host)
    lines = [f"binding on {listed(names, SHOWN)}: {text}" for text, names in lines_of.items()]
    return "".join(f"{line}\n" for line in [*lines, *_server_lines(config, hosts, node_of, ranks)])


def _server_lines(
    config: Config, hosts: Sequence[str], node_of: Sequence[int], ranks: Sequence[Bound]
) -> Iterator[str]:
    """Yield a line with better ranks of servers, if these would use more NUMA nodes."""
    c, world = config, training(len(hosts), config.evaluators)
    hosts, node_of = hosts[:world], node_of[:world]
    servers = assign(c.mode, hosts, node_of, c.servers, c.server_ranks, c.server_hosts).servers
    homes = [touched(*each) for each in ranks[:world]]
    if c.spares or any(len(home) != 1 for home in homes):
        return
    numbers = [node for (node,) in homes]
    spread, is_better = list[int](), False
    for node in sorted(set(node_of)):
        here = [rank for rank in range(world) if node_of[rank] == node]
        now = [rank for rank in here if rank in servers]
        better = spread_over(len(now), here, numbers)
        is_better |= len({numbers[r] for r in better}) > len({numbers[r] for r in now})
        spread += better
    if is_better:
        better_ranks = ",".join(map(str, spread))
        yield f"servers share a NUMA node; --server-ranks {better_ranks} would spread them"
