"""Table rows pulled and pushed on one core, beside plain loops.

A lazy table, which finds its rows by an index, is compared with a dense one.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numba import njit

from mpips.layout.tables import Ownership, Table, combine
from mpips.library.optimizers import Adagrad
from mpips.mpi.pages import shared_zeros
from mpips.mpi.world import Cluster
from mpips.optim.row_rules import make_row_rule
from mpips.tables.shard import TableShard, row_fields
from mpips.tools.bench.measure import Options, Row, in_turn, rates
from mpips.tools.bench.row_ids import ROW_DIM, ROW_IDS, ROW_LISTS, row_ids

IDS, DIM, BATCHES = ROW_IDS, ROW_DIM, ROW_LISTS  # the rows of all lists do not fit into a cache
SIZES, QUICK_SIZES = (1_000_000, 50_000_000, 200_000_000), (10_000,)
REACH = 0.5
PAIRS = (
    ("pull", "gather", "a plain loop"), ("push", "scatter", "a plain loop, SGD"),
    ("lazy pull", "pull", "the table in full"), ("lazy push", "push", "the table in full"),
)  # fmt: skip


@njit(error_model="numpy", nogil=True)
def gather(table: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Set ``out[i] = table[ids[i]]``; `out` may have fewer columns than `table`."""
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


class _Sides:
    """Both sides of a comparison, over the same ids and gradients."""

    def __init__(self, rows: int, zipfian: bool) -> None:
        self.ids = list(row_ids("zipf-rows" if zipfian else "uniform-rows", rows))
        self.grads = np.random.default_rng(0).standard_normal((IDS, DIM), "f4")
        self.out = np.zeros((IDS, DIM), "f4")
        self.table = shared_zeros("f4", (rows, DIM))
        self.full, self.lazy = (_shard(rows, capacity) for capacity in ("full", "lazy"))
        self.places = [self.full.ownership.places(ids) for ids in self.ids]
        self.sums = np.zeros((IDS, DIM), "f4")

    def pull(self, shard: TableShard) -> None:
        """Read the rows of each step."""
        for k, ids in enumerate(self.ids):
            self.places[k] = shard.ownership.places(ids)
            shard.gather(self.places[k], self.out)

    def push(self, shard: TableShard) -> None:
        """Sort the ids of each step, sum their gradients, and apply them."""
        for places in self.places:
            grouped = shard.ownership.sort(places)
            sums = combine(grouped, self.grads, self.sums[: len(grouped.local)])
            shard.apply(grouped.local, sums, 0.1)

    def gather(self) -> None:
        """Read the rows in a plain loop."""
        for ids in self.ids:
            gather(self.table, ids, self.out)

    def scatter(self) -> None:
        """Subtract the gradients in a plain loop."""
        for ids in self.ids:
            scatter_add(self.table, ids, self.grads, 0.1)

    def sides(self) -> dict[str, Callable[[], None]]:
        """Return all sides by name, after one push, since the first push of a row takes longer."""
        sides: dict[str, Callable[[], None]] = {"gather": self.gather, "scatter": self.scatter}
        for name, shard in (("", self.full), ("lazy ", self.lazy)):
            sides[f"{name}pull"] = partial(self.pull, shard)
            sides[f"{name}push"] = partial(self.push, shard)
            self.push(shard)
        self.scatter()
        return sides


def _shard(rows: int, capacity: str) -> TableShard:
    """Return the shard of a new table with one server."""
    ownership = Ownership("rows", Table(rows, DIM, capacity=capacity), 1)
    rule = make_row_rule(Adagrad(0.1))
    fields = row_fields(ownership, 0, rule, "f4")
    memory = {field.name: shared_zeros(field.dtype, field.shape) for field in fields}
    return TableShard(ownership, 0, memory, rule)


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare pulls and pushes."""
    sizes = QUICK_SIZES if options.quick else SIZES
    cases = [(rows, zipfian) for rows in sizes for zipfian in (True, False)]
    return [row for case in cases for row in _of(cluster, *case, options)]


def _of(cluster: Cluster, rows: int, zipfian: bool, options: Options) -> list[Row]:
    times = in_turn(cluster, _Sides(rows, zipfian).sides(), options.repeats)
    drawn = "Zipf 1.05" if zipfian else "uniform"
    ids = f"{IDS:,} x {DIM} floats of {rows / 1e6:g} M rows, {drawn}"
    results = []
    for mine, other, beside in PAIRS:
        names = "rows", f"{ids}, {mine.replace('push', 'Adagrad')}", beside
        both = times[mine], times[other]
        results.append(rates(names, BATCHES * IDS / 1e6, "M rows/s", both, REACH))
    return results
