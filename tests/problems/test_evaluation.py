"""What a problem gives back is checked before it is used; gradients of batches are added."""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from references import TOLERANCE

from mpips.config import Config
from mpips.datasets import open_dataset
from mpips.datasets.loader import Loader
from mpips.datasets.order import Order
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.problems import evaluation, load_problem
from mpips.problems.accumulate import Accumulator, follow, submit, taken
from mpips.problems.base import initial_vector
from mpips.problems.evaluation import (
    checked_loss,
    checked_metrics,
    mean_evaluation,
    next_evaluation,
    share,
)

LAYOUT = Layout.of({"w": (2, 3), "b": (2,)})
Write = Callable[[Mapping[str, np.ndarray]], Any]


def job_of(problem: Any, samples: int, target: float = 0.0, size: int = 1) -> Any:
    """Return a job of three workers, ranks 1 to 3, with held-out samples x = 0, 1, 2, ..."""
    x = np.arange(samples, dtype="f8")
    test = SimpleNamespace(load=lambda begin, end, dtype: (x[begin:end], x[begin:end]))
    return SimpleNamespace(
        problem=problem, layout=LAYOUT, info=SimpleNamespace(n_test=samples),
        config=SimpleNamespace(target_accuracy=target, batch_size=size),
        dataset=SimpleNamespace(test=test), dtype=np.dtype("f8"), delay=1.0, rows=None,
        cluster=SimpleNamespace(roles=SimpleNamespace(workers=(1, 2, 3))),
    )  # fmt: skip


def first_loss(problem: Any, n_test: int = 0, target: float = 0.0, size: int = 1) -> float:
    """Have a problem compute the first gradient of a worker; return its loss."""
    job, flat = job_of(problem, n_test, target, size), np.zeros(LAYOUT.size)
    tasks = Accumulator(job).gradient({}, [range(size)], size, dict(LAYOUT.views(flat)), flat)
    return follow(problem, tasks)


def problem_of(write: Write, loss: Any = 0.5, **more: Any) -> Any:
    """Return a problem that writes its gradient so."""

    def loss_and_grad(params: Any, batch: Any, out: Any) -> Any:
        write(out)
        return loss

    return SimpleNamespace(loss_and_grad=loss_and_grad, **more)


@pytest.mark.parametrize(("target", "n_test"), [(0.0, 5), (0.9, 0)])
def test_evaluate_is_tried_where_samples_are_held_out(target: float, n_test: int) -> None:
    calls: list[Any] = []

    def evaluate(params: Any, batch: Any) -> dict[str, float]:
        calls.append(batch.x.tolist())
        return {"loss": 1.0}

    problem = problem_of(whole, 1.0, evaluate=evaluate)
    assert first_loss(problem, n_test, target, 3) == 1.0
    assert calls == [[0, 1, 2]] * (n_test > 0), "as many as a batch has"
    with pytest.raises(UserError, match="evaluate gives loss, expected 'accuracy' as well"):
        first_loss(problem, 5, 0.9, 3)


def whole(out: Mapping[str, np.ndarray]) -> None:
    out["w"][...] = 1
    out["b"][:] = 2


def rebound(out: Any) -> None:
    out["w"] = np.ones((2, 3))
    out["b"][:] = 2


def partly(out: Mapping[str, np.ndarray]) -> None:
    out["w"][...] = 1
    out["b"][0] = 2


@pytest.mark.parametrize(("write", "name"), [(rebound, "w"), (partly, "b")])
def test_a_gradient_that_is_not_written_is_refused(write: Write, name: str) -> None:
    with pytest.raises(UserError, match=rf"NaN in '{name}', at a loss of 0.5, .* in place"):
        first_loss(problem_of(write))
    assert math.isnan(first_loss(problem_of(partly, math.nan))), "it is left to the run"


def test_losses_and_metrics_are_numbers_with_a_loss_among_them() -> None:
    for loss in (None, np.zeros(3), {}):
        with pytest.raises(UserError, match="expected a number, the mean loss"):
            checked_loss(loss)
    without: tuple[Any, ...] = 0.5, None, {"mae": 0.5}
    for metrics in (*without, *({"loss": loss} for loss in (None, np.zeros(2), "0.5"))):
        with pytest.raises(UserError, match="evaluate of the problem returned"):
            checked_metrics(metrics)
    assert checked_loss("0.5") == 0.5
    assert checked_metrics({"loss": np.float32(0.5), "accuracy": 1}) == {"loss": 0.5, "accuracy": 1}


@pytest.mark.parametrize("samples", [1, 2, 5, 4000])
def test_parts_make_the_mean_of_all_samples(samples: int) -> None:
    """A part without samples says nothing: its metrics cannot be known."""

    def evaluate(params: Any, batch: Any) -> dict[str, float]:
        return {"loss": float(batch.x.mean()), "accuracy": 0.5}

    job = job_of(SimpleNamespace(evaluate=evaluate), samples)
    parts = [evaluation.evaluate(job, {}, *share(samples, k, 3)) for k in range(3)]
    means = mean_evaluation(job, [*parts])
    assert means == {"loss": pytest.approx((samples - 1) / 2), "accuracy": 0.5}
    assert (parts[0] == {}) == (samples < 3)


def test_a_metric_of_some_batches_is_named() -> None:
    """Else its mean would be over fewer samples than one thinks."""

    def evaluate(params: Any, batch: Any) -> dict[str, float]:
        return {"loss": 1.0, **({"auc": 0.5} if batch.x[0] < 2000 else {})}

    job = job_of(SimpleNamespace(evaluate=evaluate), 4000)
    message = "gave 'auc' at held-out samples 0, 1024 and not at held-out samples 2048, 3072, exp"
    with pytest.raises(UserError, match=message):
        evaluation.evaluate(job, {}, 0, 4000)


def test_a_metric_of_some_ranks_is_named() -> None:
    job, whole = job_of(None, 10), {"loss": 1.0, "accuracy": 2.0}
    with pytest.raises(UserError, match="gave 'accuracy' at rank 2 and not at rank 3, expected"):
        mean_evaluation(job, [None, whole, {"loss": 2.0}])
    job.cluster.roles.workers = tuple(range(30))
    with pytest.raises(UserError, match="and not at ranks 1, 2, 3, 4, 5, 6, 7, 8 and 21 more, exp"):
        mean_evaluation(job, [whole, *[{"loss": 2.0}] * 29])


def test_evaluations_are_where_an_uninterrupted_run_has_them() -> None:
    assert [next_evaluation(epoch, 0.5) for epoch in (0, 0.4, 0.5, 1.7)] == [0.5, 0.5, 1.0, 2.0]
    assert next_evaluation(3.0, 0) == math.inf


@pytest.mark.parametrize("every", [0.1, 0.2, 0.05, 0.7])
def test_evaluations_are_at_multiples_of_their_distance(every: float) -> None:
    """Of a run of 100 updates an epoch: none is late, none comes twice."""
    due, found = next_evaluation(0, every), list[int]()
    for update in range(1, 701):
        if update / 100 >= due:
            found.append(update)
            due = next_evaluation(update / 100, every)
    assert found == list(range(round(100 * every), 701, round(100 * every)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("size", "accumulate"), [(8, 4), (7, 3), (1, 5), (32, 1)])
def test_gradient_is_that_of_one_large_batch(dtype: str, size: int, accumulate: int) -> None:
    """Of every length up to twice the full one, as of a run in rounds resumed in another mode."""
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
    with Loader(data.train, Order(data.train.n, 0, 0), dtype) as loader:
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
