"""Rows of tables between nodes, without the loops around them."""

import numpy as np
import pytest
from rig import Rig

from mpips.codecs import make_codec
from mpips.layout.tables import Table, Zeros
from mpips.mpi.world import Cluster
from mpips.optim.row_rules import Sgd
from mpips.planning.tables import JobTable
from mpips.transport import remote_rows
from mpips.transport.wire import CHUNK_BYTES

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


def push_all(rig: Rig) -> None:
    """Push every row once, and wait until the pushes of all workers are applied."""
    half, rows, n = rig.worker_half, rig.worker_half.rows, -(-ROWS // FEW)
    for seq in range(1, n + 1):
        rig.cluster.wait(lambda k=seq: half.writable(k))
        rows.begin(seq)
        ids = np.arange((seq - 1) * FEW, seq * FEW)
        rows.push("few", ids, values(ids, 1))
        for name in ("wide", "long") if seq == 1 else ():
            ids = np.arange(SIZES[name][0])
            rows.push(name, ids, values(ids, SIZES[name][1]))
        rig.push(np.zeros(1))
    rig.cluster.wait(rig.sender.push_sender.sent)
    while rig.puller.pull(rig.replica).min() < n * len(rig.roles.workers):
        pass


def read_all(rig: Rig, rng: np.random.Generator) -> None:
    """Read rows of each table, the same ones twice."""
    rows, workers = rig.worker_half.rows, len(rig.roles.workers)
    received = rows.bytes_moved[1]
    for name, (most, dim) in SIZES.items():
        ids = rng.integers(0, most, (3, most))
        sent = []
        for _ in range(2):
            before = rows.bytes_moved[0]
            found = rows.pull(name, ids)
            sent.append(rows.bytes_moved[0] - before)
            expected = workers * values(ids.reshape(-1), dim).reshape(found.shape)
            rig.expect(np.array_equal(found, expected), name, found, expected)
        # Lists of "few" go in pieces, each another one than that before.
        rig.expect(not any(sent) or (sent[1] == sent[0]) == (name == "few"), name, sent)
    remote = not all(map(rig.cluster.is_local, rig.roles.servers))
    rig.expect(remote == (rows.bytes_moved[1] > received), received, rows.bytes_moved[1])


def read_ahead(rig: Rig, rng: np.random.Generator) -> None:
    """Ask for rows of several tables before any, or only some, is pulled."""
    rows, workers = rig.worker_half.rows, len(rig.roles.workers)

    def pull(name: str, ids: np.ndarray, *what: object) -> None:
        expected = workers * values(ids, SIZES[name][1])
        rig.expect(np.array_equal(rows.pull(name, ids), expected), name, *what)

    lists = {name: rng.integers(0, most, (6, most)) for name, (most, _) in SIZES.items()}
    for k in range(4):
        for name in SIZES:
            rows.ask(name, lists[name][k])
    for k in (0, 1, 3, 4):
        for name in SIZES:
            pull(name, lists[name][k], "asked", k)
    for name in SIZES:
        rows.ask(name, lists[name][5])
        rig.worker_half.advance()
    rig.worker_half.abandon()
    for asked in (MOST, MOST + 1):  # of one more the oldest is dropped
        earlier, ids = rows.stats()["few"]["ahead"], rng.integers(0, ROWS, (asked, 3))
        for each in ids:
            rows.ask("few", each)
        pull("few", ids[0], "asked for", asked)
        dropped = rows.stats()["few"]["ahead"] == earlier
        rig.expect(not rows.asks or dropped == (asked > MOST), "asked for", asked)
    before = rows.bytes_moved[1]
    pull("few", lists["few"][5], "after what was abandoned")
    rig.expect(not rows.asks or rows.bytes_moved[1] > before, "asked for again", before)


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
def test_remote_rows_are_all_there(
    cluster: Cluster, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushed in small pieces and in one large one; read in several requests, and in long rows."""
    monkeypatch.setattr(remote_rows, "MOST_AHEAD", MOST)
    monkeypatch.setattr(remote_rows, "WINDOW", 2)  # so that an answer does not leave at once
    made = make_codec(codec)
    with Rig(cluster, 1, min(2, cluster.world - 1), "reply", made, made, tables=TABLES) as rig:
        if rig.worker:
            push_all(rig)
            rng = np.random.default_rng(cluster.rank)
            read_all(rig, rng)
            read_ahead(rig, rng)
            rig.finish()
        else:
            rig.serve(rig.server.apply)
