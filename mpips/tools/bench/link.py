"""Pulls, pushes, overlap and rounds between nodes, beside raw TCP.

One rank of the first node is the server, one of the second node is the worker; the others sleep.
All ranks take part in rounds. A round is compared with the time of a reduce-scatter and an
all-gather between the nodes at TCP's rate (Thakur et al., IJHPCA 2005: each link carries 2 (H - 1)
/ H of the data for H nodes).
"""

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpips.mpi.collectives import begin_broadcast, broadcast
from mpips.mpi.start import is_open_mpi
from mpips.mpi.world import Cluster
from mpips.tools.bench import measure
from mpips.tools.bench.measure import Options, Row, bytes_text, in_turn
from mpips.tools.bench.pushpull import Exchange
from mpips.tools.bench.rounds import Rounds
from mpips.tools.bench.vector import Vector, make_job
from mpips.tools.bench.world import Rows, T, among

PIECE_BYTES = 1 << 20
TIMEOUT_S = 20.0
SIZES = (64 << 10, 1 << 20, 4 << 20, 64 << 20)
QUICK = (64 << 10,)
ROUND_BYTES = 16 << 20
TRANSFERS = (3, 20)  # smallest and largest number in one repeat
WORK_BYTES = 64 << 20
READS, PAUSE_S = 200, 5e-3
FAST = 300e6  # bytes/s of TCP, above which processors are the limit and aims are lower
LATENCY_S = 0.2e-3
OVERLAP = 1 / 1.15
OVERLAP_STEPS = 10  # smallest number of steps, as the last push of a repeat overlaps with no step
OVERLAP_REPEATS = 2  # largest number of repeats if a transfer takes long


def _addresses() -> list[str]:
    """Return the addresses of this host, the loopback addresses last."""
    addresses = []
    with contextlib.suppress(OSError):
        addresses += socket.gethostbyname_ex(socket.gethostname())[2]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing, but selects a route
        addresses.append(probe.getsockname()[0])
    return sorted(dict.fromkeys(addresses), key=lambda a: a.startswith("127."))


class Link:
    """A TCP connection between rank 0, which listens, and rank 1. Collective: yes, over both."""

    def __init__(self, cluster: Cluster) -> None:
        self._first = cluster.rank == 0
        if self._first:
            with socket.create_server(("", 0)) as server:
                server.settimeout(TIMEOUT_S)
                broadcast(cluster.comm, (_addresses(), server.getsockname()[1]))
                self._socket, _ = server.accept()
        else:
            address: tuple[list[str], int] = broadcast(cluster.comm, None)
            self._socket = self._connect(*address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)

    @staticmethod
    def _connect(names: list[str], port: int) -> socket.socket:
        for name in names:
            with contextlib.suppress(OSError):
                return socket.create_connection((name, port), timeout=TIMEOUT_S / len(names))
        raise OSError(f"no connection to {names} port {port}")

    def send(self, data: np.ndarray) -> None:
        """Send an array as raw bytes."""
        self._socket.sendall(memoryview(data.data).cast("B"))

    def receive(self, out: np.ndarray) -> None:
        """Receive a whole array of raw bytes."""
        view, at = memoryview(out.data).cast("B"), 0
        while at < len(view):
            at += self._socket.recv_into(view[at : at + PIECE_BYTES])

    def one_way(self, data: np.ndarray, times: int, from_first: bool) -> None:
        """Move `data` `times` times in one direction, and one byte back at the end."""
        sends = self._first == from_first
        self._move(data, times, sends)
        self._move(np.zeros(1, "u1"), 1, not sends)

    def both_ways(self, data: np.ndarray, out: np.ndarray, times: int) -> None:
        """Move `data` `times` times in both directions at once."""
        sender = threading.Thread(target=self._move, args=(data, times, True))
        sender.start()
        self._move(out, times, False)
        sender.join()

    def _move(self, data: np.ndarray, times: int, sends: bool) -> None:
        for _ in range(times):
            (self.send if sends else self.receive)(data)

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._socket.close()


