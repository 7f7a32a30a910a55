"""Runs a job's script in modes, in one world: ``python scripts.py OUT MODES SCRIPT [OPTION ...]``.

Rank 0 prints what its ``main`` returns.
"""

import runpy
import sys
from pathlib import Path

from mpi4py import MPI


def main(out: Path, modes: list[str], script: str, options: list[str]) -> None:
    """Run it."""
    sys.path.insert(0, str(Path(script).parent))  # as Python does that runs it
    job = runpy.run_path(script)
    for mode in modes:
        found = job["main"](["--mode", mode, "--out", str(out / mode), *options])
        if MPI.COMM_WORLD.rank == 0:
            print(f"{mode} ended with {found:.4f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], sys.argv[4:])
