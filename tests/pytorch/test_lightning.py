"""`mpips.lightning`: a Trainer's fits on real ranks."""

from pathlib import Path

import pytest
from launch import ROOT, run

pytest.importorskip("torch")
pytest.importorskip("lightning")

PROGRAM = ROOT / "tests" / "pytorch" / "programs" / "lightning_fits.py"


@pytest.mark.launch
def test_a_trainer_fits_in_each_mode(tmp_path: Path) -> None:
    """Checkpoints, logs, validation and test as well; what cannot be is refused."""
    modes = "async", "sync", "ssp", "local_sgd"
    checks = "equal", "accuracy", "ends", "resumed", "continued", "refused", "precisions", "fabric"
    args = [str(PROGRAM), str(tmp_path), *modes, *checks]
    found = run(3, args, tmp_path, 600).check()
    assert found.output.count(": 12 checks") == 3
    assert "optimizer.step()` before" not in found.output
