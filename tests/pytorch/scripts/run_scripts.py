"""Runs converted scripts one after the other in one world: ``run_scripts.py NAME,MODE,ARG...``.

Each runs in a folder of its own. An argument ``stop=K`` has rank 1 stop the run, by SIGUSR1, in its
K-th forward pass of training; ``count=FILE`` writes there which images it has trained on.
"""

import json
import os
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffs import script
from mpi4py import MPI

from tests.jobs.several import wait_for_all

WORLD = MPI.COMM_WORLD
HERE = Path(__file__).parent


class Watch:
    """Sees the images that a module trains on, and stops the run."""

    def __init__(self, stop: int) -> None:
        self.stop, self.passes = stop, 0
        self.seen = Counter[str]()

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Look at what goes into a module."""
        if type(module).__name__ == "Net" and module.training:
            self.passes += 1
            self.seen.update(image.numpy().tobytes().hex() for image in inputs[0])
            if self.passes == self.stop and WORLD.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)


def run(line: str) -> None:
    """Run a script."""
    name, mode, *words = line.split(",")
    given = dict(word.split("=") for word in words if not word.startswith("-"))
    source = script(name, converted=True)
    assert source.count('mode="sync"') + source.count('"mode": "sync"') == 1
    source = source.replace('mode="sync"', f'mode="{mode}"').replace(
        '"mode": "sync"', f'"mode": "{mode}"'
    )
    folder = Path(given.get("in", f"{name}-{mode}"))
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{WORLD.rank}.py"
    path.write_text(source)
    watch = Watch(int(given.get("stop", 0)))
    hook = torch.nn.modules.module.register_module_forward_pre_hook(watch)
    sys.argv = [str(path), *(word for word in words if word.startswith("-"))]
    os.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path.name, run_name="__main__")
    assert ended.value.code == (85 if "stop" in given else 0), (line, ended.value.code)
    os.chdir("..")
    hook.remove()
    if "count" in given:
        found = WORLD.gather(watch.seen)
        if found is not None:
            Path(given["count"]).write_text(json.dumps(sum(found, Counter[str]())))
    print(f"done: {line} on rank {WORLD.rank}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    for each in sys.argv[1:]:
        run(each)
        wait_for_all(WORLD)
