"""The folder of a run belongs to one job at a time: `mpips.folder`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mpips import folder
from mpips.command_line import parse_command_line
from mpips.config import Config
from mpips.errors import UserError
from mpips.jobfile import read_toml, resolve


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    folder.release()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    line = parse_command_line(["--out", str(out)])
    folder.find_run(line)
    folder.save_config(out, Config())
    again = parse_command_line(["--out", str(out), "--resume", "auto"])
    with pytest.raises(UserError, match="in use by a running job"):
        folder.find_run(again)
    folder.release()
    assert not folder.find_run(again).resumed  # nothing was saved: begins anew


def test_a_refused_job_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    folder.find_run(parse_command_line(["--out", str(out)]))
    folder.forget(out)
    assert not out.exists()


def test_the_saved_job_names_its_learning_rate(tmp_path: Path) -> None:
    folder.save_config(tmp_path, Config(optimizer="sgd"))
    assert read_toml(tmp_path / "config.toml")["lr"] == Config(optimizer="sgd").learning_rate


def test_epochs_on_resume_end_a_saved_number_of_steps() -> None:
    saved = {"steps": 10, "epochs": 40}
    assert resolve({"epochs": 3}, {}, saved).steps == 0
    assert resolve({}, {}, saved).steps == 10
    assert resolve({"epochs": 3, "steps": 5}, {}, saved).steps == 5


def test_a_problem_file_without_a_class_is_told_how() -> None:
    with pytest.raises(UserError, match=r"name the class too: mine\.py:Class"):
        parse_command_line(["--problem", "mine.py"])
