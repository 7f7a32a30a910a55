"""Storage that fails under a running job: what can be kept is kept, and the rest is said."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import run
from runs import (
    HERE,
    Plan,
    assert_counts,
    counting,
    final,
    newest,
    open_folders,
    samples_file,
    shared_out,
    summary,
)

from mpips.checkpoint import need_whole
from mpips.session import metrics

STORAGE = f"{HERE / 'problems' / 'storage.py'}"
SAMPLES = 128


def lines(out: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return what ``metrics.jsonl`` has, of one kind; every line of it is whole."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in ("", row["kind"])]


# --- figures ------------------------------------------------------------------------------------


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    metrics.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        metrics.write_json(path, {"a": object()})
    os.symlink("/dev/full", tmp_path / "summary.json.tmp")
    with pytest.raises(OSError, match="No space left"):
        metrics.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["summary.json"]


# --- checkpoints --------------------------------------------------------------------------------

OFTEN = ("--checkpoint-every", "5steps", "--keep", "100")
FOUR = ("--servers", "2", "--batch-size", "2", *OFTEN)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    plan = Plan(tmp_path_factory.mktemp("runs"))
    data = counting(samples_file(plan.folder, SAMPLES))[2:]
    for name, kind, options in (
        ("async", "Sometimes", [*data, *FOUR, "--mode", "async"]),
        ("sync", "SometimesMean", [*data, *FOUR, "--mode", "sync", "--lr", "4"]),
        ("stall", "SometimesMean", [*data, *FOUR, "--mode", "sync", "--snapshot", "stall"]),
        ("easgd", "SometimesMLP", [*FOUR, "--mode", "easgd", "--steps", "50", "--hidden", "8"]),
    ):
        length = [] if "--steps" in options else ["--epochs", "2"]
        plan.add(name, 4, ["--problem", f"{STORAGE}:{kind}", *options, *length])
    for name, kind, mode in (
        ("never async", "Never", "async"),
        ("never sync", "NeverMean", "sync"),
    ):
        words = ["--problem", f"{STORAGE}:{kind}", *data, *FOUR, "--mode", mode, "--epochs", "1"]
        plan.add(name, 4, words, code=1)
        plan.add(name, 4, [*words, "--resume", "--epochs", "2"])
    words = ["--problem", f"{STORAGE}:NeverStopped", *data, *FOUR, "--mode", "async"]
    plan.add("stopped", 4, [*words, "--epochs", "1000000"], code=1)
    for kind, second in (("Moved", "-2"), ("Removed", "")):
        for mode in ("async", "sync"):
            words = ["--problem", f"{STORAGE}:{kind}", *data, *FOUR, "--mode", mode]
            plan.add(f"{kind} {mode}", 4, [*words, "--epochs", "1"], code=1)
            again = [*words, "--epochs", "2", "--resume"]
            plan.add(f"{kind} {mode}{second}", 4, again)
    plan.run(240)
    return plan


@pytest.mark.launch
@pytest.mark.one_mpi
@pytest.mark.parametrize("name", ["async", "sync", "stall", "easgd"])
def test_what_could_not_be_written_is_written_later(name: str, runs: Plan) -> None:
    """The folder, a shard, a worker's file and the index, one after another."""
    out = runs.out(name)
    saved = final(out)
    failed = [w for w in summary(out)["warnings"] if "no checkpoint of step" in w]
    assert 1 <= len(failed) <= (4 if name == "easgd" else 3)  # as many as had the time
    assert all("No space left on device" in text for text in failed)
    assert [row["text"] for row in lines(out, "warning")] == summary(out)["warnings"]
    assert not open_folders(out)
    assert len(lines(out, "checkpoint")) > 1
    if name == "async":
        assert_counts(saved, SAMPLES, epochs=2)
    assert summary(out)["unsaved"] is None
    assert summary(out)["samples"] == saved.state["samples"]


@pytest.mark.launch
@pytest.mark.one_mpi
@pytest.mark.parametrize("name", ["never async", "never sync"])
def test_the_last_one_cannot_be_written(name: str, runs: Plan) -> None:
    """An error at the end, nothing half-written; a resumed run goes on from the first one."""
    out = runs.out(name)
    saved = final(out)
    assert [row["resumed"] for row in lines(out, "start")] == [False, True]
    assert lines(out, "checkpoint")[0]["step"] == 0
    texts = [row["text"] for row in lines(out, "warning")]
    assert texts[-1].endswith("the newest whole checkpoint is that of step 0")
    assert not open_folders(out)
    if name == "never async":
        assert_counts(saved, SAMPLES, epochs=2)


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_stop_that_cannot_save_does_not_say_saved(runs: Plan) -> None:
    out = runs.out("stopped")
    assert summary(out)["stop_reason"] == "SIGUSR1"
    assert "No space left" in summary(out)["unsaved"]
    assert newest(out).step == 0
    assert not (out / "DONE").exists()


@pytest.mark.launch
@pytest.mark.one_mpi
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(("kind", "said"), [("Moved", "renamed to"), ("Removed", "removed while")])
def test_a_folder_that_goes_away(mode: str, kind: str, said: str, runs: Plan) -> None:
    """The run goes on in its folder, or in a new one, ends with 1, and is resumed from there."""
    out = runs.out(f"{kind} {mode}" + "-2" * (kind == "Moved"))
    saved = final(out)
    (warning,) = [row["text"] for row in lines(out, "warning") if said in row["text"]]
    assert warning.endswith(f"; checkpoints go to {out}")
    ends = [row["reason"] for row in lines(out, "end")]
    assert ends == ["epochs", "epochs"]
    if mode == "async":
        assert_counts(saved, SAMPLES, epochs=2)
    if kind == "Moved":
        assert not runs.out(f"{kind} {mode}").exists()
        assert len(lines(out, "start")) == 2


# --- a disk that is full ------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize("mode", shared_out(["async", "sync"], []))
def test_a_full_disk(mode: str, small: Path) -> None:
    words = ["-m", "mpips.train", "--problem", f"{STORAGE}:FullDisk", "--hidden", "16"]
    words += ["--mode", mode, "--checkpoint-every", "50steps", "--epochs", "16", "--quiet"]
    words += ["--eval-every", "0.05"]  # more lines than the last page of the file has room for
    done = run(2, [*words, "--out", "small/run"], small.parent, env={"FILL": "1"}).check()
    assert "Traceback" not in done.output
    warnings = [line for line in done.output.splitlines() if line]
    assert any("metrics.jsonl cannot be written: No space left" in line for line in warnings)
    assert any("no checkpoint of step" in line for line in warnings)
    assert all(line.startswith("mpips: warning: ") for line in warnings), done.output
    final(small / "run")
    assert {"start", "train", "warning", "checkpoint", "end"} <= {
        row["kind"] for row in lines(small / "run")
    }
    done = run(2, [*words, "--out", "small/two"], small.parent, env={"FILL": "forever"}).check(1)
    assert "Traceback" not in done.output
    assert "is not saved: cannot" in done.output
    found, _ = need_whole(small / "two")
    assert f"the newest whole checkpoint is that of step {found.step}" in done.output
    assert not (small / "two" / "DONE").exists()
    (small / "filler").unlink()
    run(2, [*words, "--out", "small/two", "--resume"], small.parent).check()
    final(small / "two")
