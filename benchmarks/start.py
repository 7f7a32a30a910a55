"""Starting ranks and training one step, beside ranks that only import MPI, NumPy, h5py and numba.

Wall time and CPU time of a rank in the second start, when compiled loops are in the user's cache
folder. Then the same with a read-only installation of the package.
"""

import compileall
import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.turns import take_turns
from mpips.launch.mpirun import TREE
from mpips.tools.bench import jobs
from mpips.tools.bench.jobs import TRAIN, temporary_folder
from mpips.tools.bench.measure import Options, Row, compare

RANKS, QUICK_RANKS = (1, 2, 4, 8), (2,)
ALLOWED = 2.0  # largest ratio to the time of the imports
IMPORTS = ("-c", "import mpi4py.MPI, numpy, h5py, numba")
ONE_STEP = (*TRAIN, "--mode", "sync", "--steps", "1")
IGNORED = shutil.ignore_patterns("*.pyc")

Spent = tuple[float, float]


class Installation:
    """The installation that jobs use: this tree, or a read-only copy.

    Args:
        folder: An empty folder.
        read_only: Whether to make the copy. Permissions restrict root only if it gives up the
            capability to override them.
    """

    def __init__(self, folder: Path, read_only: bool) -> None:
        self._home, self._tree = folder / "home", folder / "tree"
        self._env = {"PYTHONDONTWRITEBYTECODE": ""}  # a second run finds compiled modules
        self._wrapper: tuple[str, ...] = ()
        self._runs = 0
        self._home.mkdir()
        if read_only:
            self._copy()

    def _copy(self) -> None:
        shutil.copytree(TREE / "mpips", self._tree / "mpips", ignore=IGNORED)
        compileall.compile_dir(self._tree, quiet=1)  # as an installation does
        for path in [self._tree, *self._tree.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        home = str(self._home)
        self._env |= {"PYTHONPATH": str(self._tree), "HOME": home, "XDG_CACHE_HOME": home}
        if os.geteuid() == 0:
            self._wrapper = ("setpriv", "--bounding-set", "-dac_override")

    def train(self, ranks: int) -> Spent:
        """Train one step; returns the wall time, and the CPU time of a rank, in seconds.

        Raises:
            Failed: If the job fails.
        """
        self._runs += 1
        return self._run(ranks, [*ONE_STEP, "--out", f"run-{self._runs}"])

    def load(self, ranks: int) -> Spent:
        """Import the packages; returns the wall time, and the CPU time of a rank, in seconds.

        Raises:
            Failed: If the job fails.
        """
        return self._run(ranks, IMPORTS)

    def _run(self, ranks: int, args: Sequence[str]) -> Spent:
        before = _children_s()
        wall, _ = jobs.run(ranks, args, self._home, self._env, self._wrapper)
        return wall, (_children_s() - before) / ranks


def _children_s() -> float:
    """Return the CPU time of all jobs so far, which includes their ranks."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(options: Options) -> list[Row]:
    """Compare for each number of ranks, and for the largest with a read-only package.

    Raises:
        Failed: If a job fails.
    """
    worlds = QUICK_RANKS if options.quick else RANKS
    places = [(False, worlds), (True, worlds[-1:])]
    return [row for place in places for row in _in_place(options, *place)]


def _in_place(options: Options, read_only: bool, worlds: Sequence[int]) -> list[Row]:
    rows = []
    with temporary_folder() as folder:
        installation = Installation(folder, read_only)
        installation.train(1)  # compiles
        for ranks in worlds:
            sides = {
                "train": lambda n=ranks: installation.train(n),
                "load": lambda n=ranks: installation.load(n),
            }
            found = take_turns(sides, options.repeats)
            case = f"{ranks} ranks, 1 step" + (", package read-only" if read_only else "")
            for k, what in enumerate(("", ", processor time of a rank")):
                mine, other = ([spent[k] for spent in found[name]] for name in ("train", "load"))
                allowed = [ALLOWED * seconds for seconds in other]
                figures = compare(mine, allowed)
                beside = f"{ALLOWED:g} x imports"
                rows.append(Row("start", case + what, figures[0], "s", beside, *figures[1:], 1.0))
    return rows
