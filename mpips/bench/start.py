"""Starting 8 ranks and training one step, beside 8 ranks that only import what mpips imports.

Wall time of the second start, when the compiled kernels are cached: as installed here, and with
a package that cannot be written, whose kernels are cached in the user's own folder.
"""

import compileall
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from mpips.bench import jobs
from mpips.bench.jobs import TRAIN, take_turns, temporary_folder
from mpips.bench.measure import Options, Row, compare
from mpips.launch import TREE

RANKS, QUICK_RANKS = 8, 2
ALLOWED_S = 2.0
IMPORTS = ("-c", "import mpi4py.MPI, numpy, h5py, numba")
IGNORED = shutil.ignore_patterns("*.nbi", "*.nbc", "*.pyc")


class Place:
    """Where jobs are started: in this tree, or in a copy that cannot be written.

    Args:
        folder: An empty folder.
        read_only: Whether to make the copy. Permissions hold root back only where it gives up
            the right to override them.
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

    def train(self, ranks: int) -> float:
        """Train one step; returns the seconds that it took.

        Raises:
            Failed: If the job fails.
        """
        self._runs += 1
        options = ("--steps", "1", "--out", f"run-{self._runs}")
        return self._run(ranks, [*TRAIN, *options])

    def load(self, ranks: int) -> float:
        """Import the packages; returns the seconds that it took.

        Raises:
            Failed: If the job fails.
        """
        return self._run(ranks, IMPORTS)

    def _run(self, ranks: int, args: Sequence[str]) -> float:
        spent, _ = jobs.run(ranks, args, self._home, self._env, self._wrapper)
        if any(self._tree.rglob("*.nbi")):
            raise jobs.Failed("a read-only package was written to")
        return spent


def run(options: Options) -> list[Row]:
    """Compare in both places.

    Raises:
        Failed: If a job fails.
    """
    return [_in_place(options, read_only) for read_only in (False, True)]


def _in_place(options: Options, read_only: bool) -> Row:
    ranks = QUICK_RANKS if options.quick else RANKS
    with temporary_folder() as folder:
        place = Place(folder, read_only)
        place.train(ranks)  # compiles
        sides = {"train": lambda: place.train(ranks), "load": lambda: place.load(ranks)}
        found = take_turns(sides, options.repeats)
    allowed = [seconds + ALLOWED_S for seconds in found["load"]]
    mine, other, ratio = compare(found["train"], allowed)
    case = f"{ranks} ranks, 1 step" + (", package read-only" if read_only else "")
    return Row("start", case, mine, "s", f"imports + {ALLOWED_S:g} s", other, ratio, 1.0)
