"""Table rows pulled and pushed between two nodes, beside plain messages.

One rank owns the rows, and another rank reads and pushes some; each counts as a node. On the other
side, one message moves the rows of a step, without sorting, reading or applying them.

Between two hosts, the rate of the moved bytes (rows and their numbers) is also compared with raw
TCP on the same link, for one worker and for two workers of one host. In a "pull ahead", the worker
requests the rows of a step before it takes those of the previous step.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import numpy as np

from mpips.layout.tables import Table
from mpips.library.optimizers import Adagrad
from mpips.mpi.collectives import cluster_subset, gather_all
from mpips.mpi.collectives import free as free_comm
from mpips.mpi.start import TAG_PLAIN
from mpips.mpi.world import Cluster
from mpips.ps.assemble import WorkerHalf
from mpips.tables.step_rows import StepRows
from mpips.tools.bench.link import FAST, Link
from mpips.tools.bench.measure import Options, Row, in_turn, rates
from mpips.tools.bench.pushpull import Exchange
from mpips.tools.bench.row_ids import row_ids
from mpips.tools.bench.rows import DIM, IDS
from mpips.tools.bench.vector import make_job
from mpips.tools.bench.world import Rows, among

ROWS, QUICK_ROWS = 1_000_000, 10_000
STEPS = 32
REACH = 0.85  # smallest share of raw TCP's rate that is the aim
ON_THE_WIRE = ("pull", "pull_ahead", "push")


class _Sides(Exchange):
    """One rank's part in each side of the comparison."""

    def __init__(self, cluster: Cluster, rows: int, codec: str = "none") -> None:
        tables = {"rows": Table(rows, DIM, optimizer=Adagrad(0.1))}
        options = {"servers": 1, "far_read": "reply", "codec": codec, "pull_codec": codec}
        super().__init__(make_job(cluster, 1, "async", tables, **options))
        self._ids = list(row_ids("zipf-rows", rows)[:STEPS])
        self._grads = np.random.default_rng(0).standard_normal((IDS, DIM), "f4")
        counts = [len(np.unique(ids)) for ids in self._ids]
        self._plain = [np.zeros((count, DIM), "f4") for count in counts]

    @property
    def _worker(self) -> tuple[WorkerHalf, StepRows]:
        half = self._half
        assert isinstance(half, WorkerHalf)
        assert half.rows is not None, "there is a table"
        return half, half.rows

    def pull(self, ahead: bool = False) -> None:
        """Read the rows of each step; with `ahead`, request those of the next step before."""

        def work() -> None:
            _, rows = self._worker
            for ids in self._ids[: int(ahead)]:
                rows.ask("rows", ids)
            for ids, following in zip(self._ids, [*self._ids[1:], None], strict=True):
                if ahead and following is not None:
                    rows.ask("rows", following)
                rows.pull("rows", ids)

        self.serve_while(work, 0)

    def pull_ahead(self) -> None:
        """Request the rows of the next step, then read the rows of a step."""
        self.pull(ahead=True)

    @property
    def nbytes(self) -> int:
        """Bytes of rows and row numbers that this worker has moved; 0 on the server."""
        if self.server is not None:
            return 0
        half, rows = self._worker
        return sum(rows.bytes_moved) + half.sender.push_sender.bytes_sent

    def push(self) -> None:
        """Push the gradients of each step, and wait until the server has applied all."""

        def work() -> None:
            (half, rows), wait = self._worker, self.cluster.wait
            for ids in self._ids:
                seq = half.sender.seq + 1
                wait(partial(half.writable, seq))
                rows.begin(seq)
                rows.push("rows", ids, self._grads)
                half.sender.push((0, 0, 1), 1, 0.0, half.puller.versions)
            wait(half.sender.push_sender.sent)

        self.serve_while(work, STEPS)

    def plain_pull(self) -> None:
        """Request the rows of each step by a message, and receive them in one message."""
        send, receive = self.cluster.arrays.begin_send, self.cluster.arrays.begin_receive
        word = np.zeros(1, "i8")
        for rows in self._plain:
            if self.cluster.rank:
                received = receive(rows, 0, TAG_PLAIN)
                self.cluster.wait_request(send(word, 0, TAG_PLAIN))
                self.cluster.wait_request(received)
            else:
                self.cluster.wait_request(receive(word, 1, TAG_PLAIN))
                self.cluster.wait_request(send(rows, 1, TAG_PLAIN))

    def plain_push(self) -> None:
        """Send the gradients of each step in one message."""
        send, receive = self.cluster.arrays.begin_synchronous_send, self.cluster.arrays
        for rows in self._plain:
            if self.cluster.rank:
                self.cluster.wait_request(send(rows, 0, TAG_PLAIN))
            else:
                self.cluster.wait_request(receive.begin_receive(rows, 1, TAG_PLAIN))


