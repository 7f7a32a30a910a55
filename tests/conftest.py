"""Options of all tests, and which of them this process runs.

Without ``--with-mpi`` the multi-rank tests in ``mpi/`` are left to ``test_worlds.py``, which runs
them by mpirun. With it, this process is a rank of such a run and runs them alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from slurm_cluster import SlurmCluster

MULTI_RANK = Path(__file__).parent / "mpi"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("worlds", "multi-rank tests")
    group.addoption("--node-size", default="0", help="ranks of a node, e.g. 0,1,2; 0: real nodes")
    group.addoption("--need-slurm", action="store_true", help="fail where SLURM cannot be started")
    group.addoption("--ran", type=Path, help="file to which the names of tests that ran are added")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Leave the printing to rank 0."""
    if config.getoption("--with-mpi"):
        from mpips.cluster.start import MPI  # starts MPI as a job does

        if MPI.COMM_WORLD.rank:
            config.pluginmanager.unregister(name="terminalreporter")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    multi_rank = collection_path.is_relative_to(MULTI_RANK)
    if config.getoption("--with-mpi"):
        return True if collection_path.is_file() and not multi_rank else None
    return True if multi_rank else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say with ``--durations=N`` also what took longest of that which shares a world."""
    from runs import SECONDS

    count = terminalreporter.config.option.durations
    if SECONDS and count is not None:
        terminalreporter.section("slowest in shared worlds")
        for seconds, name in sorted(SECONDS, reverse=True)[: count or None]:
            terminalreporter.write_line(f"{seconds:.2f}s {name}")


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> "Iterator[SlurmCluster]":
    """A SLURM of three nodes, for all tests."""
    from slurm_cluster import SlurmCluster, missing

    why = missing()
    if why and request.config.getoption("--need-slurm"):
        pytest.fail(why)
    if why:
        pytest.skip(why)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file that holds the jobs of a test: while it is there they hardly get on."""
    path = tmp_path / "hold"
    path.touch()
    return path
