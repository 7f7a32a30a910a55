"""The multi-rank tests in worlds of several sizes, each with nodes of several sizes."""

from pathlib import Path

import launch
import pytest

SIZES = (1, 2, 3, 4, 8)
NODE_SIZES = "0,1,2"  # in one run a world: starting the ranks takes most of the time
LIMIT_S = 240
TESTS = launch.ROOT / "tests" / "mpi"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one report for each world that was run."""
    return tmp_path_factory.mktemp("worlds")


@pytest.mark.parametrize("size", SIZES)
def test_world(size: int, reports: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    report = reports / str(size)
    report.touch()
    options = ["--with-mpi", f"--node-size={NODE_SIZES}", f"--ran={report}", "-q", "--tb=short"]
    options += ["-x", "-p", "no:cacheprovider", "-m", request.config.getoption("markexpr")]
    launch.run(size, ["-m", "pytest", *options, str(TESTS)], tmp_path, LIMIT_S).check()


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
