"""Steps of a PyTorch model on a GPU, beside its passes alone, its copies and its memory.

First the tests that need a GPU run. Then one rank, and two ranks with one GPU or two, train a model
in mode sync. Before each step, parameters are copied from the replica to the GPU, and after it,
gradients are copied back. So a step takes longer than its passes. The difference is compared with
the time of such copies alone, from and to pinned memory.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator

from mpips.errors import UserError
from mpips.tools.bench.jobs import Failed, temporary_folder
from mpips.tools.bench.jobs import run as run_job
from mpips.tools.bench.measure import Options, Row

SIZE, QUICK_SIZE = 100_000_000, 100_000  # number of parameters
TURNS, QUICK_TURNS = 3, 1  # turns of each repeat
RANKS = (1, 2)
TESTS = ("-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/pytorch")


def run(options: Options) -> Iterator[Row]:
    """Run the tests that need a GPU, and compare.

    Raises:
        UserError: If PyTorch finds no GPU.
        Failed: If a test or a job fails.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError("no PyTorch", "torch >= 2.4", "pip install 'mpips[torch]'")
    import torch

    if not torch.cuda.is_available():
        raise UserError("no GPU that PyTorch finds", "a CUDA device", "run it on a node with one")
    done = subprocess.run([sys.executable, *TESTS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"tests that need a GPU:\n{done.stdout[-2000:]}")
    yield from rows("cuda", options)


def rows(device: str, options: Options) -> Iterator[Row]:
    """Yield the rows of a device, such as ``cuda``."""
    size = QUICK_SIZE if options.quick else SIZE
    turns = QUICK_TURNS if options.quick else TURNS * options.repeats
    for ranks in RANKS:
        given = json.dumps({"device": device, "size": size, "turns": turns})
        with temporary_folder() as folder:
            run_job(ranks, ("-m", "benchmarks.torch_program", "device", given), folder)
            found = [json.loads(path.read_text()) for path in folder.glob("worker-*.json")]
        step, passes, copies = (
            1e3 * max(statistics.median(turn[k] for turn in one["turns"]) for one in found)
            for k in range(3)
        )
        case = f"{found[0]['size'] / 1e6:,.1f} M parameters, sync, {ranks} rank{'s' * (ranks > 1)}"
        alone, extra = "its passes alone", max(step - passes, 1e-3)
        yield Row("gpu", f"{case}, a step", step, "ms", alone, passes, passes / step)
        yield Row("gpu", f"{case}, around the passes", extra, "ms", "its copies alone", copies,
                  copies / extra)  # fmt: skip
        used = sum(one["memory_mb"] for one in found)
        least = (2 + ranks) * found[0]["size"] * 4 / 1e6  # parameters, momentum, gradients
        yield Row("gpu", f"{case}, memory of the host", used, "MB", "one replica, momentum, "
                  "a gradient a rank", least, least / used)  # fmt: skip
