"""Schedulers of torch by updates and by steps, with accumulation and over a resume.

The gradient of each parameter is 1 in every step, so that the parameters end at the sum of the
rates of all updates.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

import mpips.torch as mt

WORLD = MPI.COMM_WORLD
RATE, SIZE, ACCUMULATE, EPOCHS = 0.5, 2, 2, 6
DATA = TensorDataset(torch.zeros(72, 1, dtype=torch.float64))  # 18 pushes an epoch, or 6 rounds
PUSHES = len(DATA) * EPOCHS // (SIZE * ACCUMULATE)
Make = Callable[[Optimizer, int], lr_scheduler.LRScheduler]
SCHEDULES: dict[str, Make] = {
    "lambda": lambda opt, total: lr_scheduler.LambdaLR(opt, lambda k: 1 / (1 + k)),
    "one cycle": lambda opt, total: lr_scheduler.OneCycleLR(
        opt, RATE, total, cycle_momentum=False
    ),
    "cosine": lambda opt, total: lr_scheduler.CosineAnnealingLR(opt, total),
}  # fmt: skip
CASES = (
    ("async", "updates", "one cycle"),
    ("async", "updates", "cosine"),
    ("async", "steps", "lambda"),
    ("sync", "updates", "lambda"),
    ("sync", "steps", "one cycle"),
)


class One(nn.Module):
    """A parameter whose gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def rates_of(make: Make, total: int) -> list[float]:
    """Return the rates of all steps, as torch has them."""
    opt = SGD(One().parameters(), RATE)
    scheduler = make(opt, total)
    found = []
    for _ in range(total):
        found.append(float(opt.param_groups[0]["lr"]))
        opt.step()
        scheduler.step()
    return found


def run(out: Path, mode: str, by: str, make: Make, total: int, epochs: int) -> tuple[Any, Any]:
    """Train up to so many epochs; returns the result, and (count, rate) of each step made here."""
    made = list[tuple[int, float]]()

    def train(worker: mt.Worker) -> None:
        model, opt = worker.model, worker.optimizer
        scheduler = make(opt, total)
        for k, _ in enumerate(worker.loader(DATA, batch_size=SIZE, epochs=epochs)):
            while scheduler.last_epoch < getattr(worker, by):
                scheduler.step()
            model.w.sum().backward()
            if k % ACCUMULATE == 0:
                made.append((getattr(worker, by), float(opt.param_groups[0]["lr"])))
            opt.step()

    given = {"mode": mode, "accumulate": ACCUMULATE, "out": out, "resume": "auto", "quiet": True}
    return mt.run(train, One, lambda p: SGD(p, RATE), **given), made


def main(folder: Path) -> None:
    """Check each schedule by one of the two counts in each mode."""
    for k, (mode, by, name) in enumerate(CASES):
        total = PUSHES // (WORLD.size if mode == "sync" else 1)
        expected, steps = rates_of(SCHEDULES[name], total), list[tuple[int, float]]()
        for part in (1, 2):
            out = folder / str(k)
            result, made = run(out, mode, by, SCHEDULES[name], total, EPOCHS * part // 2)
            steps += made
        assert result.summary["global_step"] == total, (mode, result.summary["global_step"])
        everyone = [step for step in WORLD.allgather(steps) if step]
        for count, rate in itertools.chain(*everyone):
            assert rate == pytest.approx(expected[count], abs=1e-12), (mode, by, name, count)
        pushed = sum(rate for _, rate in itertools.chain(*everyone))
        pushed /= WORLD.size if mode == "sync" else 1
        assert result.params["w"] == pytest.approx(-pushed, abs=1e-12), (mode, by, name)
        if mode == "sync":
            assert result.params["w"] == pytest.approx(-sum(expected), abs=1e-12), (by, name)
            assert [count for count, _ in steps] == [*range(total)], (by, name)
        elif by == "updates":
            seen = sorted(count for of_rank in everyone for count, _ in of_rank)
            late = max(count - k for k, count in enumerate(seen))
            assert late <= 0, "no step is of a later update than there was"
            assert max(seen) >= total - 2 * WORLD.size, (name, max(seen))
    print(f"{len(CASES)} schedules are right", flush=True)
