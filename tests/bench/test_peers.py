"""Peers of the benchmark: those that need no package, and rows on one core."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import executable

from benchmarks import core_rows
from benchmarks import peers as comparison
from benchmarks.options import BenchmarkOptions
from benchmarks.peers import CASES, script
from benchmarks.peers import process as peers
from mpips.errors import UserError
from mpips.tools.bench import jobs
from mpips.tools.bench.measure import Row

LIMIT_S = 60.0  # for what ends by itself


def test_the_peer_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    executable(venv / "bin" / "python", f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    if shutil.which("cc"):
        given: Any = {"size": 4 << 10, "workers": 3, "steps": 50, "repeats": 2}
        for work, ranks in (("push+pull", "workers"), ("round", "ranks")):
            found = peers.measure(venv, "plain-c", work, timeout_s=LIMIT_S, **given)
            assert (found.case, len(found.repeats)) == (f"4 KB, 3 {ranks}", 2)
            assert found.rate > 0 < min(found.repeats)
    monkeypatch.setenv("PATH", "")
    assert peers.missing(venv)["plain-c"] == "there is no cc on PATH"


def test_a_peer_that_fails_leaves_the_other_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(venv: Path, peer: str, work: str, **given: Any) -> peers.Result:
        if given["size"] == CASES[1].size:
            raise UserError("peer tensorflow-ps ended with exit code 1", "a measurement")
        return peers.Result(peer, "1", work, "", 1.0, (1.0,), 4.0, "GB/s")

    def world(*given: Any) -> list[Row]:
        return [Row("pushpull", "64 KB", 8.0, "GB/s", "", 1.0, 1.0)]

    monkeypatch.setattr(comparison, "CASES", CASES[:3])
    monkeypatch.setattr(peers, "missing", lambda venv: {})
    monkeypatch.setattr(peers, "measure", measure)
    monkeypatch.setattr(jobs, "world", world)
    rows = comparison.run(BenchmarkOptions(repeats=1, venv=Path("venv")))
    found = [next(rows), next(rows)]
    assert [(row.case.split(",")[0], row.ratio) for row in found] == [("64 KB", 2), ("16.8 MB", 2)]
    with pytest.raises(jobs.Failed, match=r"tensorflow-ps, push\+pull, 1.0 MB.*exit code 1"):
        next(rows)


@pytest.mark.parametrize("row_wise", [False, True])
def test_rows_on_one_core_are_exact(row_wise: bool) -> None:
    """A push of equal gradients changes a row by the sum over its ids, as Adagrad has it."""
    shard = core_rows.make_shard(100, row_wise)
    ids = np.array([7, 3, 7, 99, 7, 3])
    core_rows.push(shard, shard.ownership.places(ids), np.ones((6, script.ROW_DIM), "f4"))
    found = np.empty((100, script.ROW_DIM), "f4")
    core_rows.pull(shard, np.arange(100), found)
    wanted = np.zeros_like(found)
    wanted[[3, 7, 99]] = -core_rows.RATE  # lr g / sqrt(g^2), whatever g is
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