def run(cluster: Cluster, options: Options) -> Iterator[Row]:
    """Compare pulls and pushes of one and of two workers; other ranks sleep. Collective: yes."""
    apart = cluster.nodes > 1
    server = cluster.node_of.index(0)
    workers = [r for r, node in enumerate(cluster.node_of) if node == 1] if apart else [1]
    yield from among(cluster, [server, workers[0]], lambda two: _beside_plain(two, options))
    for count in (1, 2) if apart else ():
        ranks = [server, *workers[:count]]
        for codec in ("none", "fp16", "int8") if len(ranks) > count else ():
            yield from among(cluster, ranks, partial(_beside_tcp, codec=codec, options=options))


def _beside_plain(cluster: Cluster, options: Options) -> Rows[None]:
    rows = QUICK_ROWS if options.quick else ROWS
    names = ("pull", "plain_pull", "push", "plain_push")
    sides = _Sides(cluster, rows)
    times = in_turn(cluster, {name: getattr(sides, name) for name in names}, options.repeats)
    sides.free()
    for mine, other in (names[:2], names[2:]):
        what = "Adagrad" if mine == "push" else "pull"
        case = f"{IDS:,} x {DIM} floats of {rows / 1e6:g} M rows, Zipf 1.05, {what}"
        both = times[mine], times[other]
        yield rates(("remote_rows", case, "plain messages"), STEPS * IDS / 1e6, "M rows/s", both)


def _beside_tcp(cluster: Cluster, codec: str, options: Options) -> Rows[None]:
    """Compare the rate of bytes with raw TCP to the first worker. Collective: yes."""
    rows = QUICK_ROWS if options.quick else ROWS
    tables, moved = _Sides(cluster, rows, codec), dict.fromkeys(ON_THE_WIRE, 0)
    pair = cluster_subset(cluster, (0, 1))
    link = Link(two := Cluster(pair, 1)) if cluster.rank < 2 else None
    data = np.zeros(IDS * DIM, "f4")

    def counted(name: str) -> None:
        before = tables.nbytes
        getattr(tables, name)()
        moved[name] = tables.nbytes - before

    def plain() -> None:
        if link is not None:
            link.one_way(data, STEPS, from_first=True)

    sides = {name: partial(counted, name) for name in ON_THE_WIRE}
    times = in_turn(cluster, {**sides, "tcp": plain}, options.repeats)
    everyone = gather_all(cluster.comm, moved)
    if link is not None:
        link.close()
        two.free()
    free_comm(pair)
    tables.free()
    total = {name: sum(each[name] for each in everyone) for name in ON_THE_WIRE}
    rate = STEPS * data.nbytes / statistics.median(times["tcp"])
    workers = cluster.world - 1
    for name in ON_THE_WIRE:
        due = [taken * total[name] / (STEPS * data.nbytes) for taken in times["tcp"]]
        packed = "" if codec == "none" else f" by {codec}"
        who = f"{workers} worker{'s' * (workers > 1)}"
        names = "remote_rows", f"{who}, {name.replace('_', ' ')}{packed}", "raw TCP"
        # No aim for a pull, which waits for a round trip, nor for int8, whose steps are too short.
        aim = REACH if rate <= FAST and name != "pull" and codec != "int8" else None
        yield rates(names, total[name] / 1e6, "MB/s", (times[name], due), aim)
