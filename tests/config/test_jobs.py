"""Every job in jobs/ runs as it is, and reaches what its comment says."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT
from runs import Plan, final, summary

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
QUICK = (
    "digits.toml", "digits-accumulate.toml", "digits-serial.toml", "digits-ssp.toml",
    "hdf5.toml", "softmax-libsvm.toml",
)  # fmt: skip
STEPS = 5  # of the others, where they do not run to their end


def test_no_job_is_left_out() -> None:
    assert {path.name for path in (ROOT / "jobs").glob("*.toml")} == set(EXPECTED)


def assert_reached(plan: Plan, names: Collection[str]) -> None:
    for name in names:
        final(plan.out(name))
    found = {name: summary(plan.out(name))["accuracy"] for name in names}
    assert not {name: a for name, a in found.items() if a < EXPECTED[name][1]}


def test_quick_jobs(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    for name in QUICK:
        plan.add(name, EXPECTED[name][0], [f"jobs/{name}"])
    plan.run(200, ROOT)
    assert_reached(plan, QUICK)


@pytest.mark.long
def test_jobs_begin(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    for name in EXPECTED.keys() - QUICK:
        plan.add(name, EXPECTED[name][0], [f"jobs/{name}", "--steps", str(STEPS)])
    plan.run(200, ROOT)
    for name in EXPECTED.keys() - QUICK:
        assert summary(plan.out(name))["stop_reason"] == "steps"
        assert np.isfinite(final(plan.out(name)).read_params()).all()


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(0, marks=[pytest.mark.long, pytest.mark.one_mpi]),
        pytest.param(1, marks=[pytest.mark.long, pytest.mark.other_mpi]),
    ],
)
def test_jobs_to_their_end(part: int, tmp_path: Path) -> None:
    """Those that take longest; the MPIs share them out."""
    plan, names = Plan(tmp_path), sorted(EXPECTED.keys() - QUICK)[part::2]
    for name in names:
        plan.add(name, EXPECTED[name][0], [f"jobs/{name}"])
    plan.run(900, ROOT)
    assert_reached(plan, names)
