"""What is read of runs, and what is left of others; their table; a view of them as they go on."""

import contextlib
import csv
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
from made import SUMMARY, end, job, make, row, whole
from rich.console import Console

from mpips.errors import UserError
from mpips.tools import results, trace, watch
from mpips.tools.report.record import read, shortest_names
from mpips.tools.results import find_runs
from mpips.tools.watch import Watched, screen


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


# The table of runs: what differs between them, and what came of each.

CAME = {
    "global_step": 1800, "epochs": 40.0, "loss": 0.0025, "eval_loss": 0.07641, "accuracy": 0.98046,
    "samples_per_s": 64112.3, "wall_s": 5.21, "stop_reason": "epochs", "world": 8,
}  # fmt: skip
TABLE = """\
run  state                 step  epoch  loss    eval_loss  accuracy  samples/s  wall_s  seed  hidden
2    done                  1800  40.00  0.0025  0.0764     0.9805    64112      5.2     0     128,64
9    not done (not ended)  -     -      -       -          -         -          -       3     128,64
10   not done (SIGUSR1)    1800  40.00  0.0025  -          -         64112      5.2     0     8

run  lr
2    0.01
9    0.002
10   0.002
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three runs: one is done, one was stopped, one has only begun."""
    make(tmp_path / "2", [], CAME, lr=0.01, quiet=True)
    stopped = {**CAME, "eval_loss": None, "accuracy": None, "stop_reason": "SIGUSR1"}
    make(tmp_path / "10", [], stopped, False, lr=0.002, hidden=(8,))
    make(tmp_path / "9", [], None, False, lr=0.002, seed=3)
    (tmp_path / "results.lock").write_text("")
    return tmp_path


def test_table(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that are the same everywhere are left out, and numbers are in their order."""
    assert results.main([str(sweep)]) == 0
    assert capsys.readouterr().out == TABLE


def test_what_came_of_a_run_and_what_was_asked_for(tmp_path: Path) -> None:
    """NaN and infinities stand as text in a summary; what is damaged is shown as it is."""
    for name, epochs, loss in (("1", 40, "nan"), ("2", 90, 3.5e28)):
        came = {**CAME, "epochs": 12.5, "eval_loss": loss, "global_step": 150_000}
        make(tmp_path / name, [], {**came, "accuracy": None}, False, epochs=epochs)
    damaged = {"global_step": 1.5, "epochs": "x", "loss": [2], "wall_s": None}
    make(tmp_path / "3", [], damaged, False)
    diverged, row, odd = results.results(find_runs([tmp_path, tmp_path / "1"]))
    assert [odd[k] for k in damaged] == ["1.5", "x", "2", "-"]
    assert (diverged["eval_loss"], diverged["accuracy"]) == ("nan", "-")
    assert (row["epochs"], row["--epochs"]) == ("12.50", "90")
    assert (row["eval_loss"], row["global_step"]) == ("3.5e+28", "150000")


def test_options_without_effect_are_not_shown(tmp_path: Path) -> None:
    """Those of another mode, codec or rule than the run's."""
    for name, options in {
        "1": {"mode": "easgd", "tau": 4, "optimizer": "momentum", "momentum": 0.5},
        "2": {"mode": "sync", "codec": "topk", "topk_ratio": 0.1},
        "3": {"codec": "topk", "topk_ratio": 0.1, "staleness_lr": True},
    }.items():
        make(tmp_path / name, [], CAME, **options)
    rows = results.results(find_runs([tmp_path]))
    names = ("mode", "staleness_lr", "codec", "topk_ratio", "momentum", "tau")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("easgd", "-", "-", "-", "0.5", "4"),
        ("sync", "-", "topk", "0.1", "-", "-"),
        ("async", "True", "topk", "0.1", "-", "-"),
    ]


def test_rows_that_have_failed(sweep: Path) -> None:
    """Those that left a run and those that left none; why it was stopped says more."""
    for name in ("3", "9", "10", "2"):
        (sweep / f"{name}.failed").write_text("exit code 2\n")
    rows = {row["run"]: row for row in results.results(find_runs([sweep]))}
    assert {name: row["state"] for name, row in rows.items()} == {
        "2": "done", "3": "failed (exit code 2)", "9": "failed (exit code 2)",
        "10": "not done (SIGUSR1)",
    }  # fmt: skip
    assert (rows["3"]["accuracy"], rows["3"]["lr"], rows["9"]["lr"]) == ("-", "-", "0.002")


def test_values_for_a_spreadsheet(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main(["--csv", str(sweep)]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert list(rows[0])[:3] == ["run", "state", "global_step"]
    assert [row["run"] for row in rows] == ["2", "9", "10"]
    assert (rows[0]["accuracy"], rows[0]["hidden"], rows[1]["loss"]) == ("0.9805", "128,64", "-")


def test_errors(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"no run in .*empty, expected folders with config.toml"):
        find_runs([sweep / "empty"])
    for text in ("{", "[1]"):
        (sweep / "2" / "summary.json").write_text(text)
        assert results.main([str(sweep)]) == 2
        assert "summary.json: " in capsys.readouterr().err
    for command in (results, watch, trace):
        assert command.main([300 * "x"]) == 2
        assert ": File name too long, expected one that can be read" in capsys.readouterr().err
    assert results.main([]) == 2
    assert "required: FOLDER" in capsys.readouterr().err


# Runs as they go on, in a terminal.


def shown(runs: list[Watched], width: int, height: int = 50) -> str:
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
        assert re.search(r"a +running +2.00 +20 +0.5 +1 +0.9375 +1 +50 ", shown([run], 120))
    more = "".join(f"{json.dumps(line)}\n" for line in job(2, 3)[1:])
    with (out / "metrics.jsonl").open("a") as file:
        for part in (more[:30], more[30:]):
            file.write(part)
            file.flush()
            told = shown([run], 120)
    assert re.search(r"a +not running +3.00 +30 +0.3333 +0.6667 ", told)
    (out / "DONE").write_text("epochs\n")
    assert re.search(r"a +done +3.00 ", shown([run], 120))


@pytest.mark.parametrize("epochs", [1, 4])
def test_another_run_in_the_same_place(epochs: int, tmp_path: Path) -> None:
    """Its lines are fewer than those that were read, or more."""
    run = Watched(make(tmp_path / "a", job(0, 2), summary=None, done=False), "a")
    assert re.search(r"a +not running +2.00 +20 ", shown([run], 120))
    shutil.rmtree(tmp_path / "a")
    run.update()
    make(tmp_path / "a", job(6, 6 + epochs), summary=None, done=False)
    assert re.search(rf"a +not running +{6 + epochs}.00 +{60 + 10 * epochs} ", shown([run], 120))
    points = run.record.curves["training loss"].points
    assert [point.updates for point in points] == [70, 80, 90, 100][:epochs]


@pytest.mark.parametrize("width", [80, 140])
def test_the_screen_is_as_wide_as_the_terminal(width: int, tmp_path: Path) -> None:
    names = [f"{k}" for k in range(1, 30)] + ["long" * 20]
    runs = [Watched(whole(tmp_path / name), name) for name in names]
    lines = shown([*runs, Watched(tmp_path / "gone", "gone")], width, 36).splitlines()
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
