"""``python -m mpips bench`` and ``python -m benchmarks``: arithmetic, table, quick runs of all."""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import launch
import numpy as np
import pytest

from benchmarks import core_rows, turns
from benchmarks.catalogue import MEASURES as BENCHMARKS
from benchmarks.peers import process as peers
from benchmarks.peers import script
from mpips.codecs import CODECS
from mpips.errors import UserError
from mpips.optim import RULES
from mpips.tools.bench import jobs, measure, wire
from mpips.tools.bench.__main__ import main
from mpips.tools.bench.measure import MEASURES, Measure, Options, Row
from mpips.train import LAUNCHED

BENCH = ["-m", "mpips", "bench"]
BESIDE = ["-m", "benchmarks"]
QUICK = ["--quick", "--repeats", "1", "--json"]
KEYS = {
    "measure", "case", "value", "unit", "beside", "other", "ratio", "spread", "reach", "reached",
}  # fmt: skip

# Arithmetic ----------------------------------------------------------------------------------

_, _, RATIO = measure.compare([1.0, 1.0, 1.0], [0.9, 0.8, 0.823])
ROWS = [
    Row("push+pull", "16.8 MB", 9.8765, "GB/s", "memcpy", 12.0, RATIO, 0.8),
    Row("sync round", "4 KB", 0.01234, "ms", "Allreduce", 0.005, 0.405, 10 / 13),
    Row("mlp", "2 ranks", 12345.6, "samples/s", "2 x one", 20000.0, 0.617),
]
TABLE = """\
measure     case                mpips         beside it             ratio     spread  aim
push+pull   16.8 MB         9.88 GB/s         12.0 GB/s  memcpy      0.82  0.80-0.90  0.8 ok
sync round  4 KB            0.0123 ms        0.00500 ms  Allreduce   0.41             0.769 MISSED
mlp         2 ranks  12,346 samples/s  20,000 samples/s  2 x one     0.62
"""


def test_the_table_and_json() -> None:
    assert measure.table(ROWS) + "\n" == TABLE
    for row in ROWS:
        read = Row.from_json(json.loads(json.dumps(row.to_json())))
        assert (read, read.spread) == (row, row.spread)


def test_sides_are_compared_pair_by_pair() -> None:
    """A repeat in which the machine was slow for both sides does not change the ratio."""
    times, names = ([1.0, 10.0, 2.0], [2.0, 30.0, 3.0]), ("push", "1 MB", "TCP")
    assert measure.compare(*times) == (2.0, 3.0, 2.0)
    assert turns.compare_rates(*times[::-1]) == (3.0, 2.0, 2.0)
    rate, ms = measure.rates(names, 6, "MB/s", times, 0.9), measure.milliseconds(names, 10, times)
    assert rate == Row("push", "1 MB", 3.0, "MB/s", "TCP", 2.0, 2.0, 0.9)
    assert ms == Row("push", "1 MB", 200.0, "ms", "TCP", 300.0, 2.0)


DEVICES = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo:  5000     10    0    0    0     0          0         0   5000      10    0    0    0
  eth0: 123456    700    0    0    0     0          0         0 7890123   900    0    0    0
