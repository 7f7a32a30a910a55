"""Jobs that are stopped while they start, again and again: the same command ends well."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from launch import Running, run
from runs import final, wait_for

from mpips.checkpoint.run_folder import CHECKPOINTS, CONFIG, DONE, LOCK, METRICS, is_early

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)
TOUCHED = (LOCK, CONFIG, METRICS, CHECKPOINTS)  # as a job starts, about in that order
LIMIT_S = 300.0


def touched(path: Path) -> int:
    """Return when a file was last written, 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def stopped(rng: random.Random, number: int, words: list[str], out: Path, cwd: Path) -> None:
    """Start a job and stop it within a second of the time when it writes a certain file."""
    path = out / rng.choice(TOUCHED)
    before, deadline = touched(path), time.monotonic() + LIMIT_S
    with Running(2, words, cwd) as job:
        while job.process.poll() is None and touched(path) in (0, before):
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.005)
        time.sleep(rng.random() ** 3)
        pid = rng.choice([job.process.pid, *job.ranks()])
        if number == signal.SIGKILL and pid == job.process.pid:
            job.kill()
        elif job.process.poll() is None:
            os.kill(pid, number)
        done = job.wait(LIMIT_S)
    assert done.code != 2, f"{path.name}, {signal.Signals(number).name}: {done.output}"
    assert "Traceback" not in done.output, done.output
    left = {path.name for path in out.iterdir()} if out.exists() else set()
    assert all(name == DONE or is_early(name) for name in left), left


@pytest.mark.launch
@pytest.mark.parametrize(
    ("mode", "resumed", "stops"),
    [
        ("async", False, 2),
        pytest.param("async", False, 10, marks=[pytest.mark.long, pytest.mark.other_mpi]),
        pytest.param("async", True, 10, marks=[pytest.mark.long, pytest.mark.one_mpi]),
        pytest.param("sync", False, 10, marks=[pytest.mark.long, pytest.mark.one_mpi]),
        pytest.param("sync", True, 10, marks=[pytest.mark.long, pytest.mark.other_mpi]),
    ],
)
def test_stops_as_a_job_starts(mode: str, resumed: bool, stops: int, tmp_path: Path) -> None:
    out, rng = tmp_path / "run", random.Random(f"{mode} {resumed} {stops}")
    words = ["-m", "mpips.train", "--mode", mode, "--resume", "auto", "--out", str(out), "--quiet"]
    for k in range(stops):
        if k % 5 == 0:  # five stops a run, each in what the others have left
            out = tmp_path / f"run-{k}"
            words[words.index("--out") + 1] = str(out)
        if k % 5 == 0 and resumed:
            run(2, [*words, "--steps", "50"], tmp_path, LIMIT_S)
            assert final(out).step == 50
        stopped(rng, SIGNALS[k % 3], [*words, "--steps", "1000"], out, tmp_path)
        if k % 5 == 4 or k == stops - 1:
            run(2, [*words, "--steps", "1000"], tmp_path, LIMIT_S).check()
            assert final(out).step == 1000


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
def test_a_first_start_says_that_it_compiles_and_ends_when_told_to(tmp_path: Path) -> None:
    """Whichever rank is told: the one that compiles, or one that waits for it."""
    words = ["-m", "mpips.train", "--mode", "sync", "--steps", "1", "--out"]
    cold = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with Running(3, [*words, "run"], tmp_path, cold) as job:
        wait_for(job, lambda: "compiling loops" in job.output())
        os.kill(job.ranks()[2], signal.SIGUSR1)
        done = job.wait(60).check(85)
    assert done.output.count("compiling loops for this type of processor") == 1
    assert "SIGUSR1 before training began" in done.output
    assert not (tmp_path / "run").exists()

    again = run(3, [*words, "run"], tmp_path, 120, cold).check()
    assert "compiling loops" in again.output, "what was compiled before the stop is kept, no more"
    assert (tmp_path / "run" / "DONE").is_file()
    warm = run(3, [*words, "other"], tmp_path, 60, cold).check()
    assert "compiling" not in warm.output
