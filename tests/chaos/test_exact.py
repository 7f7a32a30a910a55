"""What must hold of a run: it does where nothing was done to it, and what is wrong is found."""

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from runs import Plan, names_asked, thinned

from mpips.checkpoint import list_checkpoints
from tests.chaos.builtin import MODES, PROGRAM, SHRUNK, options
from tests.chaos.counting import held_by
from tests.chaos.exact import check_counts, check_run
from tests.chaos.plan import draw

pytestmark = pytest.mark.launch

RANKS = 4
LOST = "test_an_update_that_is_lost_on_a_shard_is_found"
QUICK = ("async", "backup", "sync-topk")
NAMES = [name for name in MODES if not name.startswith(PROGRAM) and name not in SHRUNK]
# A program is counted as a job is, and rounds without a worker that died as those of `sync`.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """Runs of built-in jobs, to which nothing is done: of two epochs."""
    plan = Plan(tmp_path_factory.mktemp("runs"))
    asked = names_asked(request)
    asked |= {"backup"} if LOST in asked else set()
    for name in sorted(asked.intersection(NAMES)):
        words = options(name, RANKS, draw(0, ["kill:worker"]), 20.0)
        plan.add(name, RANKS, [*words, "--epochs", "2", "--checkpoint-every", "20steps"])
        if name == "easgd":  # whose replicas are compared: each worker is to have one
            held_by(plan.out(name)).touch()
    plan.run(240)
    return plan


@pytest.fixture
def damaged(runs: Plan, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a run, which is right as it is."""

    def copy(name: str) -> Path:
        assert [*check_run(runs.out(name)), *check_counts(runs.out(name))] == []
        return Path(shutil.copytree(runs.out(name), tmp_path / name))

    return copy


def newest(out: Path) -> Path:
    return list_checkpoints(out)[-1]


def change(path: Path, name: str, at: int, by: float) -> None:
    """Change an element of a shard's parameters."""
    with h5py.File(path / "shard-0000.h5", "r+", locking=False) as file:
        file[name][at] += by


@pytest.mark.parametrize("name", thinned(sorted({*NAMES} - {"backup"}), {*QUICK} - {"backup"}, ()))
def test_a_batch_that_is_counted_twice_is_found(name: str, damaged: Callable[[str], Path]) -> None:
    out = damaged(name)
    change(newest(out), "params", 3, 1)
    (wrong,) = check_counts(out)
    assert "count of sample 3 is " in wrong
    assert wrong.endswith("differ)")
    assert any("shard-0000.h5" in text for text in check_run(out)), "its sum is another"


@pytest.mark.one_mpi
def test_an_update_that_is_lost_on_a_shard_is_found(damaged: Callable[[str], Path]) -> None:
    out = damaged("backup")
    change(newest(out), "params", -1, -1)
    (wrong,) = check_counts(out)
    assert "updates of element" in wrong
