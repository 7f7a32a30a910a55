"""The commands of mpips: their list, the console script, job files that come along, lines."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import ROOT, python, run

from mpips import __main__, __version__
from mpips.__main__ import COMMANDS
from mpips.checkpoint.__main__ import main as checkpoint
from mpips.config import jobfile
from mpips.config.jobfile import read_toml, resolve
from mpips.config.option import HELP_WIDTH
from mpips.errors import complain, write_line
from mpips.launch.__main__ import main as launch
from mpips.launch.ranks import main as ps
from mpips.tools.results import main as results

SCRIPT = "import sys\nfrom mpips.__main__ import script\nsys.exit(script())\n"  # as pip writes it


@pytest.fixture
def mpips(tmp_path: Path) -> str:
    """The console script, in a folder of its own."""
    path = tmp_path / "bin" / "mpips"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return str(path)


def imported(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the modules that ``-X importtime`` tells of, in the order of their ends."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return [line.rpartition("|")[2].strip() for line in lines]


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert __main__.main(argv) == 0
        told = capsys.readouterr().out
        assert all(f"\n  {name} " in told for name in COMMANDS)
        assert max(map(len, told.splitlines())) <= HELP_WIDTH
    assert __main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpips {__version__}\n"


def test_no_tool_is_left_out() -> None:
    tools = {path.stem for path in (ROOT / "mpips" / "tools").iterdir()} - {
        "__init__",
        "__pycache__",
    }
    modules = {module for module, _ in COMMANDS.values()}
    assert {module.removeprefix("tools.") for module in modules if "tools." in module} == tools


def test_a_reader_that_has_enough() -> None:
    for words in (["guide", "tables"], ["bench", "--list"]):
        command = [sys.executable, "-m", "mpips", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert (process.wait(60), process.stderr.read()) == (141, b"")


def test_what_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    for word, remedy in (
        ("tran", "did you mean 'train'?"),
        ("digits.toml", "write mpips train digits.toml"),
        ("--lr", "write mpips train --lr"),
    ):
        assert __main__.main([word]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"mpips: unknown command {word!r}, expected one of train, ")
        assert error.endswith(f"; {remedy}\n")


def test_training_imports_nothing_else(mpips: str, tmp_path: Path) -> None:
    """A rank notes signals before the heavy imports, whichever way it was started."""
    flags = ("-X", "importtime")
    ours = imported(python(*flags, mpips, "train", "--print-config", cwd=tmp_path))
    usual = imported(python(*flags, "-m", "mpips.train", "--print-config", cwd=tmp_path))
    more = {name for name in set(ours) - set(usual) if not name.startswith("encodings")}
    assert more <= {"mpips.__main__"}
    heavy = [name for name in ours if name.partition(".")[0] in ("numpy", "numba", "h5py")]
    first = ours.index("mpips.mpi.signals")
    assert not [name for name in heavy if ours.index(name) < first]


def test_modules_of_the_current_folder_are_found(mpips: str, tmp_path: Path) -> None:
    """By a model in another folder, say; not where Python is told to be careful."""
    (tmp_path / "helper.py").write_text("")
    check = tmp_path / "bin" / "check"
    check.write_text(SCRIPT.replace("sys.exit(script())", "script()\nimport helper"))
    python(str(check), "--version", cwd=tmp_path)
    done = python("-P", str(check), "--version", cwd=tmp_path, code=1)
    assert "No module named 'helper'" in done.stderr


@pytest.mark.launch
def test_training_by_the_console_script(mpips: str, tmp_path: Path) -> None:
    """Of a job that comes along, by its name; texts and mistakes come once."""
    for words, code, told in (
        ("train softmax-libsvm --epochs 1 --out run", 0, "mode async, adagrad"),
        ("--help", 0, "usage: mpips COMMAND"),
        ("tran", 2, "unknown command 'tran'"),
    ):
        done = run(2, [mpips, *words.split()], tmp_path).check(code)
        assert done.output.count(told) == 1
    assert (tmp_path / "run" / "DONE").exists()


# The job files that come along.


def test_jobs_are_listed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobfile.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "jobs").glob("*.toml"))
    assert max(map(len, lines)) <= HELP_WIDTH
    for name in ("digits-sync", "digits-sync.toml"):
        assert jobfile.main([name]) == 0
        assert capsys.readouterr().out == (ROOT / "jobs" / "digits-sync.toml").read_text()
    assert jobfile.main(["digit-sync"]) == 2
    assert capsys.readouterr().err.endswith("did you mean 'digits-sync'?\n")
    assert jobfile.main(["digits", "--copy", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()


def test_a_job_is_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder, its data included; a file of that name comes first."""
    monkeypatch.chdir(tmp_path)
    for path in (ROOT / "jobs").glob("*.toml"):
        config = resolve({}, read_toml(path.stem))
        named, _, _ = config.dataset.partition("::")
        assert "." not in named or Path(named).is_absolute(), path
        assert "." not in named or Path(named).is_file(), path
    Path("digits").mkdir()
    with pytest.raises(Exception, match=r"job file 'digits', expected a path that ends in .toml"):
        read_toml("digits")


def test_jobs_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert jobfile.main(["--copy", "jobs"]) == 0
    there = {path.name for path in (ROOT / "jobs").iterdir()}
    assert {path.name for path in Path("jobs").iterdir()} == there - {"__pycache__"}
    for path in Path("jobs").glob("*.toml"):
        assert resolve({}, read_toml(path)) == resolve({}, read_toml(path.stem))


# What a rank prints: whole lines, whatever else is printed on the same terminal.

LINES = 200
PROGRAM = f"""
from mpips.errors import complain, write_line
for _ in range({LINES}):
    complain("a cause")
    write_line("step 1")
"""


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_lines_of_several_processes_are_whole(unbuffered: str) -> None:
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    words = [sys.executable, "-c", PROGRAM]
    ranks = [subprocess.Popen(words, stdout=writing, stderr=writing, env=env) for _ in range(2)]
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        lines = pipe.read().splitlines()
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert sorted(lines) == ["mpips: a cause"] * 2 * LINES + ["step 1"] * 2 * LINES


def test_where_lines_go(capsys: pytest.CaptureFixture[str]) -> None:
    write_line("a line\nand its second")
    complain(ValueError("a cause"))
    assert capsys.readouterr() == ("a line\nand its second\n", "mpips: a cause\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize(
    ("command", "words"), [(ps, []), (results, []), (checkpoint, ["list"]), (launch, ["-n2", "--"])]
)
def test_a_run_of_somebody_else(
    command: Callable[[list[str]], int],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Or a program, which one may not even look for: that is said in a line."""
    tmp_path.chmod(0o700)
    os.seteuid(65534)
    try:
        assert command([*words, str(tmp_path / "run.py")]) == 2
    finally:
        os.seteuid(0)
    assert re.match(r"mpips\S* .*run.py.*, expected ", capsys.readouterr().err)
