"""A problem whose parameters show which updates a read holds, and which checks it.

Every line of ``clocks`` has a place for each training sample, and sgd with rate 1 adds 1 to that of
a batch of one sample in every line, so that each shard shows what was applied to it. Samples come
in their order (``--no-shuffle --epochs 1``). ``--hidden R,W,SLOW`` gives R lines in a job of W
workers, and makes rank SLOW slow, if it is one.
"""

import time
from collections.abc import Mapping

import numpy as np

from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.layout import Layout
from mpips.layout.tables import Table, Zeros
from mpips.problems.base import Arrays, Problem
from mpips.problems.rows import RowReads, Rows, TableProblem

PAUSE_S = 0.1


class Clocks(Problem):
    """Raises where a read holds less than the staleness bound says."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        lines, self._workers, self._slow = config.hidden
        self._bound = config.bound
        self._own: list[int] = []
        self.layout = Layout.of({"clocks": (lines, data.n_train)})

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.layout.views(np.zeros(self.layout.size))

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        from mpi4py import MPI

        (number,) = batch.ids
        self.check(number, params["clocks"])
        if MPI.COMM_WORLD.rank == self._slow:
            time.sleep(PAUSE_S)
        self._own.append(number)
        out["clocks"].fill(0)
        out["clocks"][:, number] = -1
        return 1.0

    def check(self, number: int, counts: np.ndarray) -> None:
        """Raise unless lines of counts, shape (lines, samples), have what sample `number` needs."""
        clock = number // self._workers
        promised = max(0, self._workers * (clock - self._bound))
        if (counts[:, :promised] != 1).any():
            missing = np.flatnonzero((counts[:, :promised] != 1).any(0))
            raise ValueError(f"at clock {clock} updates {missing[:5]} are missing")
        if (counts[:, self._own] != 1).any():
            raise ValueError(f"at clock {clock} own pushes are missing")

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        return {"loss": 0.0}


class ClockRows(Clocks, TableProblem):
    """The same with rows, all of which each step reads."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self._all = np.arange(data.n_train)
        rows = Table(rows=data.n_train, dim=3, init=Zeros())
        self.tables = {"clocks": rows}

    def wanted_rows(self, batch: Batch) -> Mapping[str, np.ndarray]:
        return {"clocks": self._all}

    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: Batch, out: Arrays) -> float:
        (number,) = batch.ids
        self.check(number, rows.pull("clocks", self._all).T)
        rows.push("clocks", batch.ids, np.full((1, 3), -1.0))
        return super().loss_and_grad(params, batch, out)

    def evaluate_rows(self, params: Arrays, rows: RowReads, batch: Batch) -> dict[str, float]:
        return {"loss": 0.0}


class HybridRows(ClockRows):
    """The same in rounds: parameters hold all rounds before, rows as many as the bound says."""

    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: Batch, out: Arrays) -> float:
        (number,) = batch.ids
        self._own.clear()  # a worker may lack its own, as it may lack others'
        before = number - number % self._workers
        expected = np.arange(self.data.n_train) < before
        if (params["clocks"] != expected).any():
            raise ValueError(f"before round {before // self._workers} parameters are {params}")
        return super().loss_and_grad_rows(params, rows, batch, out)
