"""Runs as they go on, in a terminal."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import environment
from made import job, make, whole
from rich.console import Console

from mpips.tools import watch
from mpips.tools.watch import Watched, screen


def text(runs: list[Watched], width: int, height: int = 50) -> str:
    for run in runs:
        run.update()
    out = io.StringIO()
    Console(file=out, width=width).print(screen(runs, width, height))
    return out.getvalue()


def test_lines_as_they_come(tmp_path: Path) -> None:
    """What is not whole yet is left for the next look."""
    out = make(tmp_path / "a", job(0, 2), summary=None, done=False)
    run = Watched(out, "a")
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert re.search(r"a +running +2.00 +20 +0.5 +1 +0.9375 +1 +50 ", text([run], 120))
    more = "".join(f"{json.dumps(line)}\n" for line in job(2, 3)[1:])
    with (out / "metrics.jsonl").open("a") as file:
        for part in (more[:30], more[30:]):
            file.write(part)
            file.flush()
            shown = text([run], 120)
    assert re.search(r"a +not running +3.00 +30 +0.3333 +0.6667 ", shown)
    (out / "DONE").write_text("epochs\n")
    assert re.search(r"a +done +3.00 ", text([run], 120))


@pytest.mark.parametrize("epochs", [1, 4])
def test_another_run_in_the_same_place(epochs: int, tmp_path: Path) -> None:
    """Its lines are fewer than those that were read, or more."""
    out = make(tmp_path / "a", job(0, 2), summary=None, done=False)
    run = Watched(out, "a")
    assert re.search(r"a +not running +2.00 +20 ", text([run], 120))
    shutil.rmtree(out)
    run.update()
    make(out, job(6, 6 + epochs), summary=None, done=False)
    assert re.search(rf"a +not running +{6 + epochs}.00 +{60 + 10 * epochs} ", text([run], 120))
    points = run.record.curves["training loss"].points
    assert [point.updates for point in points] == [70, 80, 90, 100][:epochs]


@pytest.mark.parametrize("width", [80, 140])
def test_the_screen_is_as_wide_as_the_terminal(width: int, tmp_path: Path) -> None:
    names = [f"{k}" for k in range(1, 30)] + ["long" * 20]
    runs = [Watched(whole(tmp_path / name), name) for name in names]
    runs.append(Watched(tmp_path / "gone", "gone"))
    shown = text(runs, width, 36)
    assert max(map(len, shown.splitlines())) <= width
    assert "and 21 more" in shown
    assert len(shown.splitlines()) <= 36
    assert ("saved" in shown) == (width > 100)
    assert "…" not in shown.splitlines()[0]


def test_once_where_nobody_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole(tmp_path / "a")
    assert watch.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("run ")
    (tmp_path / "empty").mkdir()
    for name in ("a/b", "empty"):
        assert watch.main([str(tmp_path / name)]) == 2
        assert "no run in" in capsys.readouterr().err


@pytest.mark.parametrize("several", [False, True])
def test_a_terminal(several: bool, tmp_path: Path) -> None:
    """It is drawn anew until the run is done; with those that come in a folder, until Ctrl-C."""
    out = tmp_path / "a"
    if not several:
        make(out, job(0, 1), summary=None, done=False)
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "mpips", "watch", str(tmp_path if several else out)]
    env = {**environment(), "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    seen, deadline = "", time.monotonic() + 60
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    seen += os.read(ours, 65536).decode(errors="replace")
                except OSError:  # it has ended, and nobody holds the terminal
                    break
            if "no run yet" in seen and not out.exists():
                make(out, job(0, 1), summary=None, done=False)
            if "not running" in seen and not (out / "DONE").exists():
                (out / "DONE").write_text("epochs\n")
            if several and "done" in seen and not (tmp_path / "b").exists():
                whole(tmp_path / "b")
            if several and re.search(r"\bb +done", seen):
                process.send_signal(signal.SIGINT)
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
    os.close(ours)
    assert process.returncode == 0, seen
    assert "done" in seen
    assert ("no run yet" in seen) == several
