"""Peers of the benchmark: their scripts as far as they need no peer, and what runs them."""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import core_rows
from benchmarks.peers import CASES, script
from benchmarks.peers import process as peers
from benchmarks.peers.process import PEERS, Peer, Result
from mpips.errors import UserError

FOLDER = Path(peers.__file__).parent
LIMIT_S = 60.0  # for what ends by itself


def make_program(path: Path, lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose interpreter is this one, with a package of its own: torch."""
    packages = tmp_path / "venv" / "packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    lines = f"PYTHONPATH='{packages}' exec '{sys.executable}' -S \"$@\""
    make_program(tmp_path / "venv" / "bin" / "python", lines)
    return tmp_path / "venv"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a peer called `fake`, whose script is the text given."""

    def make(text: str) -> None:
        (tmp_path / "fake.py").write_text(text)
        measures = ("push+pull", "round", "mlp", "uniform-rows")
        peer = Peer(tmp_path / "fake.py", "torch", measures)
        monkeypatch.setitem(PEERS, "fake", peer)

    return make


def measure(venv: Path, name: str = "push+pull", **options: Any) -> Result:
    given = {"size": 1 << 20, "workers": 3, "steps": 10, "repeats": 3, "timeout_s": LIMIT_S}
    return peers.measure(venv, "fake", name, **{**given, **options})


def assert_ends(pid: int) -> None:
    """Fail if a process is still there after a while; a zombie has ended."""
    for _ in range(2000):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is left")


# The scripts ------------------------------------------------------------------------------------


def test_ids_are_drawn_as_they_are_called() -> None:
    for rows in (100, 1_000_000):
        zipf, alike = (script.row_ids(f"{name}-rows", rows) for name in ("zipf", "uniform"))
        for ids in (zipf, alike):
            assert (ids.shape, ids.dtype) == ((script.ROW_LISTS, script.ROW_IDS), np.int64)
            assert 0 <= ids.min() < ids.max() < rows
        shares = [np.mean(zipf == k) / np.mean(zipf == 0) for k in (1, 9)]
        logs = np.log([(k + 2) / (k + 1) for k in (1, 9)]) / np.log(2)  # of 1 / x from 1 to 2
        np.testing.assert_allclose(shares, logs, rtol=0.15)
        assert np.mean(alike < rows // 2) == pytest.approx(0.5, abs=0.01)


# What runs them ---------------------------------------------------------------------------------


MEASURED = """
import json, sys
print("a word of welcome")
given = dict(word[2:].split("=") for word in sys.argv[2:])
line = {"peer": "fake", "version": "1.2", "measure": given["measure"], "size": 1048576}
line |= {"workers": int(given["workers"]), "steps": int(given["steps"]), "seconds": [4, 2, 30]}
line |= {"gb_per_s": 7.5, "rounds_per_s": 8.5, "samples_per_s": 9.5, "hidden": 16, "batch": 4}
line["million_rows_per_s"] = 6.5
print(json.dumps(line | {"steps_per_s": 1}))
"""


@pytest.mark.parametrize(
    ("name", "case", "rate", "unit"),
    [
        ("push+pull", "1.0 MB, 3 workers", 7.5, "GB/s"),
        ("round", "1.0 MB, 3 ranks", 8.5, "rounds/s"),
        ("mlp", "784-16-16-10, batch 4, 3 workers", 9.5, "samples/s"),
        ("uniform-rows", "1.0 MB, 3 workers", 6.5, "M rows/s"),
    ],
)
def test_a_measurement_is_read(
    name: str, case: str, rate: float, unit: str, venv: Path, fake: Callable[[str], None]
) -> None:
    fake(MEASURED)
    repeats = (0.4, 0.2, 3.0)
    assert measure(venv, name) == Result("fake", "1.2", name, case, 0.4, repeats, rate, unit)


def test_the_peer_in_c(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc"):
        given: Any = {"size": 4 << 10, "workers": 3, "steps": 50, "repeats": 2}
        found = peers.measure(venv, "plain-c", "push+pull", timeout_s=LIMIT_S, **given)
        assert (found.case, len(found.repeats)) == ("4 KB, 3 workers", 2)
        assert found.rate > 0 < min(found.repeats)
    monkeypatch.setenv("PATH", "")
    assert peers.missing(venv)["plain-c"] == "there is no cc on PATH"


@pytest.mark.parametrize("name", script.ONE_CORE)
def test_rows_on_one_core(name: str) -> None:
    """They are what FBGEMM is compared with, and each step pulls or changes its rows."""
    (case,) = (case for case in CASES if case.work == name)
    assert (case.peer, case.reach) == ("fbgemm", 2)
    step, lists = core_rows.make_step(name, 10_000)
    assert len(lists) == script.ROW_LISTS
    assert step(lists[0]) > 0


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


def test_a_failing_script_is_told(venv: Path, fake: Callable[[str], None]) -> None:
    fake("import sys; print(*range(100), sep='\\n', file=sys.stderr); print('{}'); sys.exit(3)")
    with pytest.raises(UserError) as caught:
        measure(venv)
    first, *tail = str(caught.value).splitlines()
    assert first == (
        "peer fake, measure push+pull, ended with exit code 3, expected a measurement; "
        "its last words:"
    )
    assert tail == [str(n) for n in range(85, 100)]


def test_a_hanging_script_is_ended_with_its_children(
    tmp_path: Path, fake: Callable[[str], None]
) -> None:
    pids = tmp_path / "pids"
    lines = f"sleep 1000 & echo $! >'{pids}'; echo $$ >>'{pids}'; echo waiting >&2; wait"
    make_program(tmp_path / "venv" / "bin" / "python", lines)
    fake("")
    with pytest.raises(UserError, match=r"still running, expected .* within 1 s; .*\nwaiting"):
        measure(tmp_path / "venv", timeout_s=1)
    for pid in map(int, pids.read_text().split()):
        assert_ends(pid)
