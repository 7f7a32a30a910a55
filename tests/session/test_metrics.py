import errno
import io
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.session import metrics
from mpips.session.metrics import Log, staleness_summary, write_json


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=100.0)
    made.perf_counter = lambda: made.now
    monkeypatch.setattr(metrics, "time", made)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_the_log(
    path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture
) -> None:
    with Log(path, 99.0) as log:
        log.event("start", 0, mode="async", world=8)
        log.count((2.0, 10))
        log.count((5.0, 20))
        clock.now += 2.0
        log.progress(7, 0.25, 30)
        log.count((1.0, 10))
        clock.now += 1.0
        log.progress(8, 0.5, 40, staleness=1 / 3)
        log.heard("eval", {"step": 7.0, "epoch": 0.25, "loss": 1.5, "accuracy": 0.5})
    found = rows(path)
    assert found[0] == {"kind": "start", "time_s": 1.0, "step": 0, "mode": "async", "world": 8}
    line = {"kind": "train", "time_s": 3.0, "step": 7, "epoch": 0.25}
    assert found[1] == line | {"loss": 4.0, "samples": 30, "samples_per_s": 15.0}
    assert (found[2]["samples_per_s"], found[2]["staleness"]) == (10.0, 0.333)
    evaluated = {"step": 7, "loss": 1.5, "accuracy": 0.5}
    assert found[3].items() >= {"kind": "eval", **evaluated}.items()
    assert log.last_eval == evaluated
    assert log.last_loss == 1.0
    assert re.search("step        7 .* loss 4.0000 .* 15 samples/s", capsys.readouterr().out)


def test_lines_of_a_log_become_fewer(
    path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture
) -> None:
    """Every 2 s at first, each minute after hours; the last one is there without a new loss too."""
    shown = {}
    with Log(path, 100.0, interval_s=0.25, sparse=True) as log:
        for step in range(1, 4 * 7200 + 1):
            clock.now += 0.25
            log.count((1.0, 1))
            log.progress(step, 0.0, step)
            if step in (4 * 13, 4 * 60, 4 * 7200):
                shown[step] = capsys.readouterr().out.count("step")
        log.progress(99, 0.0, 99, force=True)
    assert [*shown.values()] == [7, 13, 130]
    assert capsys.readouterr().out.count("step       99") == 1
    # 0.25 s apart at first, later 2 % of the time gone, at most 30 s: 50 + 240 + 190 of them.
    assert 450 <= len(rows(path)) <= 520


def test_a_line_is_forced_and_a_quiet_log_prints_none(
    path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture
) -> None:
    with Log(path, 100.0, quiet=True) as log, Log(None, 100.0) as of_another_rank:
        clock.now += 1e-3
        log.progress(1, 0.1, 5, force=True)  # nothing new to tell
        for each in (log, of_another_rank):
            each.say("hello")
            each.count((0.5, 5))
        log.progress(1, 0.1, 5)  # too soon
        assert rows(path) == []
        for each in (log, of_another_rank):
            each.progress(1, 0.1, 5, force=True)
            each.heard("eval", {"step": 1, "loss": 2.0})
    assert [row["kind"] for row in rows(path)] == ["train", "eval"]
    assert capsys.readouterr().out == ""


def test_the_last_line_has_the_last_accuracy(
    path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture
) -> None:
    """Also where the line before came with the last batch: then there is no new loss to tell."""
    with Log(path, 100.0) as log:
        log.heard("eval", {"step": 1.0, "epoch": 0.5, "loss": 1.0, "accuracy": 0.7})
        log.count((0.5, 5))
        clock.now += 2.0
        log.progress(9, 2.0, 10)
        log.progress(9, 2.0, 10, force=True)
        assert capsys.readouterr().out.count("accuracy 0.7000") == 1
        log.heard("eval", {"step": 9, "epoch": 2.0, "accuracy": 0.9875})
        clock.now += 2.0
        log.progress(9, 2.0, 10, force=True)
    last = "step        9  epoch   2.00  loss 0.5000  accuracy 0.9875  2 samples/s\n"
    assert capsys.readouterr().out == f"[    4.0 s] {last}"
    assert [row["kind"] for row in rows(path)] == ["eval", "train", "eval"]


class FullDisk(io.FileIO):
    """A file on a disk that is full for six writes, of which every other one takes a part."""

    full = 6

    def __init__(self, path: Path, mode: str, buffering: int) -> None:
        super().__init__(path, mode)

    def write(self, data: bytes) -> int:
        if not self.full:
            return super().write(data)
        self.full -= 1
        if self.full % 2:
            return super().write(data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_that_cannot_be_written_come_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "open", FullDisk, raising=False)
    with Log(path, 0.0, quiet=True) as log:
        for step in range(5):
            log.event("checkpoint", step)
    found = rows(path)
    assert [row["step"] for row in found if row["kind"] == "checkpoint"] == list(range(5))
    (warning,) = [row["text"] for row in found if row["kind"] == "warning"]
    assert warning == f"{path} cannot be written: No space left on device"
    assert list(log.warnings) == [warning]
    assert capsys.readouterr() == ("", f"mpips: warning: {warning}\n")


@pytest.mark.parametrize("left", ["", '{"kind": "train", "st'])
def test_a_line_is_there_at_once(left: str, path: Path) -> None:
    """The next job adds its lines, also to one that a full disk or a crash has cut off."""
    path.write_text(left)
    for step in (1, 2):
        with Log(path, 0.0) as log:
            log.event("start", step)
            found = path.read_text().removeprefix(left).strip().splitlines()
            assert [json.loads(line)["step"] for line in found] == [1, 2][:step]


def test_a_log_that_cannot_be_reopened_goes_on(path: Path) -> None:
    with Log(path, 0.0) as log:
        with pytest.raises(FileNotFoundError):
            log.reopen(path.parent / "none" / path.name)
        log.event("start", 1)
    assert [row["step"] for row in rows(path)] == [1]


def test_json_is_written_whole_without_nan(path: Path) -> None:
    value = {
        "a": math.nan,
        "b": [math.inf, -math.inf, 1.5],
        "c": {"d": np.float32("nan"), 3: np.int64(7), "e": (np.bool_(True), None)},
    }
    expected = {"a": "nan", "b": ["inf", "-inf", 1.5], "c": {"d": "nan", "3": 7, "e": [True, None]}}
    write_json(path, value)
    assert json.loads(path.read_text()) == expected
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    os.symlink("/dev/full", path.with_name(f"{path.name}.tmp"))
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == expected, "the old one is left"
    assert os.listdir(path.parent) == [path.name]
    path.unlink()
    with Log(path, 0.0) as log:
        log.event("end", 1, loss=math.nan, accuracy=np.float64(0.5))
    assert rows(path)[0]["loss"] == "nan"


@settings(max_examples=30)
@given(values=st.lists(st.integers(0, 20), max_size=300))
def test_staleness_against_the_values_themselves(values: list[int]) -> None:
    counts, most = np.bincount(values, minlength=64).tolist(), max(values, default=0)
    summary = staleness_summary(counts, sum(values), most)
    if not values:
        assert summary == {"mean": 0.0, "p50": 0, "p99": 0, "max": 0, "histogram": []}
        return
    p50, p99 = (np.percentile(values, k, method="inverted_cdf") for k in (50, 99))
    assert summary.pop("mean") == pytest.approx(np.mean(values))
    histogram = np.bincount(values).tolist()
    assert summary == {"p50": p50, "p99": p99, "max": most, "histogram": histogram}
