"""Temporary folders: those of the dead are removed, and nobody else's."""

import fcntl
import json
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from launch import environment

from mpips.launch.folders import OWNER, OwnFolder, remove_left

MAKES = """
import os, signal, sys
from pathlib import Path
from mpips.launch.folders import OwnFolder
folder = OwnFolder("mpips-launch-", Path(sys.argv[1]))
(Path(folder.name) / "1").mkdir()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("restart", ["", "0", "2"])
def test_what_others_have_left_is_removed(
    restart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a killed process of this host, or by an earlier start of this job of SLURM on any."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    words = [sys.executable, "-c", MAKES, str(tmp_path)]
    assert subprocess.run(words, env=environment(), timeout=60).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    host, *start = json.loads((left / OWNER).read_text())
    assert [host, start] == [platform.node(), ["", 0]]
    other = f"not-{host}"
    kept = {
        "mpips-another-host": [other, *start],
        "mpips-another-job": [other, "170", 0],
        "mpips-damaged": "?",
        "something-else": [host, *start],
    }
    earlier = {f"mpips-start-{k}": [other, "17", k] for k in range(3)}
    for name, text in {**kept, **earlier}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / OWNER).write_text(json.dumps(text))
    (tmp_path / "mpips-without-owner").mkdir()
    if restart:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    with OwnFolder(parent=tmp_path) as own:
        remove_left(tmp_path)
        found = {path.name for path in tmp_path.iterdir()}
        starts = list(earlier)[int(restart or 0) :]
        assert found == {*kept, *starts, "mpips-without-owner", Path(own).name}


def test_a_lock_that_cannot_be_had_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no lock service answers, or another process holds it."""
    locks = fcntl.flock

    def late(file: IO[str], how: int) -> None:
        assert how & fcntl.LOCK_NB, "it would wait for ever"
        with open(file.name) as other:
            locks(other, how)
            locks(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with OwnFolder(parent=tmp_path) as own:
        assert json.loads((Path(own) / OWNER).read_text())


def test_a_folder_whose_lock_is_held_stays(tmp_path: Path) -> None:
    """Its process may be one of another container, where it is not seen to live."""
    with OwnFolder(parent=tmp_path) as own:
        remove_left(tmp_path)
        assert Path(own).is_dir()
    assert not Path(own).exists()
