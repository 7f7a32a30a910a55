"""Progress where somebody looks, and where nobody does: a bar on the terminal, lines elsewhere."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from launch import environment, executable

from mpips.launch import mpirun as launch
from mpips.launch.terminal import Terminal, find_terminal

COLUMNS = 80
FIND = """
import sys
from mpips.launch.terminal import find_terminal
there, lines = find_terminal()
if there:
    there.write("BAR")
sys.exit(lines)
"""


class Screen:
    """A terminal of 80 columns, and what was written to it."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("hhhh", 24, COLUMNS, 0, 0))
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._parts.append(os.read(self._master, 65536))
            except OSError:  # the last one who had it open has closed it
                return

    def text(self) -> str:
        """Close it, and return what was on it."""
        os.close(self.slave)
        self._reader.join(10)
        os.close(self._master)
        return b"".join(self._parts).decode()


@pytest.fixture
def screen() -> Screen:
    return Screen()


# Standard output and standard error: what is drawn on the terminal, and whether lines come too.
STREAMS = {
    ("terminal", "terminal"): ("BAR", False),
    ("terminal", "file"): ("BAR", False),
    ("terminal", "nothing"): ("BAR", False),
    ("terminal", "pipe"): ("", True),
    ("file", "terminal"): ("BAR", True),
    ("pipe", "terminal"): ("", True),
    ("file", "file"): ("", True),
    ("nothing", "file"): ("", True),
}
# Launchers, whose ranks have pipes, or a terminal of their own; and one that writes to files.
HYDRA = '#!/bin/bash\n"$@" 2>&1 >/dev/null | cat\nexit "${PIPESTATUS[0]}"\n'
TO_FILES = '#!/bin/bash\nshift\n"$@"\nexit $?\n'
CASES = [(["mpiexec.hydra"], HYDRA, s, *STREAMS[s]) for s in [*STREAMS][2:6]]
CASES += [([], "", s, *found) for s, found in STREAMS.items()]
for word in ("-outfile-pattern", "--output-filename=x", "--output"):
    CASES.append((["mpirun", word], TO_FILES, ("terminal", "terminal"), "", True))


@pytest.mark.parametrize(("launcher", "script", "streams", "bar", "lines"), CASES)
def test_where_a_bar_is_drawn(
    launcher: list[str], script: str, streams: tuple[str, str], bar: str, lines: bool,
    screen: Screen, tmp_path: Path,
) -> None:  # fmt: skip
    """By the streams of this process or, where there is one, of the launcher above it."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", FIND]
    if launcher:
        name, *words = launcher
        command = [str(executable(tmp_path / name, script)), *words, *command]
    with (tmp_path / "log").open("w") as log:
        ends = {"terminal": screen.slave, "file": log, "pipe": writing, "nothing": -3}
        out, err = (ends[stream] for stream in streams)
        done = subprocess.run(command, stdout=out, stderr=err, env=environment(), timeout=60)
    os.close(reading)
    os.close(writing)
    assert (screen.text(), done.returncode) == (bar, int(lines))
    assert (tmp_path / "log").read_text() == ""


def test_streams_that_are_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_terminal() == (None, True)


def test_a_terminal_that_is_held_or_gone_holds_up_nobody() -> None:
    master, slave = pty.openpty()
    there = Terminal(f"/proc/self/fd/{slave}")
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("hhhh", 24, COLUMNS, 0, 0))
    termios.tcflow(slave, termios.TCOOFF)
    assert there.write("x" * 10_000) < 10_000
    os.close(slave)
    os.close(master)
    assert there.write("x") == 0
    there.close()


@pytest.mark.launch
def test_a_bar_under_mpirun(screen: Screen, tmp_path: Path) -> None:
    """Whole on 80 columns, with the accuracy of the end, and no line beside it."""
    often = ["--eval-every", "1", "--log-every", "0.01", "--epochs", "20", "--out", "run"]
    command = launch.command(2, ["-m", "mpips.train", "--problem", "softmax", *often])
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), timeout=100, stdin=subprocess.DEVNULL,
        stdout=screen.slave, stderr=screen.slave, start_new_session=True,
    )  # fmt: skip
    shown = screen.text()
    assert done.returncode == 0, shown
    bars = [part for part in shown.replace("\n", "\r").split("\r") if "%|" in part]
    assert len(bars) > 2
    assert max(map(len, bars)) <= COLUMNS
    assert "samples/s\r" not in shown.partition("ended: ")[0]
    percent = shown.rpartition("accuracy ")[2].partition(" %")[0]
    assert bars[-1].startswith("100%|")
    assert f"accuracy {float(percent) / 100:.4f}"[:-1] in bars[-1]
