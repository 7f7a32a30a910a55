"""Every job in jobs/ runs as it is, and reaches what its comment says."""

from collections.abc import Collection
from pathlib import Path

import pytest
from launch import ROOT
from runs import Plan, final, summary

pytestmark = pytest.mark.launch

EXPECTED = {  # ranks, least held-out accuracy in as many epochs as are run
    "digits.toml": (8, 0.96),
    "digits-sync.toml": (8, 0.90),
    "digits-accumulate.toml": (4, 0.90),
    "digits-backup.toml": (8, 0.90),
    "digits-ssp.toml": (8, 0.90),
    "digits-easgd.toml": (8, 0.90),
    "digits-local-sgd.toml": (4, 0.90),
    "digits-diloco.toml": (4, 0.90),
    "digits-streaming.toml": (4, 0.90),
    "digits-packed.toml": (8, 0.90),
    "digits-powersgd.toml": (8, 0.90),
    "digits-onebit.toml": (8, 0.90),
    "digits-topk.toml": (8, 0.90),
    "digits-serial.toml": (1, 0.90),
    "digits-stale.toml": (8, 0.90),
    "factorization-machine.toml": (4, 0.77),
    "hdf5.toml": (4, 0.90),
    "logistic-sparse.toml": (4, 0.60),
    "slow-link.toml": (2, 0.96),
    "softmax-libsvm.toml": (4, 0.90),
    "spirals.toml": (8, 0.65),
    "spirals-backup.toml": (8, 0.65),
    "spirals-easgd.toml": (8, 0.65),
    "spirals-local-sgd.toml": (8, 0.65),
    "spirals-onebit.toml": (8, 0.65),
    "spirals-packed.toml": (8, 0.65),
    "spirals-powersgd.toml": (8, 0.65),
    "spirals-serial.toml": (1, 0.65),
    "spirals-ssp.toml": (8, 0.65),
    "spirals-sync.toml": (8, 0.65),
    "spirals-topk.toml": (8, 0.65),
    "wide-deep.toml": (4, 0.77),
    "wide-deep-hybrid.toml": (4, 0.77),
}
QUICK = ("digits.toml", "hdf5.toml")
# Epochs of digits' 40 and spirals' 60, of which the schedule makes as much: not all that they reach
# in the end, which `python -m benchmarks convergence` compares with several seeds. How stale the
# spirals' gradients are depends on how busy the machine is (0.77 was seen of onebit at a load of
# 20); by chance it is 0.25. Those whose codecs keep what they leave out learn late.
FEW, LATE = "12", "20"
LEARN_LATE = ("spirals-onebit.toml", "spirals-packed.toml", "spirals-topk.toml")
PARTS = [
    pytest.param(0, marks=[pytest.mark.long, pytest.mark.one_mpi]),
    pytest.param(1, marks=[pytest.mark.long, pytest.mark.other_mpi]),
]


def test_no_job_is_left_out() -> None:
    assert {path.name for path in (ROOT / "jobs").glob("*.toml")} == set(EXPECTED)


def assert_reached(plan: Plan, names: Collection[str]) -> None:
    for name in names:
        final(plan.out(name))
    found = {name: summary(plan.out(name))["accuracy"] for name in names}
    assert not {name: a for name, a in found.items() if a < EXPECTED[name][1]}


@pytest.mark.one_mpi
def test_quick_jobs(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    for name in QUICK:
        plan.add(name, EXPECTED[name][0], [f"jobs/{name}"])
    plan.run(200, ROOT)
    assert_reached(plan, QUICK)


@pytest.mark.parametrize("part", PARTS)
def test_jobs(part: int, tmp_path: Path) -> None:
    """Those that take longest, shared out among the MPIs."""
    plan, names = Plan(tmp_path), sorted(EXPECTED.keys() - QUICK)[part::2]
    for name in names:
        few = ["--epochs", LATE if name in LEARN_LATE else FEW]
        words = few if name.startswith(("spirals", "digits")) else []
        plan.add(name, EXPECTED[name][0], [f"jobs/{name}", *words])
    plan.run(600, ROOT)
    assert_reached(plan, names)
