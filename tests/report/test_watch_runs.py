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
    run = Watched(make(tmp_path / "a", job(0, 2), summary=None, done=False), "a")
    assert re.search(r"a +not running +2.00 +20 ", text([run], 120))
    shutil.rmtree(tmp_path / "a")
    run.update()
    make(tmp_path / "a", job(6, 6 + epochs), summary=None, done=False)
    assert re.search(rf"a +not running +{6 + epochs}.00 +{60 + 10 * epochs} ", text([run], 120))
    points = run.record.curves["training loss"].points
    assert [point.updates for point in points] == [70, 80, 90, 100][:epochs]


@pytest.mark.parametrize("width", [80, 140])
def test_the_screen_is_as_wide_as_the_terminal(width: int, tmp_path: Path) -> None:
    names = [f"{k}" for k in range(1, 30)] + ["long" * 20]
    runs = [Watched(whole(tmp_path / name), name) for name in names]
    lines = text([*runs, Watched(tmp_path / "gone", "gone")], width, 36).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 36
    assert any("and 21 more" in line for line in lines)
    assert any("saved" in line for line in lines) == (width > 100)
    assert "…" not in lines[0]


def test_once_where_nobody_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole(tmp_path / "a")
    assert watch.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("run ")
    assert watch.main([str(tmp_path / "a/b")]) == 2
    assert "no run in" in capsys.readouterr().err


def test_a_terminal(tmp_path: Path) -> None:
    """It is drawn anew as runs come to a folder and end, until Ctrl-C."""
    out, seen, deadline = tmp_path / "a", "", time.monotonic() + 60
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "mpips", "watch", str(tmp_path)]
    env = {**environment(), "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        while not re.search(r"\bb +done", seen) and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536).decode(errors="replace")
            if "no run yet" in seen and not out.exists():
                make(out, job(0, 1), summary=None, done=False)
            if "not running" in seen and not (out / "DONE").exists():
                (out / "DONE").write_text("epochs\n")
            if "done" in seen and not (tmp_path / "b").exists():
                whole(tmp_path / "b")
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
    os.close(ours)
    assert process.returncode == 0, seen
