"""NUMA nodes of a host, and how its ranks are bound.

The kernel tells which cores share a memory (``/sys/devices/system/node``). A rank that may run on
cores of several NUMA nodes moves away from its memory, and reads it more slowly from there.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpips.config import Config
from mpips.errors import counted, listed
from mpips.layout.roles import assign, spread_over, training

SYSTEM = Path("/sys/devices/system")
SHOWN = 3  # hosts by name
Cores = frozenset[int]
Nodes = Mapping[int, Cores]
Bound = tuple[Cores, Nodes]  # of a rank: the cores that it may run on, and its host's NUMA nodes


def numa_nodes(system: Path = SYSTEM) -> dict[int, Cores]:
    """Return the online cores of each NUMA node that has some; {} where the kernel names none."""
    online, found = _cores(system / "cpu" / "online"), dict[int, Cores]()
    for path in (system / "node").glob("node[0-9]*/cpulist"):
        found[int(path.parent.name.removeprefix("node"))] = _cores(path) & online
    return {node: found[node] for node in sorted(found) if found[node]}


def text_of(path: Path) -> str:
    """Return the text of a file, without white space around it; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _cores(path: Path) -> Cores:
    """Return the cores of a list such as ``0-3,8``; none of a file that is not there."""
    ends = [part.partition("-") for part in text_of(path).split(",") if part]
    return frozenset(k for a, _, b in ends for k in range(int(a), int(b or a) + 1))


def bound() -> Bound:
    """Return the cores that this process may run on, and the NUMA nodes of its host."""
    return frozenset(os.sched_getaffinity(0)), numa_nodes()


def touched(cores: Cores, nodes: Nodes) -> list[int]:
    """Return the NUMA nodes that some of the cores belong to."""
    return [node for node, here in nodes.items() if cores & here]


def judge_binding(masks: Sequence[Cores], nodes: Nodes) -> tuple[str, str]:
    """Judge how the ranks of a host are bound.

    Args:
        masks: The cores that each rank may run on.
        nodes: The cores of each NUMA node.

    Returns:
        What is wrong and what to do about it; empty texts if nothing is.
    """
    whole, every = frozenset[int]().union(*nodes.values()), frozenset[int]().union(*masks)
    for mask in masks:
        shared = sum(other <= mask for other in masks)
        if shared > len(mask) and mask != whole:  # more ranks than the host has cores take turns
            found = f"{shared} of them are bound to {counted(len(mask), 'core')}"
            return found, "bind ranks to cores of their own, or to none: mpirun --bind-to none"
    used = touched(every, nodes)
    wide = [mask for mask in masks if len(touched(mask, nodes)) > 1]
    if not wide or len(masks) < len(used):  # who is alone on several has all of them
        return "", ""
    found = f"{len(wide)} of them may run on several of {len(used)} NUMA nodes"
    free = all(mask == every for mask in masks)
    found += ", as they are not bound" * free
    remedy = "bind each rank to one: mpirun --map-by numa --bind-to numa (MPICH: -bind-to numa), "
    sizes = [len(nodes[node] & every if free else nodes[node]) for node in used]
    each = cores_a_rank(len(masks), sizes)
    return found, f"{remedy}srun --cpus-per-task={each} --cpu-bind=ldoms"


def cores_a_rank(ranks: int, sizes: Sequence[int]) -> int:
    """Return the most cores that each rank can have, one rank after another, on one NUMA node.

    Args:
        ranks: Of the host; not more than cores.
        sizes: Cores of each of its NUMA nodes.
    """
    least = min(sizes)
    most = max(1, least // -(-ranks // len(sizes)))
    return max(k for k in range(1, most + 1) if least % k == 0)


def spread_text(masks: Sequence[Cores], nodes: Nodes) -> str:
    """Return over how many NUMA nodes the ranks of a host are spread; empty if over one."""
    used = touched(frozenset[int]().union(*masks), nodes)
    counts = [sum(touched(mask, nodes) == [node] for mask in masks) for node in used]
    text = f" of {len(used)} NUMA nodes" if len(used) > 1 else ""
    if not text or sum(counts) < len(masks):
        return text
    each = f"{counts[0]} on each" if len(set(counts)) == 1 else f"{listed(counts, 8)} on them"
    return f"{text}, {each}"


# What --explain says of them ---------------------------------------------------------------------


def binding_text(
    config: Config, hosts: Sequence[str], node_of: Sequence[int], ranks: Sequence[Bound]
) -> str:
    """Return what is to be said of the binding of a world's ranks; lines, or nothing.

    Args:
        config: The job.
        hosts: Host name of each rank.
        node_of: Node number of each rank.
        ranks: How each is bound.
    """
    told: dict[str, list[str]] = {}
    for host in dict.fromkeys(hosts):
        here = [each for other, each in zip(hosts, ranks, strict=True) if other == host]
        masks, nodes = [mask for mask, _ in here], here[0][1]
        cores, (found, remedy) = len(frozenset().union(*masks)), judge_binding(masks, nodes)
        spread = "" if found else spread_text(masks, nodes)
        if found or spread:
            text = f"{counted(len(masks), 'rank')} on {counted(cores, 'core')}{spread}"
            told.setdefault(text + f", but {found}; {remedy}" * bool(found), []).append(host)
    lines = [f"binding on {listed(names, SHOWN)}: {text}" for text, names in told.items()]
    return "".join(f"{line}\n" for line in [*lines, *_server_lines(config, hosts, node_of, ranks)])


def _server_lines(
    config: Config, hosts: Sequence[str], node_of: Sequence[int], ranks: Sequence[Bound]
) -> Iterator[str]:
    """Yield which ranks would be servers on more NUMA nodes than now, if there are such."""
    c, world = config, training(len(hosts), config.evaluators)
    hosts, node_of = hosts[:world], node_of[:world]
    servers = assign(c.mode, hosts, node_of, c.servers, c.server_ranks, c.server_hosts).servers
    homes = [touched(*each) for each in ranks[:world]]
    if c.spares or any(len(home) != 1 for home in homes):
        return
    numbers = [node for (node,) in homes]
    spread, few = list[int](), False
    for node in sorted(set(node_of)):
        here = [rank for rank in range(world) if node_of[rank] == node]
        now = [rank for rank in here if rank in servers]
        better = spread_over(len(now), here, numbers)
        few |= len({numbers[r] for r in better}) > len({numbers[r] for r in now})
        spread += better
    if few:
        those = ",".join(map(str, spread))
        yield f"servers share a NUMA node; --server-ranks {those} would spread them"
