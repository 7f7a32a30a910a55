"""What is read of a run: whole ones, and what is left of others."""

import fcntl
import re
from pathlib import Path

import pytest
from made import SUMMARY, end, job, make, row, whole

from mpips.tools.report.record import read, shortest_names


def test_curves_are_the_lines(tmp_path: Path) -> None:
    """Time begins where training does; evaluations are told by epochs, and have samples too."""
    run = read(whole(tmp_path / "a"), "a")
    assert not run.missing
    losses = run.curves["training loss"].points
    assert [(p.seconds, p.updates, p.samples, p.value) for p in losses] == [
        (2.0 * k, 10.0 * k, 100.0 * k, 1 / k) for k in (1, 2, 3, 4)
    ]
    held_out = run.curves["held-out loss"].points
    assert [(p.seconds, run.samples_at(p), p.value) for p in held_out] == [
        (2.0 * k + 0.5, 100.0 * k, 2 / k) for k in (1, 2, 3, 4)
    ]
    assert [p.value for p in run.curves["accuracy"].points] == [1 - 1 / k / 8 for k in (1, 2, 3, 4)]
    assert [p.value for p in run.curves["staleness"].points] == [0.5, 1.0, 1.5, 2.0]
    assert [p.value for p in run.curves["samples/s"].points] == [50.0] * 3
    assert [p.updates for p in run.checkpoints.points] == [40]
    assert [event.kind for event in run.events] == ["begun", "end"]
    assert run.jobs == [(0.0, 9.0)]
    assert run.outcome == {**SUMMARY, "accuracy": 1 - 1 / 32}


def test_jobs_one_after_the_other(tmp_path: Path) -> None:
    """A stop and a resume, then a death, then a job that was killed, and the one after it."""
    lines = [
        *job(0, 1),
        *(row("stop", 8.0, 10, reason="SIGUSR1"), *end(8.0, 10, "SIGUSR1")),
        *job(1, 2, resumed=True),
        row("lost", 8.0, 20, rank=3, worker=2, batches=3),
        row("lost", 8.5, 20, rank=1, server=1, seconds=0.1, continued=False),
        row("warning", 9.0, 20, text="no space"),
        *job(2, 4, resumed=True),
        *end(15.0, 40),
    ]
    run = read(make(tmp_path / "a", lines), "a")
    assert run.jobs == [(0.0, 3.0), (3.0, 7.0), (7.0, 17.0)]
    found = [(event.kind, event.seconds) for event in run.events]
    assert sorted(found) == sorted(
        [("begun", 0.0), ("stop", 3.0), ("end", 3.0), ("resumed", 3.0), ("death", 6.0),
         ("death", 6.5), ("warning", 7.0), ("failure", 7.0), ("resumed", 7.0), ("end", 17.0)]
    )  # fmt: skip
    texts = [event.text for event in run.events if event.kind == "death"]
    assert [text.split(";")[0] for text in texts] == [
        *("worker 2 (rank 3) died", "server 1 (rank 1) died")
    ]
    assert [p.seconds for p in run.curves["training loss"].points] == [2.0, 5.0, 9.0, 11.0]
    assert [p.seconds for p in run.curves["samples/s"].points] == [11.0]


def test_jobs_that_have_not_ended(tmp_path: Path) -> None:
    """The lines so far count, the last one half written; one that was killed is a failure."""
    out = make(tmp_path / "a", job(0, 3), summary=None, done=False)
    killed = read(out, "a")
    assert not killed.running
    assert killed.events[-1].kind == "failure"
    assert "no job has ended by itself" in killed.missing[0]
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "time_s": 1')
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = read(out, "a")
    assert run.running
    ended, damaged = run.missing
    assert ended.startswith("no summary.json: ")
    assert "has not ended" in ended
    assert re.match("metrics.jsonl: .*1 line is damaged", damaged)
    assert not [event for event in run.events if event.kind == "failure"]
    came = run.outcome
    assert (came["global_step"], came["loss"], came["eval_loss"]) == (30, 1 / 3, 2 / 3)


def test_a_summary_of_an_earlier_job(tmp_path: Path) -> None:
    """Says nothing of how far the run is."""
    lines = [*job(0, 4), *end(14.0, 40), *job(4, 6, resumed=True)]
    run = read(make(tmp_path / "a", lines, done=False), "a")
    assert run.missing == ["summary.json is of an earlier job: what is said of each rank, too"]
    assert (run.outcome["global_step"], run.outcome["loss"]) == (60, 1 / 6)


DAMAGED = [
    b"", b"\n\n", b"\xff\xfe\x00garbage\n", b"[1, 2]\n", b'"text"\n', b'{"kind": "train"}\n',
    b'{"kind": "train", "time_s": 6, "step": "x"}\n',
    b'{"kind": "train", "time_s": 6, "step": 1, "epoch": "one", "loss": 1}\n',
    b'{"kind": "eval", "time_s": 6, "step": 1, "epoch": 1, "loss": [1]}\n',
    b'{"kind": "train", "time_s": null, "step": 1}\n',
    b'{"kind": "train", "time_s": 6, "step": Infinity, "loss": 1}\n',
    b'{"kind": "train", "time_s": 1' + 400 * b"0" + b"}\n", b"[" * 100_000 + b"\n",
]  # fmt: skip


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_lines_are_left_out(line: bytes, tmp_path: Path) -> None:
    out = whole(tmp_path / "a")
    file = out / "metrics.jsonl"
    file.write_bytes(line + file.read_bytes())
    run = read(out, "a")
    assert [p.value for p in run.curves["training loss"].points] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert len(run.missing) == bool(line.strip())


def test_infinities_and_what_is_not_a_number(tmp_path: Path) -> None:
    lines = [
        row("start", 1.0, 0),
        row("train", 2.0, 1, epoch=1.0, loss="nan", samples=10),
        row("train", 3.0, 2, epoch=2.0, loss="inf", samples=20),
    ]
    run = read(make(tmp_path / "a", lines, {"loss": "nan", "stop_reason": "diverged"}), "a")
    assert len(run.curves["training loss"].points) == 2
    assert run.last("training loss") is None


@pytest.mark.parametrize("name", ["summary.json", "config.toml", "metrics.jsonl"])
@pytest.mark.parametrize("how", ["missing", "empty", "damaged", "other", "folder"])
def test_damaged_files(name: str, how: str, tmp_path: Path) -> None:
    """Are told, and the rest is there."""
    out = whole(tmp_path / "a")
    file = out / name
    text = file.read_bytes()
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how != "missing":
        contents = {"empty": b"", "damaged": text[: len(text) // 2], "other": b"[1]\n"}
        file.write_bytes(contents[how])
    run = read(out, "a")
    quiet = {("config.toml", "empty"), ("config.toml", "damaged")}
    assert any(name in text for text in run.missing) or (name, how) in quiet
    assert bool(run.summary) == (name != "summary.json")
    assert run.part("per_worker") == (SUMMARY["per_worker"] if run.summary else [])
    assert ("training loss" in run.curves) == (name != "metrics.jsonl" or how == "damaged")


def test_names_tell_runs_apart() -> None:
    paths = [Path("/x/a/1"), Path("/x/b/1"), Path("/x/b/2")]
    assert shortest_names(paths) == ["a/1", "b/1", "b/2"]
    assert shortest_names(paths[1:]) == ["1", "2"]
    assert shortest_names([Path("/")]) == ["/"]
