"""Storage that fails under a running job: what can be kept is kept, and the rest is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import Plan, assert_counts, counting, final, newest, open_folders, samples_file, summary

pytestmark = [pytest.mark.launch, pytest.mark.one_mpi]

STORAGE = Path(__file__).parents[1] / "problems" / "storage.py"
SAMPLES = 128


def lines(out: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return what ``metrics.jsonl`` has, of one kind; every line of it is whole."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in ("", row["kind"])]


FOUR = "--servers 2 --batch-size 2 --checkpoint-every 5steps --keep 100"
JOBS = (  # name of the run, problem, options, exit code
    ("async", "Sometimes", "--mode async --epochs 2", 0),
    ("sync", "SometimesMean", "--mode sync --lr 4 --epochs 2", 0),
    ("stall", "SometimesMean", "--mode sync --snapshot stall --epochs 2", 0),
    ("easgd", "SometimesMLP", "--mode easgd --steps 50 --hidden 8", 0),
    ("never async", "Never", "--epochs 1", 1),
    ("never async", "Never", "--resume --epochs 2", 0),
    ("never sync", "NeverMean", "--mode sync --epochs 1", 1),
    ("never sync", "NeverMean", "--mode sync --resume --epochs 2", 0),
    ("stopped", "NeverStopped", "--epochs 1000000", 1),
    ("Moved", "Moved", "--mode async --epochs 1", 1),
    ("Moved-2", "Moved", "--mode async --epochs 2 --resume", 0),
    ("Removed", "Removed", "--mode sync --epochs 1", 1),
    ("Removed", "Removed", "--mode sync --epochs 2 --resume", 0),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    plan = Plan(tmp_path_factory.mktemp("runs"))
    data = counting(samples_file(plan.folder, SAMPLES))[2:]
    for name, kind, options, code in JOBS:
        own = [] if kind == "SometimesMLP" else data
        words = ["--problem", f"{STORAGE}:{kind}", *own, *FOUR.split(), *options.split()]
        plan.add(name, 4, words, code)
    plan.run(240)
    return plan


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


def test_a_stop_that_cannot_save_does_not_say_saved(runs: Plan) -> None:
    out = runs.out("stopped")
    assert summary(out)["stop_reason"] == "SIGUSR1"
    assert "No space left" in summary(out)["unsaved"]
    assert newest(out).step == 0
    assert not (out / "DONE").exists()


@pytest.mark.parametrize(("kind", "said"), [("Moved", "renamed to"), ("Removed", "removed while")])
def test_a_folder_that_goes_away(kind: str, said: str, runs: Plan) -> None:
    """The run goes on in its folder, or in a new one, ends with 1, and is resumed from there."""
    out = runs.out(kind + "-2" * (kind == "Moved"))
    saved = final(out)
    (warning,) = [row["text"] for row in lines(out, "warning") if said in row["text"]]
    assert warning.endswith(f"; checkpoints go to {out}")
    assert [row["reason"] for row in lines(out, "end")] == ["epochs", "epochs"]
    if kind == "Moved":
        assert_counts(saved, SAMPLES, epochs=2)
        assert not runs.out(kind).exists()
        assert len(lines(out, "start")) == 2
