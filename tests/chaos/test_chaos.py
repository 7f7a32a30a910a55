"""Jobs that are disturbed: they end, exact, and nothing of them is left."""

import os
import re
import shutil
from pathlib import Path

import h5py
import pytest
from launch import python
from runs import Plan, names_asked, thinned

from mpips.checkpoint import list_checkpoints
from tests.chaos.builtin import INVARIANT, MODES, PROGRAM, SHRUNK, options
from tests.chaos.counting import held_by
from tests.chaos.exact import check_counts, check_run
from tests.chaos.hosts import missing
from tests.chaos.plan import draw

pytestmark = pytest.mark.launch

FAULTS = (
    *("kill:worker", "kill:server", "kill:job", "kill:all", "stop:worker", "stop:server"),
    *("exception:worker", "disk:full"),
)
RUNS = int(os.environ.get("MPIPS_CHAOS_RUNS", "3"))  # of each MPI; from 20 on every mode is run
# By the seed of the first, which is followed by the next ones'. Open MPI's, which goes on without
# a worker that died, has mode async with one that is killed as it trains.
FIRST = {
    331: ("async-tables", "sync-topk", "program-local_sgd"),
    140: ("async", "sync-nodes-tables", "ssp-spare"),
}
OTHERS = [mode for mode in MODES if mode not in (*SHRUNK, *FIRST[331], *FIRST[140])]
SHARES = {331: (*FIRST[331], *OTHERS[::2]), 140: (*FIRST[140], *OTHERS[1::2], *SHRUNK)}


def chaos(cwd: Path, *words: str, timeout_s: float = 120) -> list[str]:
    """Run the command; returns its line of each run. Nothing else is left of them."""
    told = python("-m", "tests.chaos", "--folder", "runs", *words, cwd=cwd, timeout_s=timeout_s)
    print(told.stdout)
    assert not (cwd / "runs").exists()
    return re.findall("^seed .*", told.stdout, re.M)


@pytest.mark.one_mpi
def test_a_job_is_counted_whatever_comes(tmp_path: Path) -> None:
    """An exception, a full disk and a kill, as they come by the seed."""
    faults = ("exception:worker", "disk:full", "kill:server")
    words = ["--seed", "6", "--faults", ",".join(faults), "-n", "3", "--timeout", "60"]
    (line,) = chaos(tmp_path, *words, timeout_s=300)  # loops may be compiled first
    assert re.search("^seed 6  async  .*  3 attempts, .* s  exact$", line)
    for fault in faults:  # with what it hit, and how long it was to some progress
        assert re.search(rf"{fault}@\S+ \(\w.*?\) \d+\.\d s", line)
    assert re.search(r"disk:full@\S+ \(3 ranks, [1-9]\d* checkpoints failed\)", line)


@pytest.mark.long
@pytest.mark.parametrize(
    "seed",
    [pytest.param(331, marks=pytest.mark.one_mpi), pytest.param(140, marks=pytest.mark.other_mpi)],
)
def test_modes_are_right_whatever_comes(seed: int, tmp_path: Path) -> None:
    """Ranks are stopped and killed in any way, at any moment."""
    modes = SHARES[seed][:RUNS]
    words = ["--seed", f"{seed}", "--runs", f"{len(modes)}", "--modes", ",".join(modes)]
    words += ["--most", "2", "--faults", ",".join(FAULTS)]
    lines = chaos(tmp_path, *words, timeout_s=120 + 40 * RUNS)
    expected = ["balanced" if mode in INVARIANT else "exact" for mode in modes]
    assert [line.rpartition("  ")[2] for line in lines] == expected


@pytest.mark.long
@pytest.mark.other_mpi
@pytest.mark.skipif(bool(missing(links=True)), reason="no links")
def test_rounds_of_several_hosts_go_on(tmp_path: Path) -> None:
    """Without three workers, none of them the first of its host."""
    words = ["--hosts", "3", "-n", "9", "--modes", "sync-shrink-nodes", "--seed", "7002"]
    words += ["--timeout", "60", "--most", "3", "--faults", "kill:worker,kill:server"]
    (line,) = chaos(tmp_path, *words, timeout_s=200)
    assert line.count("kill:") == 3
    assert re.search("  1 attempt, .*  exact$", line)


# What is wrong with a run is found ---------------------------------------------------------------

RANKS = 4
QUICK = ("async", "backup", "sync-topk")
# A program is counted as a job is, and rounds without a worker that died as those of `sync`.
NAMES = sorted(name for name in MODES if not name.startswith(PROGRAM) and name not in SHRUNK)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """Runs of built-in jobs, to which nothing is done: of two epochs."""
    plan = Plan(tmp_path_factory.mktemp("runs"))
    for name in filter(names_asked(request).__contains__, NAMES):
        words = options(name, RANKS, draw(0, ["kill:worker"]), 20.0)
        plan.add(name, RANKS, [*words, "--epochs", "2", "--checkpoint-every", "20steps"])
        if name == "easgd":  # whose replicas are compared: each worker is to have one
            held_by(plan.out(name)).touch()
    plan.run(240)
    return plan


@pytest.mark.parametrize("name", thinned(NAMES, QUICK, ()))
def test_what_is_wrong_with_a_run_is_found(name: str, runs: Plan, tmp_path: Path) -> None:
    """A sample that counts twice; where none need count alike, an update that a shard has not."""
    assert [*check_run(runs.out(name)), *check_counts(runs.out(name))] == []
    out = Path(shutil.copytree(runs.out(name), tmp_path / name))
    at, by, what = (-1, -1, "updates of ") if name == "backup" else (3, 1, "count of sample 3 is ")
    with h5py.File(list_checkpoints(out)[-1] / "shard-0000.h5", "r+", locking=False) as file:
        file["params"][at] += by
    (wrong,) = check_counts(out)
    assert what in wrong
    assert wrong.endswith("differ)")
    assert any("shard-0000.h5" in text for text in check_run(out)), "its sum is another"
