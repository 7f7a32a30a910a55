"""A rank's own file on a disk that fills up: `mpips.health.trace_file`."""

import io
from pathlib import Path

import pytest

from mpips.health import trace_file
from mpips.health.trace_file import RankFile


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
