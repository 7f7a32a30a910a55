"""What modes that give one result do, in one process, without MPI and without our kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, open_dataset
from mpips.datasets.ledger import SampleAllocator, pieces, split
from mpips.datasets.order import Order
from mpips.layout import cut
from mpips.problems import load_problem
from mpips.problems.base import initial_vector

TOLERANCE = {"float32": 1e-6, "float64": 1e-13}  # relative, of a tensor
SLOTS = {"sgd": 0, "momentum": 1, "adam": 2}


def serial_sync(config: Config, workers: int) -> dict[str, np.ndarray]:
    """Train as a synchronous run does, in one process: large batches, momentum, in NumPy.

    Equation: ``v = momentum v + g; w -= lr v``, with g scaled down to the norm `config.clip`.
    """
    data, large = open_dataset(config), config.step_size * workers
    problem = load_problem(config.problem, data.info, config)
    order = Order(data.train.n, config.batch_size, 0, config.seed)
    allocator = SampleAllocator(data.train.n, large, workers=1, epochs=config.epochs)
    dtype = np.dtype(config.dtype)
    w = initial_vector(problem, config.seed, dtype)
    g, v = np.zeros_like(w), np.zeros_like(w)
    sizes, clipped = [], 0
    while (batch := allocator.next(0)) is not None:
        ids = order.sample_ids(*batch)
        sizes.append(len(ids))
        x, y = data.train.convert(*data.train.read(ids), dtype)
        problem.loss_and_grad(problem.layout.views(w), Batch(x, y, ids), problem.layout.views(g))
        norm = float(np.linalg.norm(g))
        if config.clip and norm > config.clip:
            g *= dtype.type(config.clip / norm)
            clipped += 1
        v = dtype.type(config.momentum) * v + g
        w -= dtype.type(config.learning_rate) * v
    assert bool(clipped) == bool(config.clip)
    assert sizes[-1] < large, "the last batch of an epoch is not a partial one"
    return problem.layout.views(w)


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
    data, dtype = open_dataset(config), np.dtype(config.dtype)
    problem = load_problem(config.problem, data.info, config)
    order = Order(data.train.n, 1, 0, config.seed)
    step_size = config.batch_size * config.accumulate
    size = step_size * config.local_steps * workers
    rounds = list(iter_rounds(SampleAllocator(data.train.n, size, workers=1, epochs=config.epochs)))
    w = initial_vector(problem, config.seed, dtype)
    slots = [np.zeros_like(w) for _ in range(SLOTS[config.optimizer])]
    outer, g = np.zeros_like(w), np.zeros_like(w)
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
                ids = order.sample_ids(*step)
                batch = Batch(*data.train.convert(*data.train.read(ids), dtype), ids)
                problem.loss_and_grad(problem.layout.views(x), batch, problem.layout.views(g))
                number = (r - 1) * config.local_steps + h
                local_step(
                    config, x, g, own, number, rate(number, config.local_steps * len(rounds))
                )
            share = (part[2] - part[1]) / n
            mean += share * x
            for total, slot in zip(means, own, strict=True):
                total += share * slot
        outer = config.outer_momentum * outer + (w - mean)
        ahead = (w - mean) + config.outer_momentum * outer
        w = w - config.outer_lr * (ahead if config.outer_nesterov else outer)
        slots = means
    return problem.layout.views(w), kept if config.local_slots == "keep" else slots


def serial_streaming(
    config: Config, workers: int, owners: int, rate: Callable[[int, int], float]
) -> tuple[Any, Any, np.ndarray]:
    """Train as Streaming DiLoCo does: outer parameters, workers' slots and parameters, velocity."""
    data, dtype = open_dataset(config), np.dtype(config.dtype)
    problem = load_problem(config.problem, data.info, config)
    order, parts = Order(data.train.n, 1, 0, config.seed), config.fragments
    step_size, every = config.batch_size * config.accumulate, config.local_steps // parts
    whole = SampleAllocator(
        data.train.n, step_size * every * workers, workers=1, epochs=config.epochs
    )
    rounds = list(iter_rounds(whole))
    w = initial_vector(problem, config.seed, dtype)
    velocity, g, xs = np.zeros_like(w), np.zeros_like(w), [w.copy() for _ in range(workers)]
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
                ids = order.sample_ids(*step)
                batch = Batch(*data.train.convert(*data.train.read(ids), dtype), ids)
                views = problem.layout.views
                problem.loss_and_grad(views(xs[k]), batch, views(g))
                number = (r - 1) * every + h + 1
                local_step(config, xs[k], g, slots[k], number, rate(number, every * len(rounds)))
            if len(changes) == k:
                changes.append((w - xs[k])[at])
        d = sum(changes) / workers
        velocity[at] = config.outer_momentum * velocity[at] + d
        ahead = d + config.outer_momentum * velocity[at]
        w[at] -= config.outer_lr * (ahead if config.outer_nesterov else velocity[at])
        for x in xs:
            x[at] = (1 - alpha) * x[at] + alpha * w[at]
    return problem.layout.views(w), [[*s, x] for s, x in zip(slots, xs, strict=True)], velocity


def fragment_positions(w: np.ndarray, owners: int, parts: int, p: int) -> np.ndarray:
    """Return where a fragment lies: the p-th of equal parts of each owner's shard."""
    found = []
    for shard in cut(w.size, owners, w.itemsize):
        part = cut(shard.size, parts, w.itemsize)[p]
        found.append(np.arange(shard.begin + part.begin, shard.begin + part.end))
    return np.concatenate(found)


def iter_rounds(allocator: SampleAllocator) -> Any:
    while (batch := allocator.next(0)) is not None:
        yield batch


def serial_easgd(config: Config, epochs: int) -> dict[str, np.ndarray]:
    """Train one worker in one process, without a stop."""
    data, dtype = open_dataset(config), np.dtype(config.dtype)
    problem = load_problem(config.problem, data.info, config)
    order = Order(data.train.n, 1, 0, config.seed)
    step_size = config.batch_size * config.accumulate
    per_epoch = -(-data.train.n // (step_size * config.tau))
    centre, g = initial_vector(problem, config.seed, dtype), np.zeros(problem.layout.size, dtype)
    allocator, done = SampleAllocator(data.train.n, step_size * config.tau, workers=1), 0
    alpha = 0.9 if config.elastic_rate is None else config.elastic_rate
    x, number = centre.copy(), 0
    slots: Any = [np.zeros_like(x) for _ in range(SLOTS[config.optimizer])]
    while done < epochs * per_epoch:
        lr = config.learning_rate
        if config.schedule == "cosine":
            lr *= 0.5 * (1 + np.cos(np.pi * rate_version(done) / (epochs * per_epoch)))
        batch = allocator.next(0)
        assert batch is not None
        for step in pieces(batch, step_size):
            ids = order.sample_ids(*step)
            samples = Batch(*data.train.convert(*data.train.read(ids), dtype), ids)
            problem.loss_and_grad(problem.layout.views(x), samples, problem.layout.views(g))
            number += 1
            local_step(config, x, g, slots, number, lr)
        change = dtype.type(alpha) * (x - centre)
        x, centre, done = x - change, centre + change, done + 1
    return problem.layout.views(centre)


def rate_version(done: int) -> int:
    """Return the version from which a rate is taken: the last one pulled, before the push."""
    return max(0, done - 1)
