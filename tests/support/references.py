"""What modes that give one result do, in one process, without MPI and without our kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpips.config import Config
from mpips.datasets.ledger import Range, SampleAllocator, pieces, split
from mpips.layout import cut
from tests.chaos.serial import Samples

TOLERANCE = {"float32": 1e-6, "float64": 1e-13}  # relative, of a tensor
SLOTS = {"sgd": 0, "momentum": 1, "adam": 2}


class Serial(Samples):
    """The samples of a job, and of each of its rounds."""

    def rounds(self, size: int, epochs: int | None) -> list[Range]:
        """Return the samples of each round of so many."""
        allocator = SampleAllocator(self.data.train.n, size, workers=1, epochs=epochs)
        return list(iter(lambda: allocator.next(0), None))


def serial_sync(config: Config, workers: int) -> dict[str, np.ndarray]:
    """Train as a synchronous run does, in one process: large batches, by `local_step`."""
    serial, large, clipped = Serial(config), config.step_size * workers, 0
    w, rounds = serial.w, serial.rounds(large, config.epochs)
    slots = [np.zeros_like(w) for _ in range(SLOTS[config.optimizer])]
    for number, batch in enumerate(rounds, 1):
        g = serial.gradient(w, batch)
        clipped += bool(config.clip) and np.linalg.norm(g) > config.clip
        local_step(config, w, g, slots, number, config.learning_rate)
    assert bool(clipped) == bool(config.clip)
    assert rounds[-1][2] - rounds[-1][1] < large, "the last batch of an epoch is not a partial one"
    return serial.views(w)


def local_step(config: Config, w: np.ndarray, g: np.ndarray, slots: Any, t: int, lr: float) -> None:
    """One step of the rule, in place, as the papers have it."""
    if config.clip:
        g = g * min(1.0, config.clip / np.linalg.norm(g))
    if config.optimizer == "sgd":
        w -= lr * g
    elif config.optimizer == "momentum":
        slots[0][:] = config.momentum * slots[0] + g
        w -= lr * slots[0]
    else:
        m, v = slots
        m[:] = config.beta1 * m + (1 - config.beta1) * g
        v[:] = config.beta2 * v + (1 - config.beta2) * g * g
        root = np.sqrt(v / (1 - config.beta2**t)) + config.eps
        w -= lr * (m / (1 - config.beta1**t)) / root


def serial_local_sgd(
    config: Config, workers: int, rate: Callable[[int, int], float]
) -> tuple[Any, Any]:
    """Train in one process; returns the named parameters, and the averaged slots."""
    serial, step_size = Serial(config), config.batch_size * config.accumulate
    rounds, w = serial.rounds(step_size * config.local_steps * workers, config.epochs), serial.w
    slots = [np.zeros_like(w) for _ in range(SLOTS[config.optimizer])]
    outer = np.zeros_like(w)
    kept = [[np.zeros_like(w) for _ in slots] for _ in range(workers)]
    for r, whole in enumerate(rounds, 1):
        mean, means = np.zeros_like(w), [np.zeros_like(w) for _ in slots]
        n = whole[2] - whole[1]
        for k, part in enumerate(split(whole, workers)):
            x, own = w.copy(), [slot.copy() for slot in slots]
            if config.local_slots == "keep":
                own = kept[k]
            for h, step in enumerate(split(part, -(-n // (step_size * workers))), 1):
                if step[1] == step[2]:
                    continue
                number = (r - 1) * config.local_steps + h
                lr = rate(number, config.local_steps * len(rounds))
                local_step(config, x, serial.gradient(x, step), own, number, lr)
            share = (part[2] - part[1]) / n
            mean += share * x
            for total, slot in zip(means, own, strict=True):
                total += share * slot
        outer = config.outer_momentum * outer + (w - mean)
        ahead = (w - mean) + config.outer_momentum * outer
        w = w - config.outer_lr * (ahead if config.outer_nesterov else outer)
        slots = means
    return serial.views(w), kept if config.local_slots == "keep" else slots


def serial_streaming(
    config: Config, workers: int, owners: int, rate: Callable[[int, int], float]
) -> tuple[Any, Any, np.ndarray]:
    """Train as Streaming DiLoCo does: outer parameters, workers' slots and parameters, velocity."""
    serial, parts = Serial(config), config.fragments
    step_size, every = config.batch_size * config.accumulate, config.local_steps // parts
    rounds, w = serial.rounds(step_size * every * workers, config.epochs), serial.w
    velocity, xs = np.zeros_like(w), [w.copy() for _ in range(workers)]
    slots = [[np.zeros_like(w) for _ in range(SLOTS[config.optimizer])] for _ in xs]
    alpha = config.mixing or (0.5 if config.overlap_steps else 1.0)
    for r, together in enumerate(rounds, 1):
        at = fragment_positions(w, owners, parts, (r - 1) % parts)
        changes = []
        for k, part in enumerate(split(together, workers)):
            count = -(-(together[2] - together[1]) // (step_size * workers))
            steps = [step for step in split(part, count) if step[2] > step[1]]
            for h, step in enumerate(steps):
                if len(changes) == k and len(steps) - h <= config.overlap_steps:
                    changes.append((w - xs[k])[at])
                number = (r - 1) * every + h + 1
                lr = rate(number, every * len(rounds))
                local_step(config, xs[k], serial.gradient(xs[k], step), slots[k], number, lr)
            if len(changes) == k:
                changes.append((w - xs[k])[at])
        d = sum(changes) / workers
        velocity[at] = config.outer_momentum * velocity[at] + d
        ahead = d + config.outer_momentum * velocity[at]
        w[at] -= config.outer_lr * (ahead if config.outer_nesterov else velocity[at])
        for x in xs:
            x[at] = (1 - alpha) * x[at] + alpha * w[at]
    return serial.views(w), [[*s, x] for s, x in zip(slots, xs, strict=True)], velocity


def fragment_positions(w: np.ndarray, owners: int, parts: int, p: int) -> np.ndarray:
    """Return where a fragment lies: the p-th of equal parts of each owner's shard."""
    found = []
    for shard in cut(w.size, owners, w.itemsize):
        part = cut(shard.size, parts, w.itemsize)[p]
        found.append(np.arange(shard.begin + part.begin, shard.begin + part.end))
    return np.concatenate(found)


def serial_easgd(config: Config, epochs: int) -> dict[str, np.ndarray]:
    """Train one worker in one process, without a stop."""
    serial, step_size = Serial(config), config.batch_size * config.accumulate
    rounds = serial.rounds(step_size * config.tau, epochs)
    alpha = 0.9 if config.elastic_rate is None else config.elastic_rate
    centre, x, number = serial.w, serial.w.copy(), 0
    slots: Any = [np.zeros_like(x) for _ in range(SLOTS[config.optimizer])]
    for done, batch in enumerate(rounds):
        lr, version = config.learning_rate, max(0, done - 1)  # the last pulled, before the push
        if config.schedule == "cosine":
            lr *= 0.5 * (1 + np.cos(np.pi * version / len(rounds)))
        for step in pieces(batch, step_size):
            number += 1
            local_step(config, x, serial.gradient(x, step), slots, number, lr)
        change = x.dtype.type(alpha) * (x - centre)
        x, centre = x - change, centre + change
    return serial.views(centre)
