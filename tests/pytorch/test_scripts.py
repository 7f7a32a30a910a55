"""Scripts as people have them, plain and converted: what was changed, and what they learn."""

import re
from pathlib import Path

import pytest
from launch import ROOT, python, run

from tests.pytorch.scripts.diffs import script

torch = pytest.importorskip("torch")

SCRIPTS = ROOT / "tests" / "pytorch" / "scripts"
# Of each: lines of the converted script that are new or changed, at most; its measure, and by how
# much that may be worse; arguments of the converted script.
CASES: dict[str, tuple[int, str, float, tuple[str, ...]]] = {
    "mnist": (12, r"Accuracy: (\d+)/359", 15, ("--batch-size=21",)),
    "nanogpt": (15, r"at the end: val loss ([\d.]+)", -0.15, ()),
}


@pytest.mark.parametrize("name", CASES)
def test_few_lines_are_changed(name: str) -> None:
    lines = (SCRIPTS / f"{name}.diff").read_text().splitlines()
    changed = [line for line in lines if line.startswith("+") and line[1:].strip()]
    assert len(changed) <= CASES[name][0], "\n".join(changed)


@pytest.mark.launch
@pytest.mark.one_mpi
@pytest.mark.parametrize("name", CASES)
def test_a_converted_script_learns_what_the_plain_one_does(name: str, tmp_path: Path) -> None:
    _, pattern, worse, words = CASES[name]
    alone, ours = tmp_path / "alone.py", tmp_path / "ours" / "ours.py"
    ours.parent.mkdir()
    alone.write_text(script(name))
    ours.write_text(script(name, converted=True))
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SCRIPTS}:{ROOT}"}
    plain = python(str(alone), cwd=tmp_path, **env).stdout
    converted = run(3, [str(ours), *words], ours.parent, 400, env).check().output
    last, found = (float(re.findall(pattern, output)[-1]) for output in (plain, converted))
    assert (last - found) * (1 if worse > 0 else -1) <= abs(worse), (last, found)
