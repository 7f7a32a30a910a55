"""Every job in jobs/ runs as it is, and reaches what its comment says."""

import json
from pathlib import Path

import pytest
from launch import ROOT, train

pytestmark = pytest.mark.launch

EXPECTED = {  # ranks, least held-out accuracy
    "digits.toml": (8, 0.96),
    "digits-sync.toml": (8, 0.95),
    "digits-accumulate.toml": (4, 0.94),
    "digits-backup.toml": (8, 0.95),
    "digits-ssp.toml": (8, 0.96),
    "digits-easgd.toml": (8, 0.94),
    "digits-local-sgd.toml": (4, 0.94),
    "digits-packed.toml": (8, 0.96),
    "digits-powersgd.toml": (8, 0.96),
    "digits-onebit.toml": (8, 0.95),
    "digits-topk.toml": (8, 0.95),
    "digits-serial.toml": (1, 0.96),
    "digits-stale.toml": (8, 0.95),
    "hdf5.toml": (4, 0.90),
    "slow-link.toml": (2, 0.96),
    "softmax-libsvm.toml": (4, 0.90),
    "spirals.toml": (8, 0.98),
    "spirals-backup.toml": (8, 0.98),
    "spirals-easgd.toml": (8, 0.98),
    "spirals-local-sgd.toml": (8, 0.98),
    "spirals-onebit.toml": (8, 0.97),
    "spirals-packed.toml": (8, 0.98),
    "spirals-powersgd.toml": (8, 0.98),
    "spirals-serial.toml": (1, 0.98),
    "spirals-ssp.toml": (8, 0.98),
    "spirals-sync.toml": (8, 0.98),
    "spirals-topk.toml": (8, 0.97),
}


def test_no_job_is_left_out() -> None:
    assert {path.name for path in (ROOT / "jobs").glob("*.toml")} == set(EXPECTED)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name.startswith("spirals-") else name
        for name in EXPECTED
    ],
)
def test_job(name: str, tmp_path: Path) -> None:
    ranks, accuracy = EXPECTED[name]
    out = tmp_path / "run"
    done = train(ranks, f"jobs/{name}", "--out", str(out), cwd=ROOT, timeout_s=120).check()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["accuracy"] >= accuracy, done.output
    assert (out / "DONE").exists()
