"""Bytes of pushes and pulls on the wire, by the interfaces' counters.

For each codec, one rank of the first node is the server, one of the second node is the worker; the
others sleep. Then all ranks make steps, without and with the options by which the workers of a node
share messages: `node_aggregation` for pushes, `share_pulls` for pulls.

The bytes are all bytes that the sender's host sends on its busiest interface, with the headers of
all layers and replies to the other side. Other programs should send nothing meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpips.errors import UserError
from mpips.layout.roles import assign
from mpips.mpi.collectives import broadcast, gather_all
from mpips.mpi.world import Cluster
from mpips.tools.bench.link import Sides, pair_of
from mpips.tools.bench.measure import Options, Row, bytes_text
from mpips.tools.bench.pushpull import Exchange
from mpips.tools.bench.vector import make_job
from mpips.tools.bench.world import Rows

COUNTERS = Path("/proc/self/net/dev")  # of this process's own network namespace
SENT = 8  # column of the bytes sent, after the name
SIZES, QUICK = (16 << 20,), (1 << 20,)
AIMS = {"fp16": 1.95, "bf16": 1.95, "int8": 3.8, "int4": 7.5, "topk": 40.0, "onebit": 28.0}
PULLED = ("fp16", "bf16", "int8")
LEAST = 0.9  # smallest share of the bytes of plain messages that a counter must count
STEPS = 24
TOGETHER = 0.85  # aim: shared messages have so many times fewer bytes, per worker of a node


def run(cluster: Cluster, options: Options) -> Iterator[Row]:
    """Count bytes for each codec, and for shared messages, at each size. Collective: yes."""
    yield from pair_of(cluster, lambda two: _between(two, options))
    for size in options.pick(SIZES, QUICK):
        yield from neighbours(cluster, size)


def _between(cluster: Cluster, options: Options) -> Rows[None]:
    for size in options.pick(SIZES, QUICK):
        for what, option, names in (("push", "codec", tuple(AIMS)), ("pull", "pull_codec", PULLED)):
            plain = _bytes(cluster, size, what, {option: "none"})
            check_counted(plain, size, f"a {what}")
            for name in names:
                mine = _bytes(cluster, size, what, {option: name})
                case, mb = f"{bytes_text(size)}, {name}", 1e-6
                ratio, aim = plain / mine, AIMS[name]
                yield Row(f"wire {what}", case, mine * mb, "MB", "none", plain * mb, ratio, aim)


def check_counted(counted: float, size: int, what: str) -> None:
    """Check that the counters include the messages, unlike those of InfiniBand's own transport.

    Raises:
        UserError: If the counters have far fewer bytes than were sent.
    """
    if counted < LEAST * size:
        got = f"{counted:,.0f} bytes counted for {what} of {size:,} bytes"
        remedy = f"let MPI send by TCP: only what {COUNTERS} counts is seen"
        raise UserError(got, f"at least {LEAST:.0%} of them", remedy)


def _bytes(cluster: Cluster, size: int, what: str, options: Mapping[str, str]) -> float:
    """Return the bytes that the sender's host sends for one push or pull. Collective: yes."""
    sides = Sides(cluster, size, False, 1, **options)
    if sides.exchange.server is None:
        draws = np.random.default_rng(0)
        for seq in range(2):
            draws.standard_normal(size // 4, "f4", out=sides.exchange.sender.buffer(seq))
    work: Callable[[], None] = sides.push if what == "push" else sides.pull
    work()  # opens connections
    counted = broadcast(cluster.comm, _counted(cluster, work), 1 if what == "push" else 0)
    times = sides.times
    sides.free()
    return float(counted) / times


def neighbours(cluster: Cluster, size: int) -> list[Row]:
    """Count the bytes of steps, without and with shared messages. Collective: yes.

    There are no rows unless a node has several remote workers.
    """
    home = cluster.node_of[assign("async", cluster.hosts, cluster.node_of, 1).servers[0]]
    remote = [node for node in cluster.node_of if node != home]
    workers = len(remote) / (cluster.nodes - 1)
    if workers <= 1:
        return []
    alone = _step_bytes(cluster, size, home, node_aggregation=False, share_pulls=False)
    joined = _step_bytes(cluster, size, home, node_aggregation=True, share_pulls=True)
    rows, mb, aim = [], 1e-6, TOGETHER * workers
    for what, option in (("push", "node_aggregation"), ("pull", "share_pulls")):
        check_counted(alone[what] / len(remote), size, f"a {what}")
        case = f"{bytes_text(size)}, {workers:.3g} workers a node, {option}"
        mine, other, ratio = joined[what] * mb, alone[what] * mb, alone[what] / joined[what]
        rows.append(Row(f"wire {what}", case, mine, "MB", "each for itself", other, ratio, aim))
    return rows


def _step_bytes(cluster: Cluster, size: int, home: int, **options: Any) -> dict[str, float]:
    """Return the bytes per step that the server's node `home` sends, and that all others send.

    Collective: yes.
    """
    exchange = Exchange(make_job(cluster, size // 4, "async", servers=1, **options))
    exchange.exchange(1)  # opens connections
    counts = gather_all(cluster.comm, _counted(cluster, lambda: exchange.exchange(STEPS)))
    exchange.free()
    sent = [counts[cluster.node_of.index(node)] / STEPS for node in range(cluster.nodes)]
    return {"pull": sent[home], "push": sum(sent) - sent[home]}


def _counted(cluster: Cluster, work: Callable[[], None]) -> int:
    """Return the bytes that this host sends while all ranks call `work`. Collective: yes."""
    cluster.barrier()
    before = bytes_sent(COUNTERS.read_text())
    cluster.barrier()
    work()
    cluster.barrier()  # by now, the system has sent the bytes in its buffers
    return grown(before, bytes_sent(COUNTERS.read_text()))


def bytes_sent(text: str) -> dict[str, int]:
    """Return the bytes that each network interface has sent, by name.

    Args:
        text: Text of ``/proc/net/dev`` (proc(5)): two lines of headings, then a line for each
            interface.
    """
    lines = [line.partition(":") for line in text.splitlines()[2:]]
    return {name.strip(): int(columns.split()[SENT]) for name, _, columns in lines}


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return the largest growth of a counter."""
    return max((n - before.get(name, 0) for name, n in after.items()), default=0)
