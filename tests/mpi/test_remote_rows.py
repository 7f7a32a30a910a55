"""Rows of tables between nodes, without the loops around them."""

import numpy as np
import pytest
from verdict import check

from mpips.codecs import make_codec
from mpips.layout import cut
from mpips.layout.roles import assign
from mpips.layout.tables import Table, Zeros
from mpips.mpi.world import Cluster
from mpips.optim import make_rule
from mpips.optim.row_rules import Sgd
from mpips.planning.tables import JobTable
from mpips.ps.assemble import ServerHalf, WorkerHalf, assemble
from mpips.ps.design import Design
from mpips.transport import remote_rows
from mpips.transport.wire import CHUNK_BYTES, Packing

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=4, min_nodes=2)]

ROWS, LONG, FEW = 2000, CHUNK_BYTES // 8 + 3, 100  # a row of LONG numbers is more than a chunk
MOST = 7  # calls that are asked for ahead
SIZES = {"wide": (ROWS, 40), "long": (5, LONG), "few": (ROWS, 1)}
TABLES = [
    JobTable(name, Table(*size, Zeros()), Sgd(1.0), 0, min(size[0], most), lambda version: -1.0)
    for (name, size), most in zip(SIZES.items(), (ROWS, 5, FEW), strict=True)
]


def values(ids: np.ndarray, dim: int) -> np.ndarray:
    """Return gradients that any codec of rows writes as they are."""
    return np.repeat(ids[:, None] % 64 + 1.0, dim, axis=1)


def work(cluster: Cluster, half: WorkerHalf) -> list[object]:
    """Push every row once, read them all when each push is applied; returns what is wrong."""
    workers, wrong, rows = len(cluster.roles.workers), list[object](), half.rows
    assert rows is not None, "there are tables"
    n, versions = -(-ROWS // FEW), half.puller.versions
    for seq in range(1, n + 1):
        cluster.wait(lambda k=seq: half.writable(k))
        rows.begin(seq)
        half.sender.buffer(seq)[:] = 0
        ids = np.arange((seq - 1) * FEW, seq * FEW)
        rows.push("few", ids, values(ids, 1))
        if seq == 1:
            for name in ("wide", "long"):
                ids = np.arange(SIZES[name][0])
                rows.push(name, ids, values(ids, SIZES[name][1]))
        half.sender.push((0, 0, 1), 1, 0.0, versions)
    out = np.zeros(1)
    cluster.wait(half.sender.push_sender.sent)
    while half.puller.pull(out).min() < workers * n:
        pass
    rng, received = np.random.default_rng(cluster.rank), rows.bytes_moved[1]
    for name, (most, dim) in SIZES.items():
        ids = rng.integers(0, most, (3, most))
        sent = []
        for _ in range(2):
            before = rows.bytes_moved[0]
            found = rows.pull(name, ids)
            sent.append(rows.bytes_moved[0] - before)
            expected = workers * values(ids.reshape(-1), dim).reshape(found.shape)
            if not np.array_equal(found, expected):
                wrong.append((name, found, expected))
        # Lists of "few" go in pieces, each another one than that before.
        if any(sent) and (sent[1] == sent[0]) != (name == "few"):
            wrong.append((name, sent))
    if any(not cluster.is_local(rank) for rank in cluster.roles.servers) == (
        rows.bytes_moved[1] == received
    ):
        wrong.append((received, rows.bytes_moved[1]))
    wrong += asked_ahead(half, rng, workers)
    cluster.barrier()
    return wrong


def asked_ahead(half: WorkerHalf, rng: np.random.Generator, workers: int) -> list[object]:
    """Ask for rows of several tables before any, or only some, is pulled; returns what is wrong."""
    wrong, rows = list[object](), half.rows
    assert rows is not None, "there are tables"
    lists = {name: rng.integers(0, most, (6, most)) for name, (most, _) in SIZES.items()}
    for k in range(4):
        for name in SIZES:
            rows.ask(name, lists[name][k])
    for k in (0, 1, 3, 4):
        for name, (_, dim) in SIZES.items():
            found, ids = rows.pull(name, lists[name][k]), lists[name][k]
            if not np.array_equal(found, workers * values(ids, dim)):
                wrong.append(("asked", name, k))
    for name in SIZES:
        rows.ask(name, lists[name][5])
        half.advance()
    half.abandon()
    for asked in (MOST, MOST + 1):  # of one more the oldest is dropped
        earlier, ids = rows.stats()["few"]["ahead"], rng.integers(0, ROWS, (asked, 3))
        for each in ids:
            rows.ask("few", each)
        rows.pull("few", ids[0])
        if rows.asks and (rows.stats()["few"]["ahead"] > earlier) == (asked > MOST):
            wrong.append(("asked for", asked))
    before = rows.bytes_moved[1]
    ids = lists["few"][5]
    if not np.array_equal(rows.pull("few", ids), workers * values(ids, 1)):
        wrong.append("after what was abandoned")
    if rows.asks and rows.bytes_moved[1] == before:
        wrong.append(("asked for again", before))
    return wrong


def serve(cluster: Cluster, half: ServerHalf) -> None:
    """Apply what is here, and answer reads."""
    push = half.receiver.take()
    if push is not None:
        half.server.apply(push)
    half.server.serve_reads()
    for source, kind, payload in cluster.poll():
        assert kind == "read", kind
        half.server.want_read(source, payload)
    cluster.progress()


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
def test_remote_rows_are_all_there(
    cluster: Cluster, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushed in small pieces and in one large one; read in several requests, and in long rows."""
    monkeypatch.setattr(remote_rows, "MOST_AHEAD", MOST)
    monkeypatch.setattr(remote_rows, "WINDOW", 2)  # so that an answer does not leave at once
    servers = min(2, cluster.world - 1)
    cluster.roles = assign("async", cluster.hosts, cluster.node_of, servers)
    packing = Packing(make_codec(codec))
    design = Design(
        cut(1, servers, 8), "float64", make_rule("sgd"), lambda version: -1.0, far_read="reply",
        pushes=packing, replies=packing, tables=TABLES,
    )  # fmt: skip
    half, wrong = assemble(cluster, design), list[object]()
    if isinstance(half, ServerHalf):
        half.open(cluster.wait_request)
        here = cluster.comm.Ibarrier()
        while not here.Test():
            serve(cluster, half)
        half.close()
    else:
        wrong = work(cluster, half)
    half.free()
    check(cluster.comm, not wrong, wrong)
