"""A rank's own file: `mpips.health.trace_file`."""

import io
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mpips.health import trace_file
from mpips.health.trace_file import RankFile, Trace, read


class FullDisk(io.FileIO):
    """A file on a disk with room for five bytes."""

    def write(self, data: bytes) -> int:
        """Write what fits, as the system does."""
        return super().write(data[: 5 - self.tell()])


def test_no_piece_follows_half_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank-00000"
    monkeypatch.setattr(
        trace_file, "open", lambda path, mode, buffering: FullDisk(path, mode), raising=False
    )
    file = RankFile(path, {"rank": 0}, "trace")
    assert not file.open
    assert f"no trace {path}: No space left on device" in capsys.readouterr().err
    file.append(b"x")
    file.close()
    assert path.read_bytes() == b'{"ran'


def test_threads_note_at_the_same_time(tmp_path: Path) -> None:
    threads, changes, code, interval = 3, 40_000, 1, sys.getswitchinterval()
    trace = Trace(tmp_path / "rank-00000", {"host": "n1"})

    def note(thread: int) -> None:
        for value in range(thread * changes, (thread + 1) * changes):
            trace.note(code, 5.0, value)

    running = [threading.Thread(target=note, args=(k,)) for k in range(threads)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        trace.close()
    found = read(tmp_path / "rank-00000")
    own = found.whats == code
    assert np.array_equal(np.sort(found.values[own]), np.arange(threads * changes))
    assert np.ptp(found.times[own]) == 0
