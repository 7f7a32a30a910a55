"""``python -m benchmarks convergence``: its comparisons, the job files it runs, a quick run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import launch
import pytest

from benchmarks.convergence import CASES, PROBLEMS, SERIAL, RunResult, compared

# Of those of a kind one is run: tests/config/test_jobs.py has the job files of the others.
LEFT_OUT = (
    *("ssp", "sync, 1 backup", "local_sgd", "easgd", "bf16, adam", "int8, adam", "onebit, sgd"),
    *("none, rounds", "powersgd, rounds"),
)
SOME = f"""
import sys
from benchmarks import convergence
from benchmarks.__main__ import main
convergence.PROBLEMS = convergence.PROBLEMS[:1]
for name in {LEFT_OUT}:
    del convergence.CASES[name]
sys.exit(main(sys.argv[1:]))
"""
ONE = RunResult(accuracy=98.0, samples=1000, parameters=50, bytes_sent=4000)


def results(**changed: RunResult) -> dict[str, list[RunResult]]:
    """Return one run of each case, as `ONE` unless changed; codecs send half the bytes."""
    packed = replace(ONE, bytes_sent=2000)
    return {
        name: [changed.get(name, ONE if case.beside in (None, SERIAL) else packed)]
        for name, case in CASES.items()
    }


def test_the_mean_is_aimed_at_and_the_worst_is_shown() -> None:
    """A codec is beside the same rule without one."""
    one = results(**{"none, sgd": replace(ONE, accuracy=96.0)})
    found = {name: runs * 2 for name, runs in one.items()}
    found["ssp"] = [replace(ONE, accuracy=97.0), replace(ONE, accuracy=98.0)]
    found["easgd"] = [replace(ONE, accuracy=96.8), replace(ONE, accuracy=98.0)]
    rows = {row.case.partition(":")[0]: row for row in compared("digits", found)}
    ssp, easgd = rows["digits, ssp"], rows["digits, easgd"]
    assert (ssp.value, ssp.other, ssp.beside) == (97.5, 98.0, "serial, mean of 2")
    assert ssp.case == "digits, ssp: worst 97.00, -0.50 points"
    assert ssp.reached, "half a point less is allowed"
    assert easgd.case == "digits, easgd: worst 96.80, -0.60 points"
    assert not easgd.reached
    assert rows["digits, serial"].reach is None
    packed = rows["digits, onebit, sgd"]
    assert (packed.beside, packed.other) == ("none, sgd, mean of 2", 96.0)


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_a_quick_run(tmp_path: Path) -> None:
    """Of one of the problems; tests/config/test_jobs.py has the jobs of both."""
    command = [sys.executable, "-c", SOME, "convergence", "--quick", "--json", "rows.json"]
    command += ["--plot", "curves.svg"]
    done = subprocess.run(
        command, cwd=tmp_path, env=launch.environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    shown = [row["case"].partition(":")[0] for row in rows]
    assert shown == [f"{PROBLEMS[0]}, {name}" for name in CASES if name not in LEFT_OUT]
    assert all(0 < row["value"] <= 100 and row["reach"] is None for row in rows), rows
    assert (tmp_path / "curves.svg").exists()
    assert sum(line.startswith("accuracy") for line in done.stdout.splitlines()) == len(rows)
