"""What a user sees and can do while loops are compiled for the first time."""

import os
import signal
from pathlib import Path

import pytest
from launch import Running, run
from runs import wait_for

OPTIONS = ("--mode", "sync", "--steps", "1", "--out", "run")


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
def test_a_first_start_says_that_it_compiles_and_ends_when_told_to(tmp_path: Path) -> None:
    """Whichever rank is told: the one that compiles, or one that waits for it."""
    cold = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with Running(3, ["-m", "mpips.train", *OPTIONS], tmp_path, cold) as job:
        wait_for(job, lambda: "compiling loops" in job.output())
        os.kill(job.ranks()[2], signal.SIGUSR1)
        done = job.wait(60).check(85)
    assert done.output.count("compiling loops for this type of processor") == 1
    assert "SIGUSR1 before training began" in done.output
    assert not (tmp_path / "run").exists()

    again = run(3, ["-m", "mpips.train", *OPTIONS], tmp_path, 120, cold).check()
    assert "compiling loops" in again.output, "what was compiled before the stop is kept, no more"
    assert (tmp_path / "run" / "DONE").is_file()
    warm = run(3, ["-m", "mpips.train", *OPTIONS[:-1], "other"], tmp_path, 60, cold).check()
    assert "compiling" not in warm.output
