"""The table of runs: what differs between them, and what came of each."""

import csv
import json
from pathlib import Path

import pytest

from mpips.config import Config
from mpips.errors import UserError
from mpips.folder import save_config
from mpips.results import find_runs, main, results, table

SUMMARY = {
    "global_step": 1800, "epochs": 40.0, "loss": 0.0025, "eval_loss": 0.07641, "accuracy": 0.98046,
    "samples_per_s": 64112.3, "wall_s": 5.21, "stop_reason": "epochs", "world": 8,
}  # fmt: skip


def make_run(out: Path, config: Config, summary: dict[str, object] | None, done: bool) -> None:
    out.mkdir(parents=True)
    save_config(out, config)
    if summary is not None:
        (out / "summary.json").write_text(json.dumps(summary))
    if done:
        (out / "DONE").write_text("epochs\n")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three runs: one is done, one was stopped, one has only begun."""
    make_run(tmp_path / "2", Config(lr=0.01, quiet=True), SUMMARY, done=True)
    stopped = {**SUMMARY, "eval_loss": None, "accuracy": None, "stop_reason": "SIGUSR1"}
    make_run(tmp_path / "10", Config(lr=0.002, hidden=(8,)), stopped, done=False)
    make_run(tmp_path / "9", Config(lr=0.002, seed=3), None, done=False)
    (tmp_path / "results.lock").write_text("")
    return tmp_path


def test_table(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that are the same everywhere are left out, and numbers are in their order."""
    assert main([str(sweep)]) == 0
    assert capsys.readouterr().out == (
        "run  state                 global_step  epochs  loss    eval_loss  accuracy  "
        "samples_per_s  wall_s  seed  hidden  lr\n"
        "2    done                  1800         40.00   0.0025  0.0764     0.9805    "
        "64112          5.2     0     128,64  0.01\n"
        "9    not done (not ended)  -            -       -       -          -         "
        "-              -       3     128,64  0.002\n"
        "10   not done (SIGUSR1)    1800         40.00   0.0025  -          -         "
        "64112          5.2     0     8       0.002\n"
    )


def test_values_for_a_spreadsheet(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--csv", str(sweep)]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["run"] for row in rows] == ["2", "9", "10"]
    assert (rows[0]["accuracy"], rows[0]["hidden"], rows[1]["loss"]) == ("0.9805", "128,64", "-")


def test_one_run(sweep: Path) -> None:
    (row,) = results(find_runs([sweep / "2"]))
    assert list(row)[:3] == ["run", "state", "global_step"]
    assert "lr" not in row
    assert table([row]).count("\n") == 2


def test_errors(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"no run in .*empty, expected folders with config.toml"):
        find_runs([sweep / "empty"])
    (sweep / "2" / "summary.json").write_text("{")
    assert main([str(sweep)]) == 2
    assert "summary.json: " in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: " in capsys.readouterr().err
