"""Problems whose end is known exactly: what was applied can be read off the parameters.

In `Counting` a batch's gradient is minus the number of times that each training sample is in
it, and ``sgd`` with rate 1 adds it: ``counts[i]`` is the number of times that sample i was
applied. ``updates`` is -1 everywhere, so each of its elements counts the updates of its shard;
``--hidden N`` makes it N long. All numbers are integers, exact in float64. With tables each sample
is counted in a row of each of them as well; `ROWS_OF` says in which.

A file by itself: ranks load it as they load a user's.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.layout.tables import Table, Zeros
from mpips.library.optimizers import Adagrad
from mpips.problems.base import Arrays, Problem
from mpips.problems.rows import RowReads, Rows

HELD_S = 0.05
SIDE = 100
SEVERAL, SPREAD, LAZY_ROWS = 17, 99_991, 100_000_000
ROWS_OF: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "several": lambda ids: ids % SEVERAL,
    "lazy": lambda ids: ids * SPREAD % LAZY_ROWS,
    "slots": lambda ids: ids,  # whose slot counts too: it sums the squares of ones
}


def held_by(out: str | Path) -> Path:
    """Return the file that holds the run in a folder: while it is there, steps take `HELD_S`."""
    return Path(f"{out}.hold")


class Counting(Problem):
    """The counts of samples applied; exact where servers apply each gradient by itself."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"counts": (data.n_train,), "updates": (config.hidden[0],)})

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.layout.views(np.zeros(self.layout.size))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        if held_by(self.config.out).exists():
            time.sleep(HELD_S)
        out["counts"][:] = -np.bincount(batch.ids, minlength=self.data.n_train)
        out["updates"][:] = -1
        return float(len(batch))

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        return {"loss": 0.0}


class MeanCounting(Counting):
    """The mean over the batch of the samples' one-hot vectors, as a round of mode sync weights it.

    With a rate of n, the samples of all workers in a round, a round adds 1 for each of them;
    exact where n and each worker's share of it are powers of two, else to rounding.
    """

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        out["counts"] /= len(batch)
        return loss


class TableCounting(Counting):
    """The same, beside rows that count."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.tables = {
            "several": Table(SEVERAL, 3, Zeros()),
            "lazy": Table(LAZY_ROWS, 2, Zeros(), capacity="lazy"),
            "slots": Table(data.n_train, 5, Zeros(), optimizer=Adagrad(0.1)),
        }

    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: Batch, out: Arrays) -> float:
        loss = self.loss_and_grad(params, batch, out)
        for name, table in self.tables.items():
            ids = ROWS_OF[name](batch.ids)
            grads = np.full((len(ids), table.dim), -self._weight(batch))
            rows.push(name, ids, grads)
        return loss

    def _weight(self, batch: Batch) -> float:
        return 1.0

    def evaluate_rows(self, params: Arrays, rows: RowReads, batch: Batch) -> dict[str, float]:
        return self.evaluate(params, batch)


class TableMeanCounting(TableCounting, MeanCounting):
    """`MeanCounting` beside rows that count, which are read before."""

    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: Batch, out: Arrays) -> float:
        for name in self.tables:
            read = rows.pull(name, ROWS_OF[name](batch.ids))
            assert np.isfinite(read).all(), f"table {name}"
        return super().loss_and_grad_rows(params, rows, batch, out)

    def _weight(self, batch: Batch) -> float:
        return 1 / len(batch)


class MatrixMeanCounting(MeanCounting):
    """`MeanCounting` beside a matrix that counts too: its first elements, sample by sample."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        self.layout = Layout.of({**shapes, "matrix": (SIDE, SIDE)})

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        loss = super().loss_and_grad(params, batch, out)
        counts = out["counts"]
        out["matrix"][:] = 0
        out["matrix"].reshape(-1)[: counts.size] = counts
        return loss
