"""Options of all tests, and which of them this process runs.

Without ``--with-mpi`` the multi-rank tests, files in ``mpi/`` with that marker, are left to
``test_worlds.py``, which runs them by mpirun. With it, this process is a rank of such a run and
runs them alone, as `worlds` says. A run of all tests, the long ones left out, has several
processes, each of which takes one file after another.
"""

import gc
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pytest_mpi import MPIPlugin

if TYPE_CHECKING:
    from slurm_cluster import SlurmCluster

HERE = Path(__file__).parent
MULTI_RANK = HERE / "mpi"
LONGEST = [  # the longest first
    HERE / f"{name}.py"
    for name in (
        *("config/test_jobs", "chaos/test_chaos", "test_worlds", "config/test_job_scripts"),
        *("session/test_stops", "checkpoint/test_damage", "session/test_formats"),
        *("library/test_library", "session/test_bad_input", "replay/test_replay"),
        *("matrix/test_counts", "pytorch/test_torch", "pytorch/test_scripts", "test_guide"),
    )
]
PROCESSES = 4  # at most: each may run a job of 8 ranks, and no file can be shared out
# Where it is set, and packages were not compiled as they were installed, each rank of each job
# compiles all that it imports: 1.7 s of processor in place of 0.6.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False  # here too: else each run rewrites all asserts of all tests
os.environ.pop("PYTEST_ADDOPTS", None)  # meant for this run, not for those that tests start
# Jobs of several processes share the cores, which no job knows: a rank that waits within MPI gives
# its core away also where its job has one for each. A world of 2 takes half the processor.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected, a quarter of that time, nor later in them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("worlds", "multi-rank tests")
    group.addoption("--node-size", default="0", help="ranks of a node, e.g. 0,1,2; 0: real nodes")
    group.addoption("--need-slurm", action="store_true", help="fail where SLURM cannot be started")
    group.addoption("--need-browser", action="store_true", help="fail where there is no chromium")
    group.addoption("--ran", type=Path, help="file to add a line to for each test: ran or skipped")


class Outcomes:
    """Notes which tests ran and were skipped: one that all environments skip fails `.ci/run`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _note(self, what: str, name: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{what} {name}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note("skipped", report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._note("skipped", report.nodeid)
        elif report.when == "call":
            self._note("ran", report.nodeid)
            self._note("ran", report.nodeid.partition("::")[0])


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Note outcomes in the process that collects them; leave the printing to rank 0."""
    ran = config.getoption("--ran")
    if ran and not config.getoption("--with-mpi") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(ran))
    paths = [Path(arg.partition("::")[0]).absolute() for arg in config.args]
    named = [path for path in paths if path.is_relative_to(MULTI_RANK)]
    if named and not config.getoption("--with-mpi"):
        raise pytest.UsageError(
            f"tests/mpi takes several ranks, expected --with-mpi; use mpirun -n 2 python -m pytest "
            f"--with-mpi --node-size=0,1 {named[0].relative_to(HERE.parent)}, or python -m pytest "
            '"tests/test_worlds.py::test_world[2]"'
        )
    if config.getoption("--with-mpi"):
        config.pluginmanager.import_plugin("worlds")
        from mpips.mpi.start import MPI  # starts MPI as a job does

        if MPI.COMM_WORLD.rank:
            config.pluginmanager.unregister(name="terminalreporter")
        return
    for plugin in config.pluginmanager.get_plugins():
        if isinstance(plugin, MPIPlugin):  # it takes the folder's name for its marker, and skips it
            config.pluginmanager.unregister(plugin)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.is_dir():
        return None
    inside = collection_path.is_relative_to(MULTI_RANK) and collection_path.suffix == ".py"
    multi_rank = inside and "pytest.mark.mpi" in collection_path.read_text()
    return True if multi_rank != config.getoption("--with-mpi") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes run the tests: 0, this one alone, unless all quick ones are run."""
    every = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if not every or config.getoption("--with-mpi") or config.option.markexpr != "not long":
        return 0
    return min(len(os.sched_getaffinity(0)) + 1, PROCESSES)  # one more, as each often waits


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what wants a GPU where there is none; put what takes longest first."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not import_module("torch").cuda.is_available():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]
    starts_jobs = {item.path for item in items if item.get_closest_marker("launch")}
    rank = {path: k for k, path in enumerate(LONGEST)}
    items.sort(key=lambda i: (rank.get(i.path, len(rank)), i.path not in starts_jobs))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give what `runs` knows of shared worlds to the process that prints."""
    from runs import SECONDS

    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds"] = SECONDS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take it from a process that has ended."""
    from runs import SECONDS

    SECONDS.extend(map(tuple, getattr(node, "workeroutput", {}).get("seconds", [])))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say of a failure in a shared world which commands run again what the test has looked at."""
    from runs import AGAIN

    report = yield
    if report.failed and AGAIN:
        report.sections.append(("to run it again", "\n".join(dict.fromkeys(AGAIN))))
    if report.when == "teardown":
        AGAIN.clear()
    return report


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


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> str:
    """Where the browser is, Debian's chromium."""
    found = shutil.which("chromium")
    if found is None:
        give_up = pytest.fail if request.config.getoption("--need-browser") else pytest.skip
        give_up("no chromium: apt-get install chromium")
    return found


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file that holds the jobs of a test: while it is there they hardly get on."""
    path = tmp_path / "hold"
    path.touch()
    return path
