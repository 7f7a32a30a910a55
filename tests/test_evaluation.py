"""What a problem gives back is checked before it is used: `mpips.evaluation`."""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpips.errors import UserError
from mpips.evaluation import checked_loss, checked_metrics, first_gradient, next_evaluation, share
from mpips.layout import Layout

LAYOUT = Layout.of({"w": (2, 3), "b": (2,)})
Write = Callable[[Mapping[str, np.ndarray]], Any]


def compute(write: Write, loss: Any = 0.5) -> tuple[float, np.ndarray]:
    """Let a problem write its first gradient; return its loss and the flat gradient."""

    def loss_and_grad(params: Any, batch: Any, out: Any) -> Any:
        write(out)
        return loss

    problem = SimpleNamespace(loss_and_grad=loss_and_grad)
    job: Any = SimpleNamespace(problem=problem, layout=LAYOUT, info=SimpleNamespace(n_test=0))
    flat = np.zeros(LAYOUT.size, "f4")
    batch: Any = None
    return first_gradient(job, {}, batch, dict(LAYOUT.views(flat)), flat), flat


@pytest.mark.parametrize(("target", "n_test"), [(0.0, 5), (0.9, 0)])
def test_evaluate_is_tried_where_samples_are_held_out(target: float, n_test: int) -> None:
    calls: list[Any] = []

    def evaluate(params: Any, batch: Any) -> dict[str, float]:
        calls.append(batch)
        return {"loss": 1.0}

    def loss_and_grad(params: Any, batch: Any, out: Any) -> float:
        whole(out)
        return 1.0

    problem = SimpleNamespace(loss_and_grad=loss_and_grad, evaluate=evaluate)
    info, config = SimpleNamespace(n_test=n_test), SimpleNamespace(target_accuracy=target)
    job: Any = SimpleNamespace(problem=problem, layout=LAYOUT, info=info, config=config)
    flat, batch = np.zeros(LAYOUT.size, "f4"), "batch"
    args: Any = {}, batch, dict(LAYOUT.views(flat)), flat
    assert first_gradient(job, *args) == 1.0
    assert calls == [batch] * (n_test > 0)
    info.n_test, config.target_accuracy = 5, 0.9
    with pytest.raises(UserError, match="evaluate gives loss, expected 'accuracy' as well"):
        first_gradient(job, *args)


def whole(out: Mapping[str, np.ndarray]) -> None:
    out["w"][...] = 1
    out["b"][:] = 2


def test_a_whole_gradient_is_taken() -> None:
    loss, flat = compute(whole)
    assert loss == 0.5
    assert flat.tolist() == [1] * 6 + [2] * 2


def rebound(out: Any) -> None:
    out["w"] = np.ones((2, 3))
    out["b"][:] = 2


def partly(out: Mapping[str, np.ndarray]) -> None:
    out["w"][...] = 1
    out["b"][0] = 2


@pytest.mark.parametrize(("write", "name"), [(rebound, "w"), (partly, "b")])
def test_a_gradient_that_is_not_written_is_refused(write: Write, name: str) -> None:
    with pytest.raises(UserError, match=rf"left NaN in out\['{name}'\].*write in place"):
        compute(write)


def test_a_loss_that_is_not_finite_is_left_to_the_run() -> None:
    loss, _ = compute(partly, math.nan)
    assert math.isnan(loss)


@pytest.mark.parametrize("loss", [None, "0.5", np.zeros(3), {}])
def test_a_loss_is_a_number(loss: Any) -> None:
    if isinstance(loss, str):
        assert checked_loss(loss) == 0.5
        return
    with pytest.raises(UserError, match="expected a number, the mean loss"):
        checked_loss(loss)


@pytest.mark.parametrize(
    "metrics", [0.5, None, {"mae": 0.5}, {"loss": None}, {"loss": np.zeros(2)}, {"loss": "0.5"}]
)
def test_metrics_are_numbers_with_a_loss_among_them(metrics: Any) -> None:
    with pytest.raises(UserError, match="evaluate of the problem returned"):
        checked_metrics(metrics)
    assert checked_metrics({"loss": np.float32(0.5), "accuracy": 1}) == {"loss": 0.5, "accuracy": 1}


def test_evaluations_are_where_an_uninterrupted_run_has_them() -> None:
    assert [next_evaluation(epoch, 0.5) for epoch in (0, 0.4, 0.5, 1.7)] == [0.5, 0.5, 1.0, 2.0]
    assert next_evaluation(3.0, 0) == math.inf


@pytest.mark.parametrize(("samples", "parts"), [(10, 3), (2, 5), (0, 2)])
def test_shares_cover_the_samples(samples: int, parts: int) -> None:
    ranges = [share(samples, k, parts) for k in range(parts)]
    assert [i for begin, end in ranges for i in range(begin, end)] == list(range(samples))
