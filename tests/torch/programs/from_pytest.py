"""Loops as people write them end as in plain torch; run by pytest itself, in a process alone.

``python -m pytest from_pytest.py``: no mpirun, and many runs in one process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt

STEPS, SIZE = 12, 8
points = torch.randn(STEPS * SIZE, 6, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(points, (points[:, :3].sum(1) > 0).long())
# Makes a step of its batch, by a model and its optimizer.
Step = Callable[[nn.Module, Any, torch.Tensor, torch.Tensor], object]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def net() -> nn.Module:
    """Return a net."""
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def plainly(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Make a step."""
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()


def anew(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Make one of a second gradient, where the first is dropped."""
    (100 * model(x).sum()).backward()
    opt.zero_grad(set_to_none=False)
    F.cross_entropy(model(x), y).backward()
    opt.step()


def runs(step: Step, out: Path, **options: Any) -> tuple[mt.Result, list[float]]:
    """Return what a run of such steps ends with, and the losses that it was told."""
    losses = list[float]()

    class Noted(mpips.Callback):
        def on_step(self, worker: Any, loss: float) -> None:
            losses.append(loss)

    def train(worker: mt.Worker) -> None:
        for x, y in worker.loader(DATA, batch_size=SIZE, epochs=1):
            step(worker.model, worker.optimizer, x, y)

    given = {"mode": "sync", "shuffle": False, "quiet": True, "out": out, **options}
    return mt.run(train, net, mpips.Adam(0.01), callbacks=[Noted()], **given), losses


def plain(step: Step, size: int = SIZE) -> nn.Module:
    """Return the model after the same steps of plain torch."""
    torch.manual_seed(0)
    model = net()
    opt = torch.optim.Adam(model.parameters(), 0.01)
    for begin in range(0, len(points), size):
        step(model, opt, *(t[begin : begin + size] for t in DATA.tensors))
    return model


def assert_alike(result: mt.Result, model: nn.Module) -> None:
    """Assert that a run has ended as plain torch has."""
    expected = model.state_dict()
    assert result.state_dict.keys() == expected.keys()
    torch.testing.assert_close(dict(result.state_dict), dict(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [plainly, anew])
def test_steps_are_those_of_torch(step: Step, tmp_path: Path) -> None:
    result, losses = runs(step, tmp_path / "run")
    assert_alike(result, plain(step))
    assert len(losses) == STEPS
    assert max(losses) < 3, "of the gradients that were pushed"


def test_batches_are_added_up(tmp_path: Path) -> None:
    """The last step is of two batches, where the others have five."""
    result, losses = runs(plainly, tmp_path / "run", accumulate=5)
    assert_alike(result, plain(plainly, 5 * SIZE))
    assert len(losses) == STEPS
    assert result.summary["global_step"] == 3


def test_a_batch_without_a_step_is_told_what_adds_up(tmp_path: Path) -> None:
    def train(worker: mt.Worker) -> None:
        batches = worker.loader(DATA, batch_size=SIZE)
        x, y = next(batches)
        F.cross_entropy(worker.model(x), y).backward()
        told = r"a batch of 8 samples that was taken and not pushed, .* for steps of k batches "
        with pytest.raises(mpips.UserError, match=told + r"give mpips\.torch\.run accumulate=k"):
            next(batches)
        worker.optimizer.step()
        worker.stop()

    mt.run(train, net, mpips.Adam(0.01), mode="sync", steps=1, quiet=True, out=tmp_path / "run")
