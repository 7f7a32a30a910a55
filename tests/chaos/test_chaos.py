"""Jobs that are disturbed: they end, exact, and nothing of them is left."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from launch import python

from mpips.errors import UserError
from mpips.launch import mpirun
from tests.chaos.builtin import INVARIANT, MODES, SHRUNK, parse_modes
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
SHARES = {
    331: (
        *("async-tables", "sync-topk", "program-local_sgd"),
        *("ssp", "easgd", "async-fp16", "async-topk", "sync-tables", "async-bf16", "async-int8"),
        *("async-aggregated-topk", "program-sync", "program-easgd", "ssp-nodes-tables"),
        *("ssp-nodes-spare", "hybrid-nodes-tables"),
    ),
    140: (
        *("async", "sync-nodes-tables", "ssp-spare"),
        *("backup", "local_sgd", "ssp-topk", "async-onebit", "sync", "async-servers"),
        *("async-spare-tables", "ssp-tables", "async-nodes", "ssp-nodes", "async-aggregated"),
        *("sync-powersgd", "program-async", "program-ssp", "program-backup", "async-nodes-tables"),
        *("hybrid-tables", "sync-shrink", "sync-shrink-nodes", "local_sgd-shrink"),
        *("local_sgd-shrink-nodes", "hybrid-shrink-tables", "hybrid-shrink-nodes-tables"),
    ),
}


def chaos(cwd: Path, *words: str, code: int = 0, timeout_s: float = 120) -> dict[str, Any]:
    """Run the command; returns what its file says. Nothing else is left in the folder."""
    command = ["-m", "tests.chaos", "--json", "found.json", "--folder", "runs", *words]
    done = python(*command, cwd=cwd, code=code, timeout_s=timeout_s)
    print(done.stdout)
    if code == 0:
        assert not (cwd / "runs").exists()
    found: dict[str, Any] = json.loads((cwd / "found.json").read_text())
    found["told"] = done.stdout
    return found


@pytest.mark.one_mpi
def test_a_job_is_counted_whatever_comes(tmp_path: Path) -> None:
    """An exception, a full disk and a kill, as they come by the seed."""
    words = ["--seed", "6", "--faults", "exception:worker,disk:full,kill:server", "-n", "3"]
    found = chaos(tmp_path, *words, "--timeout", "60", timeout_s=300)  # loops may be compiled first
    (run,) = found["runs"]
    assert run["verdict"] == "exact"
    assert run["attempts"] == 3
    assert {one["name"] for one in run["faults"]} == set(words[3].split(","))
    assert all(one["seconds"] > 0 for one in run["faults"])
    (full,) = (one for one in run["faults"] if one["name"] == "disk:full")
    assert full["hit"][0] == "3 ranks"
    assert full["hit"][1] != "0 checkpoints failed"
    assert found["told"].startswith("seed 6  async  ")


def test_each_mode_has_its_mpi() -> None:
    """On each MPI nearly all faults come, at every moment, also in the few runs of a long test."""
    assert sorted(mode for modes in SHARES.values() for mode in modes) == sorted(MODES)
    for seed, modes in SHARES.items():
        for count, kinds in ((3, 4), (len(modes), len(FAULTS) - 1)):
            faults = [fault for k in range(count) for fault in draw(seed + k, FAULTS, 2)]
            assert len({fault.name for fault in faults}) >= kinds
            assert len({fault.moment for fault in faults}) == 3


def test_jobs_that_go_on_take_an_mpi_that_does() -> None:
    """Where MPI ends all ranks, they are refused by name, and are not among all jobs."""
    if mpirun.survivors_launcher():
        assert parse_modes("sync,sync-shrink") == ["sync", "sync-shrink"]
        assert parse_modes("all") == [*MODES]
        return
    with pytest.raises(UserError, match="job 'sync-shrink' where this MPI ends all ranks"):
        parse_modes("sync,sync-shrink")
    assert parse_modes("all") == [name for name in MODES if name not in SHRUNK]


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
    found = chaos(tmp_path, *words, timeout_s=120 + 40 * RUNS)
    exact = len(set(modes) - set(INVARIANT))
    assert [run["verdict"] for run in found["runs"]].count("exact") == exact


@pytest.mark.long
@pytest.mark.other_mpi
@pytest.mark.skipif(bool(missing(links=True)), reason="no links")
def test_rounds_of_several_hosts_go_on(tmp_path: Path) -> None:
    """Without three workers, none of them the first of its host."""
    words = ["--hosts", "3", "-n", "9", "--modes", "sync-shrink-nodes", "--seed", "7002"]
    words += ["--timeout", "60", "--most", "3", "--faults", "kill:worker,kill:server"]
    (run,) = chaos(tmp_path, *words, timeout_s=200)["runs"]
    assert run["verdict"] == "exact"
    assert (len(run["faults"]), run["attempts"]) == (3, 1)
