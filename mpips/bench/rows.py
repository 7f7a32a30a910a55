"""Rows of a sparse table on one core, pulled and pushed, beside plain loops over the same ids.

With peers, also steps of two workers with one server, beside TensorFlow's.
"""

import json
import math
import mmap
import time
from collections.abc import Callable

import numpy as np
from numba import njit

from mpips.bench import jobs
from mpips.bench.measure import Options, Row, compare, in_turn
from mpips.bench.peers.script import ROW_DIM, ROW_IDS, ROW_LISTS, row_ids
from mpips.cluster.world import Cluster
from mpips.layout.tables import Ownership, Table, combine
from mpips.library.optimizers import Adagrad
from mpips.optim.row_rules import make_row_rule
from mpips.ps.table_shard import TableShard, row_fields

IDS, DIM, BATCHES = ROW_IDS, ROW_DIM, ROW_LISTS  # the rows of all lists are more than a cache holds
SIZES, QUICK_SIZES = (1_000_000, 50_000_000), (10_000,)
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


def _zeros(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of memory of the kind that windows have: in small pages, as it is touched."""
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype).reshape(shape)


class _Sides:
    """Both sides of a comparison, over the same ids and gradients."""

    def __init__(self, rows: int, zipfian: bool) -> None:
        self.ids = list(row_ids("zipf-rows" if zipfian else "uniform-rows", rows))
        self.grads = np.random.default_rng(0).standard_normal((IDS, DIM), "f4")
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


def rate(measure: str, rows: int, steps: int) -> float:
    """Have two workers pull and push rows of one server, in a job of its own.

    Args:
        measure: How ids are drawn: see `row_ids`.
        rows: Of the table.
        steps: Of each worker, about.

    Returns:
        Millions of rows a second, of both workers; each is pulled and pushed.

    Raises:
        Failed: If the job fails.
    """
    given = {"measure": measure, "rows": rows, "steps": steps}
    with jobs.temporary_folder() as folder:
        jobs.run(3, ["-m", "mpips.bench.rows_program", json.dumps(given)], folder)
        found = [json.loads(path.read_text()) for path in folder.glob("worker-*.json")]
    seconds = max(each["end"] for each in found) - min(each["begin"] for each in found)
    return float(sum(each["steps"] for each in found) * IDS / seconds / 1e6)


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
