"""Rows that come by message, of a server that is this process itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpips.codecs import make_codec
from mpips.layout.tables import Table
from mpips.mpi.abort import Failures
from mpips.mpi.collectives import Arrays
from mpips.optim.row_rules import Sgd
from mpips.planning.tables import JobTable
from mpips.transport.remote_rows import RemoteRows, RowReplies, ServedRows
from mpips.transport.wire import Packing

ROWS, DIM = 5000, 32


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_rows_are_written_as_they_come(codec: str) -> None:
    rng, failures = np.random.default_rng(0), Failures([])
    held, ids = rng.standard_normal((ROWS, DIM), "f4"), rng.integers(0, ROWS, 9000)
    cluster: Any = SimpleNamespace(
        arrays=Arrays(MPI.COMM_SELF), failures=failures, is_local=lambda rank: False,
        roles=SimpleNamespace(owners=(0,)),
    )  # fmt: skip
    table = JobTable("rows", Table(ROWS, DIM), Sgd(1.0), 0, ROWS, lambda version: 1.0)
    ownership, packed = table.owned_by(1), make_codec(codec)
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
        assert turns[-1] >= turns[-2], "a row that was written stays"
    assert len(set(turns)) > 3, "some were written before all had come"
    tolerance = {"none": 0.0, "int8": 0.05}[codec]
    np.testing.assert_allclose(out, held[places], atol=tolerance, rtol=0)
