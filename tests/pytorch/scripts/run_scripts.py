"""Runs converted scripts one after the other in one world: ``run_scripts.py NAME,MODE,ARG...``.

Each runs in a folder of its own.
"""

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from diffs import script
from mpi4py import MPI

from tests.jobs.several import wait_for_all

WORLD = MPI.COMM_WORLD
HERE = Path(__file__).parent


def run(line: str) -> None:
    """Run a script."""
    name, mode, *words = line.split(",")
    source = script(name, converted=True)
    assert source.count('mode="sync"') + source.count('"mode": "sync"') == 1
    source = source.replace('mode="sync"', f'mode="{mode}"').replace(
        '"mode": "sync"', f'"mode": "{mode}"'
    )
    folder = Path(f"{name}-{mode}")
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{WORLD.rank}.py"
    path.write_text(source)
    sys.argv = [str(path), *words]
    os.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path.name, run_name="__main__")
    assert ended.value.code == 0, (line, ended.value.code)
    os.chdir("..")
    print(f"done: {line} on rank {WORLD.rank}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    for each in sys.argv[1:]:
        run(each)
        wait_for_all(WORLD)
