"""The multi-rank tests in worlds of several sizes, each with nodes of several sizes."""

import re
from pathlib import Path

import launch
import pytest
from runs import AGAIN, SECONDS

pytestmark = pytest.mark.launch

# The sizes of nodes in each world, all in one run of it: starting the ranks takes time. There are
# one node of 1, 2, 4 and 8 ranks, even nodes, uneven ones, and 2 to 4 nodes, of one rank or more.
# Open MPI runs all sizes, of which 4 in two nodes alone; MPICH those of 1, 2, and 4 in one node.
SIZES = (1, 2, 3, 4, 8)
ONE_MPI, OTHER_MPI = (
    [pytest.mark.long, mark] for mark in (pytest.mark.one_mpi, pytest.mark.other_mpi)
)
WORLDS = [
    pytest.param(1, "0", id="1"),
    pytest.param(2, "0,1", id="2"),
    pytest.param(3, "1,2", id="3", marks=OTHER_MPI),
    pytest.param(4, "2", id="4", marks=OTHER_MPI),
    pytest.param(4, "0", id="4 in one node", marks=ONE_MPI),
    pytest.param(8, "0,2", id="8", marks=OTHER_MPI),
]
LIMIT_S = 400
TESTS = launch.ROOT / "tests" / "mpi"
FAILED = re.compile(r"(?:FAILED|rank \d+:) \S*(tests/mpi/\S+::.+?)(?: - | is not |$)", re.M)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one report for each world that was run."""
    return tmp_path_factory.mktemp("worlds")


@pytest.mark.parametrize(("size", "node_sizes"), WORLDS)
def test_world(size: int, node_sizes: str, reports: Path, tmp_path: Path) -> None:
    report = reports / str(size)
    report.touch()
    options = ["--with-mpi", f"--node-size={node_sizes}", f"--ran={report}", "-q"]
    options += ["-x", "--tb=short", "-p", "no:cacheprovider", "--durations=0"]
    options += ["-p", "no:hypothesispytest"]  # unused here; every rank would load it
    done = launch.run(size, ["-m", "pytest", *options, str(TESTS)], tmp_path, LIMIT_S)
    if done.code and (failed := FAILED.findall(done.output)):
        command = f"mpirun -n {size} python -m pytest --with-mpi --node-size={node_sizes}"
        AGAIN.append(f"{command} '{failed[0]}'")
    done.check()
    for seconds, what in re.findall(r"^ *([\d.]+)s (\w+ +\S+::.*)", done.output, re.M):
        SECONDS.append((float(seconds), f"world of {size}: {what}"))


def test_every_multi_rank_test_ran_somewhere(reports: Path) -> None:
    """A test for which no world was large enough has not been run, and does not pass."""
    found = list(reports.iterdir())
    if len(found) < len(SIZES):
        pytest.skip("only some of the worlds were asked for")
    lines = {line for report in found for line in report.read_text().splitlines()}
    names = {
        kind: {line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ")}
        for kind in ("collected", "ran")
    }
    assert names["collected"], "no multi-rank test was found"
    never = sorted(names["collected"] - names["ran"])
    assert not never, f"no world ran {', '.join(never)}"
