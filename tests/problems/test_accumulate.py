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
from mpips.problems.accumulate import Accumulator, follow, submit, taken
from mpips.problems.base import initial_vector


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
