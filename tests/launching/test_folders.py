"""Temporary folders: those of the dead are removed, and nobody else's."""

import fcntl
import json
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


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", MAKES, str(tmp_path)]
    assert subprocess.run(words, env=environment(), timeout=60).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    host, pid, started = json.loads((left / OWNER).read_text())
    others = {
        "mpips-another-host": [f"not-{host}", pid, started],
        "mpips-damaged": "?",
        "something-else": [host, pid, started],
    }
    for name, text in others.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / OWNER).write_text(json.dumps(text))
    (tmp_path / "mpips-without-owner").mkdir()
    with OwnFolder(parent=tmp_path) as own:
        kept = {*others, "mpips-without-owner", Path(own).name}
        remove_left(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == kept


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
        host, pid, started = json.loads((Path(own) / OWNER).read_text())
        (Path(own) / OWNER).write_text(json.dumps([host, pid, started - 1]))
        remove_left(tmp_path)
        assert Path(own).is_dir()
    assert not Path(own).exists()
