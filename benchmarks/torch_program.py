"""Programs of the ranks of measure ``torch``: ``python -m benchmarks.torch_program WHAT GIVEN``.

Each worker writes its results to the current folder.
"""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt
from benchmarks.mlp import SAMPLES
from benchmarks.peers.script import layers_of, pss_mb

BATCH, SMALL_BATCH = 64, 4
TURN = 10  # number of steps, and of passes, in a turn
QUIET: dict[str, Any] = {"threads": 1, "eval_every": 0, "checkpoint_every": 0, "quiet": True}
SETTLED = 3  # steps after the first checkpoint until memory is measured
METRICS = Path("run", "metrics.jsonl")
Times = list[tuple[float, ...]]


def make_mlp(hidden: int) -> nn.Module:
    """Return the MLP 784-hidden-hidden-10."""
    layers = (nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(hidden, 10))


def make_deep(size: int) -> nn.Module:
    """Return an MLP of about `size` parameters."""
    width, depth = layers_of(size)
    hidden = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def make_conv() -> nn.Module:
    """Return the net of PyTorch's MNIST example without dropout, with 1.2 M parameters."""
    convolutions = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())
    last = (nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *last)


def samples(count: int, *shape: int) -> TensorDataset:
    """Return random samples of ten classes."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand(count, *shape, generator=random)
    return TensorDataset(x, torch.randint(0, 10, (count,), generator=random))


def write(worker: mt.Worker, found: Any) -> None:
    """Write the results of a worker."""
    Path(f"worker-{worker.id}.json").write_text(json.dumps(found))


def train(mode: str, hidden: int, epochs: int) -> None:
    """Train the MLP; the rate is in the metrics of the run."""

    def loop(worker: mt.Worker) -> None:
        for x, y in worker.loader(data, BATCH, epochs):
            functional.cross_entropy(worker.model(x), y).backward()
            worker.optimizer.step()

    data = samples(SAMPLES, 784)
    servers = {"servers": 1} if mode == "async" else {}
    how: dict[str, Any] = {"mode": mode, "out": "run", "log_every": 0.01, **servers}
    mt.run(loop, lambda: make_mlp(hidden), mpips.SGD(0.01), **QUIET, **how)


def shares(hidden: int, nets: list[str], turns: int) -> None:
    """Measure steps, passes alone and plain steps of some nets, each with its batch size."""
    found: dict[str, Times] = {net: [] for net in nets}
    kinds = {
        "mlp": (lambda: make_mlp(hidden), samples(SAMPLES, 784)),
        "conv": (make_conv, samples(SAMPLES // 8, 1, 28, 28)),
    }
    for net in nets:
        kind, batch = net.split()
        make, data = kinds[kind]
        given = {"data": data, "batch_size": int(batch), "alone": make()}
        loop = functools.partial(take_turns, **given, found=found, net=net)
        how: dict[str, Any] = {"mode": "sync", "steps": (turns + 1) * (TURN + 2), "out": net}
        mt.run(loop, make, mpips.SGD(0.01), **QUIET, **how)


def take_turns(
    worker: mt.Worker,
    data: TensorDataset,
    batch_size: int,
    alone: nn.Module,
    found: dict[str, Times],
    net: str,
) -> None:
    """Add the seconds of each turn except the first to `found`.

    A turn has the medians of a step, a pass and a plain step, followed by the passes of each step.
    """
    taken, passed = list[float](), list[float]()
    rule = torch.optim.SGD(alone.parameters(), 0.01)
    for x, y in worker.loader(data, batch_size):
        taken.append(time.perf_counter())
        worker.optimizer.zero_grad()
        functional.cross_entropy(worker.model(x), y).backward()
        passed.append(time.perf_counter() - taken[-1])
        worker.optimizer.step()
        if len(taken) == TURN + 2:  # the first step waits for the slower rank's passes
            steps = [after - before for before, after in pairwise(taken[1:])]
            passes = [time_pass(alone, x, y) for _ in range(TURN)]
            plain = [time_plain(alone, rule, data, batch_size) for _ in range(TURN)]
            medians = map(statistics.median, (steps, passes, plain))
            found[net].append((*medians, *passed[1:-1]))
            taken.clear()
            passed.clear()
    del found[net][0]  # caches were cold
    write(worker, found)


def time_pass(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the seconds of forward and backward of a module outside of the run."""
    start = time.perf_counter()
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    return time.perf_counter() - start