wlan0.5:7 1 0 0 0 0 0 0 8 1 0 0 0
"""


def test_the_interface_that_sent_most_counts() -> None:
    assert wire.bytes_sent(DEVICES) == {"lo": 5000, "eth0": 7890123, "wlan0.5": 8}
    before = {"lo": 10, "eth0": 500}
    assert wire.grown(before, {"lo": 40, "eth0": 520, "eth1": 25}) == 30
    assert wire.grown(before, {"lo": 10, "eth0": 500, "eth1": 25}) == 25
    assert wire.grown({}, {}) == 0


# Which measures there are --------------------------------------------------------------------

OF_2 = ("pushpull", "rounds", "rules", "codecs", "rows", "remote_rows")


def test_what_fits_a_world_and_the_driver() -> None:
    for ranks, nodes, names in (
        (1, 1, ["rounds", "rules", "codecs", "rows"]),
        (2, 1, [*OF_2]),
        (3, 2, [*OF_2, "link", "wire", "scale"]),
        (None, 1, [name for name in MEASURES if name not in ("link", "wire")]),
    ):
        assert [m.name for m in MEASURES.choose([], ranks, nodes)] == names
        assert [m.name for m in MEASURES.choose(names[::-1], ranks, nodes)] == names
    assert [m.name for m in BENCHMARKS.choose(["convergence"])] == ["convergence"]


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("pushpull", 1, "pushpull in a world of 1 on 1 node, expected at least 2 ranks; use mpi"),
        ("link", 2, "link in a world of 2 on 1 node, expected at least 2 nodes; name several"),
        ("link", None, "measure link without mpirun, expected a world; run it"),
        ("memory", 3, "memory in a world of 3 on 1 node, expected none: it starts jobs of its own"),
        ("puhspull", 3, "unknown measure 'puhspull', expected one of .*'pushpull'"),
    ],
)
def test_what_does_not_fit(name: str, ranks: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MEASURES.choose([name], ranks, 1)


MISTAKES = {
    "rouds": r"unknown measure 'rouds', expected one of .*; did you mean 'rounds'\?",
    "--repeats 0": "--repeats 0, expected an integer >= 1",
    "--sizes 64K": "--sizes 64K, expected bytes",
    "--json there/rows.json": "--json there/rows.json, expected a file in a folder",
    "--fast": "command line: unrecognized arguments: --fast, expected what --help",
}


def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for words, message in MISTAKES.items():
        assert main(words.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(f"mpips: {message}", line), line


def test_a_measure_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def world(chosen: Measure, ranks: int, options: Options) -> list[Row]:
        if chosen.name == "rounds":
            raise jobs.Failed("it broke")
        return [Row(chosen.name, f"{ranks} ranks", 2.0, "s", "b", 1.0, 0.5, 1.0)]

    facts = dict.fromkeys(("cpu", "cores", "mpi", "python", "numpy", "numba", "mpips", "date"), "?")
    monkeypatch.setattr(jobs, "machine", lambda: facts)
    monkeypatch.setattr(jobs, "world", world)
    path = tmp_path / "rows.json"
    assert jobs.drive(MEASURES, ["rounds", "rules"], Options(repeats=1), path) == 1
    report = json.loads(path.read_text())
    assert report["failed"] == ["rounds, 2 ranks", "rounds, 4 ranks", "rounds, 8 ranks"]
    assert [row["measure"] for row in report["rows"]] == ["rules"]
    shown = capsys.readouterr()
    assert shown.err.count("failed: it broke") == 3
    assert "1 MISSED" in shown.out


# Worlds and jobs -----------------------------------------------------------------------------


def check_rows(path: Path, measures: set[str]) -> list[dict[str, Any]]:
    """Check what every row must be; returns the rows."""
    report = json.loads(path.read_text())
    assert {"cpu", "cores", "mpi", "python", "numpy", "numba", "date"} <= set(report["machine"])
    rows: list[dict[str, Any]] = report["rows"]
    assert {row["measure"] for row in rows} == measures
    for row in rows:
        assert set(row) == KEYS
        assert all(0 < row[k] < math.inf for k in ("value", "other", "ratio")), row
        assert row["reach"] is None, "a quick run aims at nothing"
    return rows


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_a_world_measures_what_fits(tmp_path: Path) -> None:
    done = launch.run(3, [*BENCH, *QUICK, "rows.json"], tmp_path).check()
    measures = {"push+pull", "sync round", "update rule", "own update rule", "codec", "rows"}
    measures |= {"remote_rows", "scale"}
    rows = check_rows(tmp_path / "rows.json", measures)
    rules = [row["case"].partition(",")[0] for row in rows if row["measure"] == "update rule"]
    assert rules == list(RULES)
    packed = [row["case"].partition(",")[0] for row in rows if row["measure"] == "codec"]
    assert packed[::2] == packed[1::2] == list(CODECS)
    table = [line for line in done.output.splitlines() if line.startswith(("update", "push"))]
    assert len(table) == len(RULES) + 1, done.output
    launch.run(3, [*BESIDE, *QUICK, "others.json"], tmp_path).check()
    check_rows(tmp_path / "others.json", {"idle", "recording", "tracing", "streaming step"})


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_the_driver_takes_measures_in_worlds_and_jobs(tmp_path: Path) -> None:
    names = ["memory", "rules", "pushpull"]
    done = launch.python(*BENCH, *names, *QUICK, "rows.json", cwd=tmp_path, timeout_s=180)
    shown = {"push+pull", "update rule", "own update rule", "memory"}
    rows = check_rows(tmp_path / "rows.json", shown)
    lines = done.stderr.splitlines()
    told = [re.split("[,:]", line)[1].strip() for line in lines if not line.startswith(" ")]
    assert told == ["pushpull", "rules", "memory"], done.stderr
    assert lines[0].startswith("  push+pull  "), "as it comes"
    assert len(lines) == len(told) + len(rows)
    assert all(any(line.startswith(name) for line in done.stdout.splitlines()) for name in shown)
    assert len(done.stdout.splitlines()) == 3 + 1 + len(rows), done.stdout


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
@pytest.mark.parametrize(
    ("words", "measures", "package"),
    [
        ("stragglers mlp evaluators start torch",
         {"mlp", "evaluators", "start", "torch", "straggler"}, "torch"),
        ("row_workers", {"rows"}, "numpy"),
        # Deaths are those of tests/launching/test_supervise.py.
        ("recovery supervision", {"recovery", "supervision"}, "numpy"),
    ],
)  # fmt: skip
def test_benchmarks_that_start_jobs(
    words: str, measures: set[str], package: str, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    launch.python(*BESIDE, *words.split(), *QUICK, "rows.json", cwd=tmp_path, timeout_s=300)
    assert check_rows(tmp_path / "rows.json", measures)


# Peers ---------------------------------------------------------------------------------------


def test_the_peer_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    launch.executable(venv / "bin" / "python", f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    if shutil.which("cc"):
        given: Any = {"size": 4 << 10, "workers": 3, "steps": 50, "repeats": 2, "timeout_s": 60}
        for work, ranks in (("push+pull", "workers"), ("round", "ranks")):
            found = peers.measure(venv, "plain-c", work, **given)
            assert (found.case, len(found.repeats)) == (f"4 KB, 3 {ranks}", 2)
            assert found.rate > 0 < min(found.repeats)
    monkeypatch.setenv("PATH", "")
    assert peers.missing(venv)["plain-c"] == "there is no cc on PATH"


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
