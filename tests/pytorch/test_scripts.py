"""Scripts as people have them, plain and converted: what was changed, and what they learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, environment, run

from tests.pytorch.scripts.diffs import script

torch = pytest.importorskip("torch")

SCRIPTS = ROOT / "tests" / "pytorch" / "scripts"
# Of each: lines of the converted script that are new or changed, at most; its measure, and by how
# much that may be worse in the modes that it is run in; arguments of the converted script.
CASES: dict[str, tuple[int, str, dict[str, float], tuple[str, ...]]] = {
    "mnist": (12, r"Accuracy: (\d+)/359", {"sync": 15, "async": 25}, ("--batch-size=21",)),
    "nanogpt": (15, r"at the end: val loss ([\d.]+)", {"sync": -0.15}, ()),
    "dlrm": (11, r"at the end: accuracy ([\d.]+)", {"async": 0.1}, ()),
}
PROGRAM = str(SCRIPTS / "run_scripts.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What all converted scripts print, each behind the one before, in one world."""
    lines = [",".join((name, mode, *words)) for name, (_, _, modes, words) in CASES.items()
             for mode in modes]  # fmt: skip
    folder = tmp_path_factory.mktemp("scripts")
    return run(3, [PROGRAM, *lines], folder, 900, {"OMP_NUM_THREADS": "1"}).check().output


@pytest.mark.parametrize("name", CASES)
def test_few_lines_are_changed(name: str) -> None:
    lines = (SCRIPTS / f"{name}.diff").read_text().splitlines()
    changed = [line for line in lines if line.startswith("+") and line[1:].strip()]
    assert len(changed) <= CASES[name][0], "\n".join(changed)


@pytest.mark.launch
@pytest.mark.one_mpi
@pytest.mark.parametrize("name", CASES)
def test_a_converted_script_learns_what_the_plain_one_does(
    name: str, told: str, tmp_path: Path
) -> None:
    _, pattern, modes, _ = CASES[name]
    (tmp_path / "plain.py").write_text(script(name))
    env = {**environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SCRIPTS}:{ROOT}"}
    plain = subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=True, env=env,
    )  # fmt: skip
    last = float(re.findall(pattern, plain.stdout)[-1])
    for mode, worse in modes.items():
        before, *after = re.split(rf"^done: {name},{mode}", told, flags=re.M)
        assert len(after) == 3, "on each rank"
        found = float(re.findall(pattern, before)[-1])
        most = abs(worse)
        assert (last - found) * (1 if worse > 0 else -1) <= most, (mode, last, found)
