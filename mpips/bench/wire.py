"""Bytes that a push and a pull take on the wire with each codec, by the interfaces' counters.

One rank of the first node is the server, one of the second the worker; the others sleep. What
counts is what the sending side's host sends, headers of all layers and answers to the other side
included, over the interface that sends most; nothing else should be sent from there meanwhile.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from mpips.bench.link import Sides, pair_of
from mpips.bench.measure import Options, Row, bytes_text
from mpips.cluster import Cluster
from mpips.errors import UserError

COUNTERS = Path("/proc/self/net/dev")  # of this process's own network namespace
SENT = 8  # column of the bytes sent, after the name
SIZES, QUICK = (16 << 20,), (1 << 20,)
AIMS = {"fp16": 1.95, "bf16": 1.95, "int8": 3.8, "topk": 40.0, "onebit": 28.0}
PULLED = ("fp16", "bf16", "int8")
LEAST = 0.9  # of the bytes of plain messages must be seen by a counter


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Count with each codec, at each size. Collective: yes."""
    return pair_of(cluster, lambda two: _between(two, options)) or []


def _between(cluster: Cluster, options: Options) -> list[Row]:
    rows = []
    for size in options.pick(SIZES, QUICK):
        for what, option, names in (
            ("push", "codec", tuple(AIMS)),
            ("pull", "pull_codec", PULLED),
        ):
            plain = _bytes(cluster, size, what, {option: "none"})
            _check(cluster, plain, size, what)
            for name in names:
                mine = _bytes(cluster, size, what, {option: name})
                case, mb = f"{bytes_text(size)}, {name}", 1e-6
                ratio, aim = plain / mine, AIMS[name]
                row = Row(f"wire {what}", case, mine * mb, "MB", "none", plain * mb, ratio, aim)
                rows.append(row)
    return rows


def _check(cluster: Cluster, counted: float, size: int, what: str) -> None:
    """Raise where the counters do not see the messages, as with InfiniBand's own transport."""
    if counted < LEAST * size:
        got = f"{counted:,.0f} bytes counted for a {what} of {size:,} bytes"
        remedy = f"let MPI send by TCP: only what {COUNTERS} counts is seen"
        raise UserError(got, f"at least {LEAST:.0%} of them", remedy)


def _bytes(cluster: Cluster, size: int, what: str, options: Mapping[str, str]) -> float:
    """Return the bytes that one push or pull takes at the side that sends it. Collective: yes."""
    sides = Sides(cluster, size, False, 1, **options)
    if sides.exchange.server is None:
        draws = np.random.default_rng(0)
        for seq in range(2):
            draws.standard_normal(size // 4, "f4", out=sides.exchange.sender.buffer(seq))
    work: Callable[[], None] = sides.push if what == "push" else sides.pull
    work()  # for the first time: connections are made
    cluster.barrier()
    before = bytes_sent(COUNTERS.read_text())
    cluster.barrier()
    work()
    cluster.barrier()  # what a send leaves in the buffers of the system has come by now
    mine = grown(before, bytes_sent(COUNTERS.read_text()))
    counted = cluster.comm.bcast(mine, 1 if what == "push" else 0)
    times = sides.times
    sides.free()
    return float(counted) / times


def bytes_sent(text: str) -> dict[str, int]:
    """Return the bytes that each interface has sent, by its name.

    Args:
        text: Of ``/proc/net/dev`` (proc(5)): two lines of headings, then a line an interface.
    """
    lines = [line.partition(":") for line in text.splitlines()[2:]]
    return {name.strip(): int(columns.split()[SENT]) for name, _, columns in lines}


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return by how much the counter has grown that has grown most."""
    return max((n - before.get(name, 0) for name, n in after.items()), default=0)
