"""Steps of PyTorch models through ``mpips.torch``, beside the models' own forward and backward.

Two ranks with one thread each, in mode sync, train an MLP with several batch sizes and a
convolutional net. A step lasts from one batch to the next: it includes the loader, forward,
backward, the copies of gradients, and the round with its wait. It is compared, in turn, with
forward and backward of a second module outside of the run on the same batches, and with steps of
plain PyTorch, which each process makes alone with this module. In a step, a rank waits for the
slowest rank. So the step is also compared with the longest passes of both ranks in this step.

With peers, rates are compared with theirs, and so is the memory of four ranks.
"""

import importlib.util
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.turns import steady_rate
from mpips.checkpoint.run_folder import METRICS, SUMMARY
from mpips.errors import UserError
from mpips.tools.bench.jobs import run as run_job
from mpips.tools.bench.jobs import temporary_folder
from mpips.tools.bench.measure import Options, Row

PROGRAM = ("-m", "benchmarks.torch_program")
NAMES = {"mlp": "MLP {}", "conv": "convolutional net"}
# Nets with their batch size, and the smallest share of a step that its passes should take.
NETS = {"mlp 64": 0.75, "mlp 128": 0.85, "mlp 256": 0.9, "conv 64": 0.95, "conv 128": 0.95}
QUICK_NETS = ("mlp 64",)
TURNS, QUICK_TURNS = 4, 1  # turns of each repeat
HIDDEN, QUICK_HIDDEN = 1024, 256
EPOCHS, QUICK_EPOCHS = 4, 2


def run(options: Options) -> list[Row]:
    """Compare steps of nets with their passes alone.

    Raises:
        UserError: If there is no PyTorch.
        Failed: If the job fails.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError("no PyTorch", "torch >= 2.4", "pip install 'mpips[torch]'")
    turns = QUICK_TURNS if options.quick else TURNS * options.repeats
    nets = QUICK_NETS if options.quick else [*NETS]
    given = {"hidden": hidden(options), "nets": nets, "turns": turns}
    with temporary_folder() as folder:
        found = _start(2, "shares", folder, **given)
    return [
        row for net in nets for row in _shares(net, [of_rank[net] for of_rank in found], options)
    ]


def _shares(net: str, found: list[list[tuple[float, ...]]], options: Options) -> list[Row]:
    """Return the rows of a net, from the times of each turn by rank."""
    turns = [turn[:3] for of_rank in found for turn in of_rank]
    step, own, plain = (1e3 * statistics.median(times) for times in zip(*turns, strict=True))
    of_own, of_plain = (statistics.median(turn[k] / turn[0] for turn in turns) for k in (1, 2))
    both = [_longest(ranks) for ranks in zip(*found, strict=True)]
    longest, of_longest = map(statistics.median, zip(*both, strict=True))
    kind, batch = net.split()
    case = f"{NAMES[kind].format(shape(options))}, batch {batch}, a step, sync, 2 ranks"
    step_in = "torch", case, step, "ms"
    return [
        Row(*step_in, "its forward and backward alone", own, of_own, NETS[net]),
        Row(*step_in, "a step of plain PyTorch in 1 process", plain, of_plain),
        Row(*step_in, "the longer passes of the 2 ranks in it", 1e3 * longest, of_longest),
    ]


def _longest(ranks: tuple[tuple[float, ...], ...]) -> tuple[float, float]:
    """Return the longest passes of a rank in a turn's steps, and their share of the step."""
    passes = statistics.median(map(max, *(turn[3:] for turn in ranks)))
    return passes, passes / statistics.mean(turn[0] for turn in ranks)


def hidden(options: Options) -> int:
    """Return the width of the MLP."""
    return QUICK_HIDDEN if options.quick else HIDDEN


def shape(options: Options) -> str:
    """Return the layers of the MLP as text."""
    width = hidden(options)
    return f"784-{width}-{width}-10"


def rate(mode: str, ranks: int, options: Options) -> float:
    """Train the MLP through ``mpips.torch.run``, in async with one server.

    Returns:
        Rate in samples/s, without start and end.

    Raises:
        Failed: If the run fails, or is too short.
    """
    epochs = QUICK_EPOCHS if options.quick else EPOCHS
    with temporary_folder() as folder:
        given = {"mode": mode, "hidden": hidden(options), "epochs": epochs}
        _start(ranks, "train", folder, **given)
        out = folder / "run"
        if options.quick:  # a short run has only a line or two
            return float(json.loads((out / SUMMARY).read_text())["samples_per_s"])
        return steady_rate(out / METRICS)


def memory_mb(ranks: int, size: int) -> float:
    """Train a model of about `size` float32 parameters by Adam, in sync.

    Returns:
        Proportional set size of all ranks after a step, in MB.

    Raises:
        Failed: If the run fails.
    """
    with temporary_folder() as folder:
        return float(sum(_start(ranks, "memory", folder, size=size)))


def _start(ranks: int, program: str, folder: Path, **given: Any) -> list[Any]:
    """Run a program of `benchmarks.torch_program`, and return the results of each worker."""
    run_job(ranks, [*PROGRAM, program, json.dumps(given)], folder)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]
