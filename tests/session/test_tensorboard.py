"""Event files for TensorBoard, read by the protocol buffers that they are made of."""

import errno
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from launch import run

from mpips.errors import UserError
from mpips.session import tensorboard
from mpips.session.tensorboard import EventFiles

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")


def events(folder: Path) -> Iterator[Any]:
    """Yield the events of a folder's files in their order: length, sum, content, sum."""
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_lines_are_scalars(tmp_path: Path) -> None:
    told: list[str] = []
    files = EventFiles(tmp_path, 40, lambda kind, step, fields: told.append(kind))
    files("start", 40, {"mode": "async", "world": 4})
    files("train", 50, {"epoch": 0.5, "loss": 2.0, "samples": 640})
    files("eval", 50, {"epoch": 0.5, "loss": 1.5, "accuracy": 0.25})
    files("log", None, {"worker": 1, "rate": 0.5, "text": "warm"})
    files("warning", 60, {"text": "no checkpoint"})
    files.close()
    files.close()
    assert scalars(tmp_path) == {
        "train/loss": [(50, 2.0)], "train/samples": [(50, 640.0)], "eval/loss": [(50, 1.5)],
        "eval/accuracy": [(50, 0.25)], "log/rate/worker 1": [(50, 0.5)],
    }  # fmt: skip
    assert told == ["start", "train", "eval", "log", "warning"]
    version, start, *_ = events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (40, event_pb2.SessionLog.START)


def test_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    files = EventFiles(tmp_path, 0, lambda kind, step, fields: told.append(kind))
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(files._file, "flush", full)
    for step in (1, 2):
        files("train", step, {"loss": 1.0})
    files.close()
    assert told == ["train", "train"]
    warning = "mpips: warning: no more event files for TensorBoard: No space left on device\n"
    assert capsys.readouterr().err == warning
    (tmp_path / "none").write_text("")
    EventFiles(tmp_path / "none", 0)("train", 1, {"loss": 1.0})
    assert "event files for TensorBoard: Not a directory" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpips.extras.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no tensorboardX, .* pip install 'mpips\[tensorboard\]'"):
        tensorboard.check()


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_run_has_a_file(tmp_path: Path) -> None:
    words = ["-m", "mpips.train", "--mode", "sync", "--hidden", "8", "--tensorboard", "--quiet"]
    run(1, [*words, "--log-every", "0", "--out", "run", "--epochs", "1"], tmp_path).check()
    found = scalars(tmp_path / "run")
    assert found["train/loss"]
    starts = [each.step for each in events(tmp_path / "run") if each.HasField("session_log")]
    assert starts == [0]
    assert 0 < found["eval/accuracy"][-1][1] <= 1