def run(cluster: Cluster, options: Options) -> Iterator[Row]:
    """Compare at each size. Collective: yes."""
    of_pair = yield from pair_of(cluster, lambda two: _between(two, options))
    rate = np.array([of_pair or 0.0])
    cluster.wait_request(begin_broadcast(cluster.comm, rate, cluster.node_of.index(0)))
    yield _round(cluster, options, float(rate[0]))


def pair_of(cluster: Cluster, work: Callable[[Cluster], Rows[T]]) -> Rows[T | None]:
    """Call `work` on a rank of the first node and one of the second node; see `among`."""
    return among(cluster, (cluster.node_of.index(0), cluster.node_of.index(1)), work)


def _between(cluster: Cluster, options: Options) -> Rows[float]:
    """Measure between two ranks; returns TCP's rate in bytes/s."""
    link = Link(cluster)
    for size in options.pick(SIZES, QUICK):
        rows, rate = _transfers(cluster, link, size, options)
        yield from rows
        if size >= 1 << 20 or options.quick:
            yield from _overlap(cluster, size, options, rate)
    yield _latency(cluster)
    link.close()
    return rate


class Sides:
    """Pulls, pushes and steps of a server and a worker on two ranks, as sides of comparisons."""

    def __init__(
        self, cluster: Cluster, size: int, prefetch: bool = True, node_size: int = 1, **options: Any
    ) -> None:
        # A cluster of its own, since a server receives messages from any rank of its cluster.
        self.cluster = Cluster(cluster.comm, node_size)
        job = make_job(self.cluster, size // 4, "async", servers=1, prefetch=prefetch, **options)
        assert isinstance(job.problem, Vector)
        self.size, self.exchange, self.problem = size, Exchange(job), job.problem
        least, most = TRANSFERS
        self.times = max(least, min(most, WORK_BYTES // size))

    def free(self) -> None:
        """Free the store. Collective: yes."""
        self.exchange.free()
        self.cluster.free()

    def pull(self) -> None:
        """Pull `self.times` times."""

        def work() -> None:
            out = np.zeros(self.size // 4, "f4")
            for _ in range(self.times):
                self.exchange.puller.pull(out)

        self.exchange.serve_while(work, 0)

    def push(self) -> None:
        """Push `self.times` times, without a pull."""

        def work() -> None:
            sender, versions = self.exchange.sender, np.zeros(1, "i8")
            for _ in range(self.times):
                self.cluster.wait(lambda: sender.writable(sender.seq + 1))
                sender.push((0, 0, 1), 1, 0.0, versions)

        self.exchange.serve_while(work, self.times)

    def both(self) -> None:
        """Pull, compute and push `self.times` times."""
        self.exchange.exchange(self.times)

    def compute(self) -> None:
        """Compute `self.times` gradients on the worker, and send nothing."""
        if self.exchange.server is None:
            for k in range(self.times):
                self.exchange.compute(k)


def _transfers(
    cluster: Cluster, link: Link, size: int, options: Options
) -> tuple[list[Row], float]:
    sides, steps = Sides(cluster, size), Sides(cluster, size)
    data, back, times = np.zeros(size, "u1"), np.zeros(size, "u1"), sides.times
    turns = {
        "remote pull": sides.pull,
        "tcp remote pull": lambda: link.one_way(data, times, from_first=True),
        "remote push": sides.push,
        "tcp remote push": lambda: link.one_way(data, times, from_first=False),
        "remote pull+push": steps.both,
        "tcp remote pull+push": lambda: link.both_ways(data, back, times),
    }
    spent = in_turn(cluster, turns, options.repeats)
    way = sides.exchange.remote_way
    sides.free()
    steps.free()
    rows, mb = [], times * size / 1e6
    rate = times * size / statistics.median(spent["tcp remote push"])
    reach = (0.75 if rate > FAST else 0.9) if size >= 4 << 20 else None
    for name in ("remote pull", "remote push", "remote pull+push"):
        case = bytes_text(size) + ("" if name == "remote push" else f", by {way}")
        names = name, case, "raw TCP, both ways" if "+" in name else "raw TCP"
        rows.append(measure.rates(names, mb, "MB/s", (spent[name], spent[f"tcp {name}"]), reach))
    return rows, rate


def _overlap(cluster: Cluster, size: int, options: Options, rate: float) -> Iterator[Row]:
    """Compare steps with the longer of their computation and communication, which overlap.

    There is an aim only for slow links, since TCP on a fast link needs the core that computes.
    """
    reach = OVERLAP if rate <= FAST else None
    sides, repeats = Sides(cluster, size), options.repeats
    if sides.times < OVERLAP_STEPS:
        sides.times, repeats = OVERLAP_STEPS, min(repeats, OVERLAP_REPEATS)
    for share in (0.7, 1.0, 1.4):
        sides.problem.passes = 1
        passes = broadcast(cluster.comm, _passes(cluster, sides, share), 1)
        alone = Sides(cluster, size)
        alone.times = sides.times
        sides.problem.passes = passes
        turns = {"step": sides.both, "move": alone.both, "compute": sides.compute}
        spent = in_turn(cluster, turns, repeats)
        alone.free()
        longer = [*map(max, spent["move"], spent["compute"])]
        move, work = (statistics.median(spent[k]) * 1e3 / sides.times for k in ("move", "compute"))
        case = f"{bytes_text(size)}, compute {work:.3g} ms, move {move:.3g} ms"
        names = "remote step", case, "the longer of the two"
        yield measure.milliseconds(names, sides.times, (spent["step"], longer), reach)
    sides.free()


def _passes(cluster: Cluster, sides: Sides, share: float) -> int:
    """Return the number of passes over the vector that take `share` of the time to move it."""
    spent = in_turn(cluster, {"move": sides.both, "compute": sides.compute}, 2)
    return max(1, round(share * min(spent["move"]) / min(spent["compute"])))


def _latency(cluster: Cluster) -> Row:
    """Time pulls of a shard of 16 parameters, with 5 ms between two pulls."""
    sides = Sides(cluster, 64, prefetch=False)
    spent: list[float] = []

    def work() -> None:
        out = np.zeros(16, "f4")
        for _ in range(READS):
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            sides.exchange.puller.pull(out)
            spent.append(time.perf_counter() - start)

    sides.exchange.serve_while(work, 0)
    way = sides.exchange.remote_way
    sides.free()
    median = broadcast(cluster.comm, statistics.median(spent) if spent else 0.0, 1)
    case, beside = f"64 bytes every 5 ms, by {way}", "bound"
    ratio, us = LATENCY_S / median, 1e6
    return Row("remote read", case, median * us, "us", beside, LATENCY_S * us, ratio, 1.0)


def _round(cluster: Cluster, options: Options, rate: float) -> Row:
    """Compare a round of all ranks with the time that the links need for its bytes."""
    size, nodes = QUICK[0] if options.quick else ROUND_BYTES, cluster.nodes
    count = TRANSFERS[0]
    rounds = Rounds(cluster, size)
    times = in_turn(cluster, {"mpips": lambda: rounds.exchange(count)}, options.repeats)
    rounds.free()
    ideal = [count * 2 * (nodes - 1) / nodes * size / rate] * options.repeats
    reach = {True: (1 / 1.6, 1 / 1.8), False: (1 / 1.3, 1 / 1.5)}[is_open_mpi()]
    aim = reach[nodes > 2] if rate <= FAST else None
    case = f"{bytes_text(size)}, {cluster.world} ranks on {nodes} nodes"
    names = "remote round", case, "its bytes at TCP's rate"
    return measure.milliseconds(names, count, (times["mpips"], ideal), aim)
