"""Rows of a sparse table on one core, pulled and pushed, beside plain loops over the same ids."""

import math
import mmap
import time
from collections.abc import Callable

import numpy as np
from numba import njit

from mpips.bench.measure import Options, Row, compare, in_turn
from mpips.cluster.world import Cluster
from mpips.layout.tables import Ownership, Table, combine
from mpips.library.optimizers import Adagrad
from mpips.optim.row_rules import make_row_rule
from mpips.ps.table_shard import TableShard, row_fields

IDS, DIM, BATCHES = 8192, 32, 64  # of a step; and steps, whose rows are more than a cache holds
SIZES, QUICK_SIZES = (1_000_000, 50_000_000), (10_000,)
ZIPF = 1.05
REACH = 0.5


@njit(error_model="numpy", nogil=True)
def gather(table: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Set ``out[i] = table[ids[i]]``."""
    for i in range(ids.size):
        row, line = out[i], table[ids[i]]
        for j in range(row.size):
            row[j] = line[j]


@njit(error_model="numpy", nogil=True)
def scatter_add(table: np.ndarray, ids: np.ndarray, grads: np.ndarray, rate: float) -> None:
    """Subtract ``rate * grads[i]`` from ``table[ids[i]]``."""
    factor = table.dtype.type(rate)
    for i in range(ids.size):
        row, grad = table[ids[i]], grads[i]
        for j in range(row.size):
            row[j] -= factor * grad[j]


def zipf(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    """Return row numbers of which k is about as frequent as ``1 / (k + 1)**1.05``."""
    power = 1 - ZIPF
    return (((rows + 1.0) ** power - 1) * rng.random(n) + 1) ** (1 / power) // 1 - 1


def _zeros(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of memory of the kind that windows have: in small pages, as it is touched."""
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype).reshape(shape)


class _Sides:
    """Both sides of a comparison, over the same ids and gradients."""

    def __init__(self, rows: int, zipfian: bool) -> None:
        rng = np.random.default_rng(0)
        draw = (lambda n: zipf(rng, rows, n)) if zipfian else (lambda n: rng.integers(0, rows, n))
        self.ids = [np.minimum(draw(IDS).astype(np.int64), rows - 1) for _ in range(BATCHES)]
        self.grads = rng.standard_normal((IDS, DIM), "f4")
        self.out = np.zeros((IDS, DIM), "f4")
        self.table = _zeros("f4", (rows, DIM))
        ownership, rule = Ownership("rows", Table(rows, DIM), 1), make_row_rule(Adagrad(0.1))
        fields = row_fields(ownership, 0, rule, "f4")
        memory = {field.name: _zeros(field.dtype, field.shape) for field in fields}
        self.shard = TableShard(ownership, 0, memory, rule)
        self.places = [ownership.places(ids) for ids in self.ids]
        self.sums = np.zeros((IDS, DIM), "f4")

    def pull(self) -> None:
        """Read the rows of each step."""
        for k, ids in enumerate(self.ids):
            self.places[k] = self.shard.ownership.places(ids)
            self.shard.gather(self.places[k], self.out)

    def push(self) -> None:
        """Sort the ids of each step, sum their gradients, and apply them."""
        for places in self.places:
            grouped = self.shard.ownership.sort(places)
            sums = combine(grouped, self.grads, self.sums[: len(grouped.local)])
            self.shard.apply(grouped.local, sums, 0.1)

    def gather(self) -> None:
        """Read the rows in a plain loop."""
        for ids in self.ids:
            gather(self.table, ids, self.out)

    def scatter(self) -> None:
        """Subtract the gradients in a plain loop."""
        for ids in self.ids:
            scatter_add(self.table, ids, self.grads, 0.1)


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare pulls and pushes; rank 0 alone works. Collective: yes."""
    sizes = QUICK_SIZES if options.quick else SIZES
    cases = [(rows, zipfian) for rows in sizes for zipfian in (True, False)]
    return [row for case in cases for row in _of(cluster, *case, options)]


def _of(cluster: Cluster, rows: int, zipfian: bool, options: Options) -> list[Row]:
    names = ("pull", "gather", "push", "scatter")
    sides: dict[str, Callable[[], None]] = dict.fromkeys(names, lambda: time.sleep(0))
    if not cluster.rank:
        found = _Sides(rows, zipfian)
        found.push()  # rows that nobody has touched are made, which takes longer
        found.scatter()
        sides = {name: getattr(found, name) for name in names}
    times = in_turn(cluster, sides, options.repeats)
    drawn = "Zipf 1.05" if zipfian else "uniform"
    ids = f"{IDS:,} x {DIM} floats of {rows / 1e6:g} M rows, {drawn}"
    made = []
    for mine, other in (names[:2], names[2:]):
        ours, theirs, ratio = compare(times[mine], times[other])
        ours, theirs = (BATCHES * IDS / taken / 1e6 for taken in (ours, theirs))
        beside = {"gather": "a plain loop", "scatter": "a plain loop, SGD"}[other]
        case = f"{ids}, {'Adagrad' if mine == 'push' else 'pull'}"
        made.append(Row("rows", case, ours, "M rows/s", beside, theirs, ratio, REACH))
    return made
