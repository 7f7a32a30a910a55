"""``python -m mpips.bench convergence``: its comparisons, the job files it runs, a quick run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import launch
import pytest

from mpips.bench import convergence
from mpips.bench.convergence import CASES, PROBLEMS, SERIAL, RunResult, check, compared
from mpips.bench.jobs import Failed
from mpips.config.jobfile import read_toml

# Of those of a kind one is run: a mode with servers, and one in rounds; a codec that is an option,
# one that is in the job file. tests/config/test_jobs.py has the job files of the others.
LEFT_OUT = (
    "ssp",
    "sync, 1 backup",
    "local_sgd",
    "easgd",
    "bf16, adam",
    "int8, adam",
    "onebit, sgd",
    "none, rounds",
    "powersgd, rounds",
)
SOME = f"""
import sys
from mpips.bench import convergence
from mpips.bench.__main__ import main
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
    found = {name: runs * 2 for name, runs in results().items()}
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


def test_a_codec_is_beside_the_same_rule_without_one() -> None:
    found = results(**{"none, sgd": replace(ONE, accuracy=96.0)})
    rows = {row.case.partition(":")[0]: row for row in compared("digits", found)}
    row = rows["digits, onebit, sgd"]
    assert (row.beside, row.other) == ("none, sgd, mean of 1", 96.0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ssp", {"samples": 999}, "spirals, ssp: 999 samples, expected 1000 as in 'serial'"),
        ("easgd", {"parameters": 51}, "spirals, easgd: 51 parameters, expected 50 as in 'serial'"),
        (
            "int8, adam",
            {"bytes_sent": 4000},
            "int8, adam: 4000 bytes .*, expected at most 0.9 x 4000",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    name: str, change: dict[str, int], message: str
) -> None:
    check("spirals", results())
    with pytest.raises(Failed, match=message):
        check("spirals", results(**{name: replace(ONE, **change)}))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_each_case_has_its_job_file(problem: str) -> None:
    for name, case in CASES.items():
        job = read_toml(launch.ROOT / "jobs" / f"{problem}{case.job}.toml")
        assert job["dataset"] == problem, name
        packed = case.job in ("-packed", "-topk", "-onebit", "-powersgd")
        assert job.get("node_size", 0) == (convergence.NODE_SIZE if packed else 0), name


def test_a_run_that_was_stopped_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary = {"accuracy": 0.5, "samples": 10, "parameters": 5, "bytes_sent": 0}
    path.write_text(json.dumps({**summary, "stop_reason": "diverged"}))
    with pytest.raises(Failed, match="ended by diverged, expected its epochs"):
        convergence._result(path)
    path.write_text(json.dumps({**summary, "stop_reason": "epochs"}))
    assert convergence._result(path) == RunResult(50.0, 10, 5, 0)


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_a_quick_run(tmp_path: Path) -> None:
    """Of one of the problems; tests/config/test_jobs.py has the jobs of both."""
    command = [sys.executable, "-c", SOME, "convergence", "--quick", "--json", "rows.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=launch.environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    shown = [row["case"].partition(":")[0] for row in rows]
    assert shown == [f"{PROBLEMS[0]}, {name}" for name in CASES if name not in LEFT_OUT]
    assert all(0 < row["value"] <= 100 and row["reach"] is None for row in rows), rows
    assert sum(line.startswith("accuracy") for line in done.stdout.splitlines()) == len(rows)
