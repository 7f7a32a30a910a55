"""Oracles of a run that is over: its accounts, and what its parameters have counted."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from mpips.checkpoint import Checkpoint, open_checkpoint, verify
from mpips.checkpoint.complete import check_ledger
from mpips.checkpoint.files import committed
from mpips.config.jobfile import from_toml
from mpips.config.names import SERVED
from mpips.datasets.order import Order
from tests.chaos.counting import ROWS_OF

ROUNDING = 1e-6  # of sums of integers: what is lost or counted twice is 1
KEPT = ("residual", "error")  # what codecs keep of gradients: one of them, PowerSGD's the second


def check_run(out: Path) -> list[str]:
    """Return what is wrong with a run that should be complete, a line each."""
    return [*(text for path in committed(out) for text in verify(path)), *check_ledger(out)]


def expected_counts(checkpoint: Checkpoint, n: int) -> np.ndarray:
    """Return how often each of `n` samples was applied, from a checkpoint's dispatch."""
    allocator, config = checkpoint.state["allocator"], from_toml(checkpoint.config)
    order = Order(n, checkpoint.state["block"], config.seed)
    epoch, position = allocator["cursor"]
    counts = np.full(n, float(epoch))
    np.add.at(counts, order.sample_ids(epoch, 0, position), 1)
    for e, begin, end in allocator["pending"]:
        np.subtract.at(counts, order.sample_ids(e, begin, end), 1)
    return counts


def own(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Return the vector that each worker, or in rounds each rank, has for itself, as rows."""
    count = len(checkpoint.workers)
    found = np.empty((count, checkpoint.layout.size), checkpoint.dtype)
    for number in range(count):
        checkpoint.read_worker(name, number, found[number])
    return found


def check_counts(out: Path) -> list[str]:
    """Return what is wrong with the parameters of a complete run of a counting problem."""
    found = [open_checkpoint(path) for path in committed(out)]
    config = from_toml(found[-1].config)
    if config.mode == "easgd":
        replicas = with_replicas(found)
        if len(replicas) < 2:
            return ["fewer than two checkpoints with replicas: they cannot be compared"]
        return [text for pair in pairwise(replicas) for text in wrong_growth(*pair)]
    return wrong_counts(found[-1])


def wrong_counts(checkpoint: Checkpoint, rounding: float = ROUNDING) -> list[str]:
    """Return what is wrong with what was counted up to a checkpoint."""
    config = from_toml(checkpoint.config)
    names = [name for name in KEPT if name in checkpoint.worker_names]
    kept = own(checkpoint, names[0]).sum(axis=0) if names else 0.0
    rate, state = config.learning_rate, checkpoint.state
    arrays = checkpoint.layout.views(checkpoint.read_params() - rate * kept)
    updates = checkpoint.step * rate
    if config.mode == "local_sgd":  # whose rate is the number of workers, for means over them
        updates = state["samples"] / config.batch_size
    wrong = _off(arrays["updates"], np.asarray(updates), "updates of element", rounding)
    if not config.backup_workers:
        expected = expected_counts(checkpoint, state["n_train"])
        where = f"step {checkpoint.step}: "
        wrong += _off(arrays["counts"], expected, f"{where}count of sample", rounding)
        if "matrix" in arrays:
            found = arrays["matrix"].reshape(-1)[: expected.size]
            wrong += _off(found, expected, f"{where}matrix: count of sample", rounding)
        wrong += wrong_rows(checkpoint, expected)
    return wrong


def wrong_rows(checkpoint: Checkpoint, counts: np.ndarray) -> list[str]:
    """Return what is wrong with the tables of `tests.chaos.counting`, if there are any."""
    return [text for name in checkpoint.tables for text in _wrong_table(checkpoint, name, counts)]


def _wrong_table(checkpoint: Checkpoint, name: str, counts: np.ndarray) -> Iterator[str]:
    rows, which = np.unique(ROWS_OF[name](np.arange(counts.size)), return_inverse=True)
    expected = np.bincount(which, counts)
    rows, expected = rows[expected > 0], expected[expected > 0]
    pieces = list(checkpoint.read_table(name))
    numbers = np.concatenate([piece.rows for piece in pieces])
    order, where = np.argsort(numbers), f"step {checkpoint.step}: table {name}: "
    if not np.array_equal(numbers[order], rows):
        yield f"{where}{numbers.size} rows, expected {rows.size}, or other ones"
    elif not pieces[0].slots:
        found = np.concatenate([piece.params for piece in pieces])[order]
        yield from _off(found, expected[:, None], f"{where}number")
    elif from_toml(checkpoint.config).mode in SERVED:  # else gradients are added up before
        found = np.concatenate([piece.slots["sum"] for piece in pieces])[order]
        yield from _off(found, expected[:, None], f"{where}number of the slot")


def with_replicas(found: list[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints at which each worker has a replica."""
    return [c for c in found if all(k["steps"] for k in c.state.get("own", [{"steps": 0}]))]


def wrong_growth(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Judge what centre and replicas of mode easgd gain from a checkpoint to a later one."""
    before, after = (c.read_params() + own(c, "replica").sum(axis=0) for c in (a, b))
    grown, n = b.layout.views(after - before), b.state["n_train"]
    steps = [sum(k["steps"] for k in c.state["own"]) for c in (a, b)]
    counts = expected_counts(b, n) - expected_counts(a, n)
    where = f"from step {a.step} to {b.step}: "
    return [
        *_off(grown["counts"], counts, f"{where}count of sample"),
        *_off(grown["updates"], np.asarray(steps[1] - steps[0]), f"{where}updates of element"),
    ]


def _off(got: np.ndarray, expected: np.ndarray, what: str, rounding: float = ROUNDING) -> list[str]:
    """Return a line on the element that is furthest from the expected, if it is too far off."""
    distance = np.abs(got - expected).reshape(-1)
    worst = int(np.argmax(distance))
    if distance[worst] <= rounding:
        return []
    found, wanted = (array.flat[worst] for array in np.broadcast_arrays(got, expected))
    many = np.count_nonzero(distance > rounding)
    return [f"{what} {worst} is {found:g}, expected {wanted:g} ({many} of {got.size} differ)"]
