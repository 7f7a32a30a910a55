"""Runs programs of a folder in one world, to save its start: ``programs.py FOLDER OUT LINE...``.

A line is ``NAME,ARG...``. Each leaves its runs in a folder of its own, which is named as the line
is, and begins when all ranks have ended the one before. ``== LINE on rank K`` is printed then.
"""

import importlib
import sys
from pathlib import Path

from mpi4py import MPI

from mpips.mpi import abort
from tests.jobs.several import wait_for_all


def main(out: Path, lines: list[str]) -> None:
    for line in lines:
        name, *args = line.split(",")
        program = importlib.import_module(name)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        program.main(out / line, *args)
        print(f"== {line} on rank {MPI.COMM_WORLD.rank}", flush=True)
        wait_for_all(MPI.COMM_WORLD)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    try:
        main(Path(sys.argv[2]), sys.argv[3:])
    except BaseException as error:  # the other ranks would wait for this one
        abort.abort(abort.raised(error), 1)
