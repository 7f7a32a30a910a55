"""Rows of a sparse table, pulled and pushed between two nodes, beside plain messages of as many.

Rank 0 owns the rows, and rank 1 reads and pushes some; each counts as a node of its own. Beside it
the rows of each step go in one message, without sorting, reading or applying them.
"""

import time
from collections.abc import Callable

import numpy as np

from mpips.bench.measure import Options, Row, compare, in_turn
from mpips.bench.peers.script import zipf
from mpips.bench.rows import DIM, IDS
from mpips.cluster.collectives import begin_barrier, cluster_subset
from mpips.cluster.collectives import free as free_comm
from mpips.cluster.tags import TAG_PLAIN
from mpips.cluster.waiting import take_turns
from mpips.cluster.world import Cluster
from mpips.layout import cut
from mpips.layout.roles import assign
from mpips.layout.tables import Table
from mpips.library.optimizers import Adagrad
from mpips.optim import make_rule
from mpips.optim.row_rules import make_row_rule
from mpips.planning.tables import JobTable
from mpips.ps.assemble import ServerHalf, assemble
from mpips.ps.design import Design

ROWS, QUICK_ROWS = 1_000_000, 10_000
STEPS = 32


class _Sides:
    """One rank's part of each side of the comparison."""

    def __init__(self, cluster: Cluster, rows: int) -> None:
        self._cluster, rng = cluster, np.random.default_rng(0)
        cluster.roles = assign("async", cluster.hosts, cluster.node_of, 1)
        table = Table(rows, DIM)
        made = JobTable("rows", table, make_row_rule(Adagrad(0.1)), 0, IDS, lambda version: 0.1)
        rule = make_rule("sgd")
        design = Design(
            cut(1, 1, 4), "float32", rule, lambda version: 0.1, far_read="reply", tables=[made]
        )
        self._half, self._seq = assemble(cluster, design), 0
        drawn = (np.minimum(zipf(rng, rows, IDS), rows - 1) for _ in range(STEPS))
        self._ids = [ids.astype(np.int64) for ids in drawn]
        self._grads = rng.standard_normal((IDS, DIM), "f4")
        counts = [len(np.unique(ids)) for ids in self._ids]
        self._plain = [np.zeros((count, DIM), "f4") for count in counts]
        if isinstance(self._half, ServerHalf):
            self._half.open(cluster.wait_request)

    def pull(self) -> None:
        """Read the rows of each step."""

        def work() -> None:
            rows = self._half.rows  # type: ignore[union-attr]
            assert rows is not None, "there is a table"
            for ids in self._ids:
                rows.pull("rows", ids)

        self._while(work, 0)

    def push(self) -> None:
        """Push the gradients of each step, until all are applied."""

        def work() -> None:
            half, cluster = self._half, self._cluster
            assert not isinstance(half, ServerHalf)
            for ids in self._ids:
                seq = half.sender.seq + 1
                cluster.wait(lambda s=seq: half.writable(s))  # type: ignore[misc]
                half.rows.begin(seq)  # type: ignore[union-attr]
                half.rows.push("rows", ids, self._grads)  # type: ignore[union-attr]
                half.sender.push((0, 0, 1), 1, 0.0, half.puller.versions)
            cluster.wait(half.sender.sent)

        self._while(work, STEPS)

    def _while(self, work: Callable[[], None], pushes: int) -> None:
        """Have the worker work, and the server serve until that is over and applied."""
        half, cluster = self._half, self._cluster
        self._seq += pushes
        if not isinstance(half, ServerHalf):
            work()
            cluster.wait_request(begin_barrier(cluster.comm))
            return
        done = begin_barrier(cluster.comm)

        def turn() -> bool:
            push = half.receiver.take()
            if push is not None:
                half.server.apply(push)
            return half.server.serve_reads() or push is not None

        def over() -> bool:
            return done.Test() and half.server.version >= self._seq

        take_turns(turn, over, cluster.ranks_per_core)

    def plain_pull(self) -> None:
        """Have the rows of each step sent when they are asked for, in one message."""
        send, receive = self._cluster.arrays.begin_send, self._cluster.arrays.begin_receive
        word = np.zeros(1, "i8")
        for rows in self._plain:
            if self._cluster.rank:
                here = receive(rows, 0, TAG_PLAIN)
                self._cluster.wait_request(send(word, 0, TAG_PLAIN))
                self._cluster.wait_request(here)
            else:
                self._cluster.wait_request(receive(word, 1, TAG_PLAIN))
                self._cluster.wait_request(send(rows, 1, TAG_PLAIN))

    def plain_push(self) -> None:
        """Send gradients of each step, in one message."""
        send, receive = self._cluster.arrays.begin_synchronous_send, self._cluster.arrays
        for rows in self._plain:
            if self._cluster.rank:
                self._cluster.wait_request(send(rows, 0, TAG_PLAIN))
            else:
                self._cluster.wait_request(receive.begin_receive(rows, 1, TAG_PLAIN))

    def free(self) -> None:
        """Free the store. Collective: yes."""
        if isinstance(self._half, ServerHalf):
            self._half.close()
        self._half.free()


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare pulls and pushes; ranks 0 and 1 alone work. Collective: yes."""
    rows = QUICK_ROWS if options.quick else ROWS
    names = ("pull", "plain_pull", "push", "plain_push")
    sides: dict[str, Callable[[], None]] = dict.fromkeys(names, lambda: time.sleep(0))
    pair = cluster_subset(cluster, (0, 1))
    if cluster.rank < 2:
        nodes = Cluster(pair, 1)
        found = _Sides(nodes, rows)
        sides = {name: getattr(found, name) for name in names}
    times = in_turn(cluster, sides, options.repeats)
    if cluster.rank < 2:
        found.free()
        nodes.free()
        free_comm(pair)
    made = []
    for mine, other in (names[:2], names[2:]):
        ours, theirs, ratio = compare(times[mine], times[other])
        ours, theirs = (STEPS * IDS / taken / 1e6 for taken in (ours, theirs))
        what = "Adagrad" if mine == "push" else "pull"
        case = f"{IDS:,} x {DIM} floats of {rows / 1e6:g} M rows, Zipf 1.05, {what}"
        made.append(Row("far_rows", case, ours, "M rows/s", "plain messages", theirs, ratio))
    return made
