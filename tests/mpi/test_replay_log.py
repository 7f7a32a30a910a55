"""The servers of a job record together, or none of them does."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from verdict import check

from mpips.ps import replay_log

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=2)]


def test_a_server_without_a_file_ends_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory() as name:
        out = Path(comm.bcast(name))
        cluster = SimpleNamespace(
            rank=comm.rank, is_coordinator=comm.rank == 0, wait_request=MPI.Request.Wait
        )
        cluster.roles = SimpleNamespace(servers=list(range(comm.size)))
        job = SimpleNamespace(
            config=SimpleNamespace(record=True), cluster=cluster, out=out, checkpoint=None
        )
        server = SimpleNamespace(idle=False, params=np.zeros(9, "f4"))
        half = SimpleNamespace(servers=comm, server=server)
        about = {"format": replay_log.FORMAT, "part": 1, "samples": [9, 0], "workers": [0]}
        monkeypatch.setattr(replay_log, "_about", lambda job, part, server: about)
        found = replay_log.recorder_of(job, half)
        begun = found is not None and found.part == 1
        comm.Barrier()
        if found is not None:
            found.close()
        if comm.rank == comm.size - 1:
            monkeypatch.setattr(replay_log, "FILE", "missing/{}")
        none = replay_log.recorder_of(job, half) is None
        comm.Barrier()
        numbers = replay_log.part_numbers(out)
        comm.Barrier()
    check(comm, begun and none and numbers == [1], (begun, none, numbers))
