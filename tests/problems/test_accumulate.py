"""Gradients of several batches are added: equal to one batch as large.

Whole jobs: tests/matrix.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from references import TOLERANCE

from mpips.config import Config
from mpips.datasets import open_dataset
from mpips.datasets.loader import Loader
from mpips.datasets.order import Order
from mpips.problems import load_problem
from mpips.problems.accumulate import Accumulator, ask_early, follow, submit, taken
from mpips.problems.base import initial_vector


class Asked:
    """Remote rows that are asked for, once each, as `mpips.tables.step_rows.RowsAtWork` does."""

    reads_ahead = True
    reads_early = False

    def __init__(self) -> None:
        self.lists: list[int] = []

    def ask_in_turn(self, lists: Any) -> None:
        found = [int(wanted["rows"][0]) for wanted in lists if wanted]
        self.lists += [each for each in found if each not in self.lists]


def test_rows_of_the_next_batch_are_asked_for() -> None:
    """Also behind one that was not there in time, and over the end of a step."""
    config = Config(batch_size=10)
    data, rows = open_dataset(config), Asked()
    problem = SimpleNamespace(wanted_rows=lambda batch: {"rows": batch.ids})
    job: Any = SimpleNamespace(config=config, problem=problem, rows=rows)
    order = Order(data.train.n, 10, 0, 0, shuffle=False)
    with Loader(data.train, order, "float32") as loader:
        submit(job, loader, (0, 0, 20))
        submit(job, loader, (0, 20, 30))
        batches = taken(job, loader, (0, 0, 20))
        assert next(batches).ids[0] == 0
        assert rows.lists == [0, 10]
        assert next(batches).ids[0] == 10
        assert rows.lists == [0, 10, 20]
        assert [batch.ids[0] for batch in taken(job, loader, (0, 20, 30))] == [20]
        assert rows.lists == [0, 10, 20]  # none is submitted behind it
        for part in ((0, 30, 40), (0, 40, 50)):
            submit(job, loader, part)
        assert [batch.ids[0] for batch in taken(job, loader, (0, 30, 40))] == [30]
        assert rows.lists == [0, 10, 20, 30, 40]
        for batch in taken(job, loader, (0, 40, 50)):
            assert batch.ids[0] == 40
            submit(job, loader, (0, 50, 60))  # comes while it is computed
        assert rows.lists == [0, 10, 20, 30, 40, 50]
        rows.reads_ahead, rows.reads_early = False, True  # when its step is read
        submit(job, loader, (0, 60, 70))
        assert [batch.ids[0] for batch in taken(job, loader, (0, 50, 60))] == [50]
        assert rows.lists[-1] == 50
        assert ask_early(job, loader)
        assert rows.lists[-1] == 60
        rows.reads_ahead, job.problem = True, None  # which says nothing
        submit(job, loader, (0, 70, 80))
        assert [batch.ids[0] for batch in taken(job, loader, (0, 60, 70))] == [60]
        assert ask_early(job, loader)
        assert loader.take().ids[0] == 70
        assert not ask_early(job, loader)  # it is not here


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("size", "accumulate"), [(8, 4), (7, 3), (1, 5), (32, 1)])
def test_gradient_is_that_of_one_large_batch(dtype: str, size: int, accumulate: int) -> None:
    """Steps of every length up to twice the full one, read in batches of at most `size`.

    Those above it are of a run in rounds, which is resumed in another mode.
    """
    config = Config(dtype=dtype, batch_size=size, accumulate=accumulate, hidden=(9,))
    data = open_dataset(config)
    problem = load_problem(config.problem, data.info, config)
    parts = {"config": config, "layout": problem.layout, "problem": problem, "info": data.info}
    parts["dataset"] = data
    job: Any = SimpleNamespace(**parts, dtype=np.dtype(dtype), delay=1.0, rows=None)
    accumulator, norm = Accumulator(job), np.linalg.norm
    params = problem.layout.views(initial_vector(problem, 0, job.dtype))
    flat, whole = np.zeros(problem.layout.size, dtype), np.zeros(problem.layout.size, dtype)
    out, expected = problem.layout.views(flat), problem.layout.views(whole)
    with Loader(data.train, Order(data.train.n, size, 0, 0), dtype) as loader:
        for end in range(1, 2 * config.step_size + 1):
            submit(job, loader, (0, 0, end))
            batches = taken(job, loader, (0, 0, end))
            loss = follow(problem, accumulator.gradient(params, batches, end, out, flat))
            assert loader.pending == 0
            loader.submit(0, 0, end)
            alone = problem.loss_and_grad(params, loader.take(), expected)
            assert loss == pytest.approx(alone, rel=TOLERANCE[dtype])
            assert norm(flat - whole) <= TOLERANCE[dtype] * norm(whole), end
    assert accumulator.compute_s > 0
