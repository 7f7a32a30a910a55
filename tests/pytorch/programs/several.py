"""Runs programs of this folder in one world, to save its start: ``several.py FOLDER NAME,ARG...``.

Each leaves its runs in a folder of its own, and begins when all ranks have ended the one before.
"""

import importlib
import sys
from pathlib import Path

import torch
from mpi4py import MPI

from tests.jobs.several import wait_for_all


def main(folder: Path, lines: list[str]) -> None:
    """Run one after the other."""
    for line in lines:
        name, *args = line.split(",")
        importlib.import_module(name).main(folder / line, *args)
        wait_for_all(MPI.COMM_WORLD)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
