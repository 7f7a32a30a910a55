"""Reads by message, of an owner that is this process itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpips.codecs import make_codec
from mpips.layout import Shard
from mpips.layout.tables import Table
from mpips.mpi.abort import Failures
from mpips.mpi.collectives import Arrays
from mpips.mpi.start import REPLIES, tag_of
from mpips.optim.row_rules import Sgd
from mpips.planning.tables import JobTable
from mpips.transport.remote_reads import COMMITTED, ReplyReads
from mpips.transport.remote_rows import RemoteRows, RowReplies, ServedRows
from mpips.transport.wire import Packing

N, VERSION = 40, 7
ROWS, DIM = 5000, 32


@pytest.mark.parametrize("may_die", [False, True])
def test_a_read_that_has_come_is_stamped(may_die: bool) -> None:
    """Also where all comes at once, and MPI lets a job go on without the dead."""
    failures, tag = Failures([]), tag_of(0, REPLIES)
    failures.on = may_die
    arrays, shard, sent = Arrays(MPI.COMM_SELF), np.arange(N, dtype="f8"), list[Any]()
    header = np.zeros(8, "i8")
    header[COMMITTED] = VERSION

    def send(rank: int, kind: str, asked: tuple[Any, ...]) -> None:
        assert (rank, kind, asked) == (0, "read", (0, False))
        sent.extend(arrays.begin_send(part, 0, tag) for part in (header, shard, header))

    cluster: Any = SimpleNamespace(arrays=arrays, failures=failures, send=send)
    reads = ReplyReads(cluster, [(0, 0, Shard(0, N))], 1, False)
    for _ in range(2):
        out, versions = np.zeros(N), np.zeros(1, "i8")
        reads.begin(out)
        assert not reads.stamped()
        reads.fetch()
        while not reads.advance():
            pass
        assert reads.stamped()
        assert (reads.result(versions), versions.tolist()) == (0, [VERSION])
        np.testing.assert_array_equal(out, shard)
    MPI.Request.Waitall(sent)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_rows_are_written_as_they_come(codec: str) -> None:
    rng, packed = np.random.default_rng(0), make_codec(codec)
    held, ids = rng.standard_normal((ROWS, DIM), "f4"), rng.integers(0, ROWS, 9000)
    cluster: Any = SimpleNamespace(
        arrays=Arrays(MPI.COMM_SELF), failures=Failures([]), is_local=lambda rank: False,
        roles=SimpleNamespace(owners=(0,)),
    )  # fmt: skip
    table = JobTable("rows", Table(ROWS, DIM), Sgd(1.0), 0, ROWS, lambda version: 1.0)
    ownership = table.owned_by(1)
    served = ServedRows(lambda places, out: np.take(held, places, 0, out), DIM)
    replies = RowReplies(cluster, [served], np.dtype("f4"), Packing(packed), 0)
    remote = RemoteRows(cluster, 0, table, np.dtype("f4"), packed)
    places = ownership.places(ids)
    coming, out = remote.begin(ownership.sort(places)), np.full((len(ids), DIM), np.nan, "f4")
    here, turns = False, [0]
    while not here:
        replies.serve(most=1)
        here = coming.advance(out)
        turns.append(int(np.isfinite(out).all(axis=1).sum()))
    assert turns == sorted(turns), "a row that was written stays"
    assert len(set(turns)) > 3, "some were written before all had come"
    np.testing.assert_allclose(out, held[places], atol=0.05 * (codec == "int8"), rtol=0)
