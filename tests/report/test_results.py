"""The table of runs: what differs between them, and what came of each."""

import csv
from pathlib import Path

import pytest
from made import make

from mpips.errors import UserError
from mpips.tools.results import find_runs, main, results

SUMMARY = {
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
    make(tmp_path / "2", [], SUMMARY, lr=0.01, quiet=True)
    stopped = {**SUMMARY, "eval_loss": None, "accuracy": None, "stop_reason": "SIGUSR1"}
    make(tmp_path / "10", [], stopped, False, lr=0.002, hidden=(8,))
    make(tmp_path / "9", [], None, False, lr=0.002, seed=3)
    (tmp_path / "results.lock").write_text("")
    return tmp_path


def test_table(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that are the same everywhere are left out, and numbers are in their order."""
    assert main([str(sweep)]) == 0
    assert capsys.readouterr().out == TABLE


def test_what_came_of_a_run_and_what_was_asked_for(tmp_path: Path) -> None:
    """NaN and infinities stand as text in a summary."""
    for name, epochs, loss in (("1", 40, "nan"), ("2", 90, 3.5e28)):
        came = {**SUMMARY, "epochs": 12.5, "eval_loss": loss, "global_step": 150_000}
        make(tmp_path / name, [], {**came, "accuracy": None}, False, epochs=epochs)
    diverged, row = results(find_runs([tmp_path]))
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
        make(tmp_path / name, [], SUMMARY, **options)
    rows = results(find_runs([tmp_path]))
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
    rows = {row["run"]: row for row in results(find_runs([sweep]))}
    assert {name: row["state"] for name, row in rows.items()} == {
        "2": "done", "3": "failed (exit code 2)", "9": "failed (exit code 2)",
        "10": "not done (SIGUSR1)",
    }  # fmt: skip
    assert (rows["3"]["accuracy"], rows["3"]["lr"], rows["9"]["lr"]) == ("-", "-", "0.002")


def test_values_for_a_spreadsheet(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--csv", str(sweep)]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert list(rows[0])[:3] == ["run", "state", "global_step"]
    assert [row["run"] for row in rows] == ["2", "9", "10"]
    assert (rows[0]["accuracy"], rows[0]["hidden"], rows[1]["loss"]) == ("0.9805", "128,64", "-")


def test_errors(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"no run in .*empty, expected folders with config.toml"):
        find_runs([sweep / "empty"])
    (sweep / "2" / "summary.json").write_text("{")
    assert main([str(sweep)]) == 2
    assert "summary.json: " in capsys.readouterr().err
    assert main([]) == 2
    assert "required: FOLDER" in capsys.readouterr().err