def time_plain(
    model: nn.Module, rule: torch.optim.Optimizer, data: TensorDataset, batch_size: int
) -> float:
    """Return the seconds of a step of plain PyTorch in one process."""
    start = time.perf_counter()
    ids = torch.randint(len(data), (batch_size,))
    x, y = (tensor.index_select(0, ids) for tensor in data.tensors)
    rule.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    rule.step()
    return time.perf_counter() - start


def memory(size: int) -> None:
    """Write this rank's memory after a step, once the run has written its first checkpoint."""

    def loop(worker: mt.Worker) -> None:
        settled, used = 0, 0.0
        for x, y in worker.loader(data, SMALL_BATCH):
            functional.cross_entropy(worker.model(x), y).backward()
            worker.optimizer.step()
            settled += settled > 0 or '"checkpoint"' in METRICS.read_text()
            if settled >= SETTLED:
                used = pss_mb()
            if settled >= 2 * SETTLED:  # by now all ranks have measured theirs
                worker.stop()
        write(worker, used)

    data = samples(16 * SMALL_BATCH, layers_of(size)[0])

    how: dict[str, Any] = {"mode": "sync", "epochs": 10**6, "out": "run"}
    mt.run(loop, lambda: make_deep(size), mpips.Adam(1e-5), **QUIET, **how)


def device(device: str, size: int, turns: int) -> None:
    """Measure steps on a device, passes alone, copies alone, and the memory."""
    data = samples(64 * BATCH, layers_of(size)[0])

    def loop(worker: mt.Worker) -> None:
        found, taken = list[tuple[float, ...]](), list[float]()
        alone = make_deep(size).to(worker.to(device))
        on = next(alone.parameters()).device
        for x, y in worker.loader(data, BATCH):
            synchronize(on)
            taken.append(time.perf_counter())
            functional.cross_entropy(worker.model(x.to(on)), y.to(on)).backward()
            worker.optimizer.step()
            if len(taken) == TURN + 2:
                steps = [after - before for before, after in pairwise(taken[1:])]
                passes = [time_pass_on(alone, x.to(on), y.to(on)) for _ in range(TURN)]
                copies = [time_copies(alone) for _ in range(TURN)]
                found.append(tuple(map(statistics.median, (steps, passes, copies))))
                taken.clear()
        parameters = sum(parameter.numel() for parameter in alone.parameters())
        write(worker, {"turns": found[1:], "size": parameters, "memory_mb": pss_mb()})

    how: dict[str, Any] = {"mode": "sync", "steps": (turns + 1) * (TURN + 2), "out": "run"}
    mt.run(loop, lambda: make_deep(size), mpips.Momentum(0.01), **QUIET, **how)


def synchronize(on: torch.device) -> None:
    """Wait until a device has finished all its work."""
    if on.type == "cuda":
        torch.cuda.synchronize(on)


def time_pass_on(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the seconds of forward and backward of a module on its device."""
    start = time.perf_counter()
    time_pass(model, x, y)
    synchronize(x.device)
    return time.perf_counter() - start


def time_copies(model: nn.Module) -> float:
    """Return the seconds to copy all parameters to their device, and back."""
    (first, *_), pinned = model.parameters(), next(model.parameters()).device.type == "cuda"
    size = sum(parameter.numel() for parameter in model.parameters())
    there = torch.empty(size, device=first.device)
    here = torch.empty(size, pin_memory=pinned)
    start = time.perf_counter()
    there.copy_(here, non_blocking=True)
    here.copy_(there, non_blocking=True)
    synchronize(first.device)
    return time.perf_counter() - start


PROGRAMS: dict[str, Callable[..., None]] = {
    "train": train, "shares": shares, "memory": memory, "device": device,
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))
