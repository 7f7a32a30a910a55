"""`mpips.lightning`: a Trainer's fits on real ranks."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import ROOT, run

# Looked for, not imported: its jobs alone import it, and each process of a run collects this file.
pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"could not import {name!r}")
    for name in ("torch", "lightning")
]


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_trainer_fits_in_each_mode(tmp_path: Path) -> None:
    """Checkpoints, logs, validation and test as well; what cannot be is refused."""
    script = [str(ROOT / "tests" / part) for part in ("jobs/programs.py", "pytorch/programs")]
    found = run(3, [*script, str(tmp_path), "lightning_fits"], tmp_path, 600).check()
    assert found.output.count("== lightning_fits on rank ") == 3
    assert "optimizer.step()` before" not in found.output
