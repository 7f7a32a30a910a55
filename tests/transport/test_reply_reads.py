"""Reads by message where ranks may die, of an owner that is this process itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpips.layout import Shard
from mpips.mpi.abort import Failures
from mpips.mpi.collectives import Arrays
from mpips.mpi.start import REPLIES, tag_of
from mpips.transport.remote_reads import COMMITTED, ReplyReads

N, VERSION = 40, 7


@pytest.mark.parametrize("may_die", [False, True])
def test_a_read_that_has_come_is_stamped(may_die: bool) -> None:
    """Also where all comes at once, and MPI lets a job go on without the dead."""
    failures, tag = Failures([]), tag_of(0, REPLIES)
    failures.on = may_die
    arrays, shard = Arrays(MPI.COMM_SELF), np.arange(N, dtype="f8")
    header = np.zeros(8, "i8")
    header[COMMITTED] = VERSION
    sent = list[Any]()

    def send(rank: int, kind: str, asked: tuple[Any, ...]) -> None:
        assert (rank, kind, asked) == (0, "read", (0, False))
        sent.extend(arrays.begin_send(part, 0, tag) for part in (header, shard, header))

    cluster: Any = SimpleNamespace(arrays=arrays, failures=failures, send=send)
    reads, out = ReplyReads(cluster, [(0, 0, Shard(0, N))], 1, False), np.zeros(N)
    for _ in range(2):
        reads.begin(out)
        assert not reads.stamped()
        reads.fetch()
        while not reads.advance():
            pass
        assert reads.stamped()
        versions = np.zeros(1, "i8")
        assert reads.result(versions) == 0
        assert versions.tolist() == [VERSION]
        np.testing.assert_array_equal(out, shard)
        out[:] = 0
    MPI.Request.Waitall(sent)
