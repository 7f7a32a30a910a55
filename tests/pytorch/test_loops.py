"""Loops as people write them end as in plain torch: many runs in pytest's own process."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import mpips  # noqa: E402
import mpips.torch as mt  # noqa: E402

STEPS, SIZE = 12, 8
points = torch.randn(STEPS * SIZE, 6, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(points, (points[:, :3].sum(1) > 0).long())
# Makes a step of its batch, by a model and its optimizer.
Step = Callable[[nn.Module, Any, torch.Tensor, torch.Tensor], object]
Make = Callable[[], nn.Module]


class Runs(mpips.Callback):
    """Runs training functions; has the losses that the last of them was told."""

    def __init__(self, out: Path) -> None:
        self.out, self.losses = out, list[float]()

    def on_step(self, worker: Any, loss: float) -> None:
        self.losses.append(loss)

    def __call__(self, train: Any, make: Make, rule: Any = None, **options: Any) -> mt.Result:
        self.losses.clear()
        given = {"mode": "sync", "quiet": True, "out": self.out, **options}
        return mt.run(train, make, rule or mpips.Adam(0.01), callbacks=[self], **given)


@pytest.fixture
def run(tmp_path: Path) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path / "run")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


class Odd(nn.Module):
    """A net with all that is not plain: frozen, tied and unused parameters, and of two widths."""

    sparse = True

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.wide = nn.Parameter(torch.ones(9, 9)), nn.Linear(2, 2).double()
        self.register_buffer("roots", torch.ones(2, dtype=torch.complex64).conj())
        self.register_buffer("parts", self.roots.imag)
        self.first, self.unused = nn.Linear(6, 9), nn.Linear(3, 2)
        self.out, self.same = nn.Linear(9, 2), nn.Linear(9, 2)
        self.same.weight = self.out.weight
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = x * F.embedding(x.argmax(1), self.rows, sparse=self.sparse)
        return self.wide((self.out(x) + self.same(x)).double())


def plainly(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()


def anew(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Make a step of a second gradient, where the first is dropped."""
    (100 * model(x).sum()).backward()
    plainly(model, opt, x, y)


# What a library could patch, and must not.
PLACES = ((torch.autograd, "backward"), (F, "linear"), (F, "embedding"), (torch.Tensor, "backward"))
PLACES += ((nn.Linear, "forward"), (nn.Embedding, "__init__"), (torch.optim.SGD, "step"))


def steps(step: Step) -> Callable[[mt.Worker], None]:
    own = [getattr(*place) for place in PLACES]

    def train(worker: mt.Worker) -> None:
        for x, y in worker.loader(DATA, batch_size=SIZE):
            step(worker.model, worker.optimizer, x, y)
            assert [getattr(*place) for place in PLACES] == own

    return train


def plain(step: Step, size: int, make: Make) -> nn.Module:
    """Return the model after an epoch of such steps of plain torch."""
    torch.manual_seed(0)
    model = make()
    model.sparse = False  # torch's Adam takes no sparse gradient
    opt = torch.optim.Adam(model.parameters(), 0.01)
    for begin in range(0, len(points), size):
        step(model, opt, *(t[begin : begin + size] for t in DATA.tensors))
    return model


EPOCH: dict[str, Any] = {"epochs": 1, "shuffle": False}


def assert_alike(result: mt.Result, model: nn.Module, close: float = 1e-5) -> None:
    found, expected = dict(result.state_dict), dict(model.state_dict())
    torch.testing.assert_close(found, expected, rtol=close, atol=close / 10)


LOOPS = [(plainly, net, 1), (anew, net, 1), (plainly, Odd, 1), (plainly, net, 5)]
LOOPS += [(torch.autocast("cpu", torch.bfloat16)(plainly), net, 1)]


@pytest.mark.parametrize(("step", "make", "batches"), LOOPS)
def test_steps_are_those_of_torch(step: Step, make: Make, batches: int, run: Runs) -> None:
    """Of five batches too, where the last step is of two."""
    result = run(steps(step), make, accumulate=batches, **EPOCH)
    assert_alike(result, plain(step, batches * SIZE, make))
    assert (len(run.losses), result.summary["global_step"]) == (STEPS, -(-STEPS // batches))
    assert max(run.losses) < 3, "of the gradients that were pushed"


COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=COMPILER)])
def test_a_compiled_model(backend: str, run: Runs) -> None:
    """In one graph."""
    compiled = functools.cache(functools.partial(torch.compile, backend=backend, fullgraph=True))
    result = run(steps(lambda model, *given: plainly(compiled(model), *given)), net, **EPOCH)
    assert_alike(result, plain(plainly, SIZE, net), 1e-3)


def test_a_model_in_16_bits(run: Runs) -> None:
    def half() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)).bfloat16()

    train = steps(lambda model, opt, x, y: plainly(model, opt, x.bfloat16(), y))
    result = run(train, half, **{**EPOCH, "epochs": 8})
    types = {t.dtype for t in result.state_dict.values() if t.is_floating_point()}
    assert types == {torch.bfloat16}
    assert result.params["1.weight"].dtype == "float32"
    assert sum(run.losses[-STEPS:]) < 0.85 * sum(run.losses[:STEPS])


class Rows(nn.Module):
    """A model of tables alone, one of hashed ids."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = mt.Embedding(10, 2, init=mpips.Zeros())
        self.ids = mt.Embedding(5, 2, init=mpips.Zeros(), hashed=True, optimizer=mpips.SGD(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x).sum() + self.ids(x + (1 << 40)).sum()


def test_a_model_may_be_tables_alone(run: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    def train(worker: mt.Worker) -> None:
        for (x,) in worker.loader(TensorDataset(torch.arange(10)), batch_size=5):
            worker.model(x).backward()
            worker.optimizer.step()

    result = run(train, Rows, mpips.SGD(0.5), **{**EPOCH, "epochs": 3, "quiet": False})
    assert "epochs= was not given" not in capfd.readouterr().out
    assert result.rows("rows", range(10)).tolist() == [[-1.5, -1.5]] * 10
    assert result.rows("ids", [1 << 40]).tolist()[0][0] <= -3
    assert not result.params
    assert not mt.optimizer_state(result.out)["state"]


# What a loop may do --------------------------------------------------------------------------


def test_what_a_loop_cannot_do_is_told(run: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    """Steps of torch's optimizers are refused over the run's parameters, while the run goes on."""
    others, kept = torch.optim.SGD(net().parameters(), 0.1), []

    def refused(call: Callable[[], object], told: str) -> None:
        with pytest.raises(mpips.UserError, match=told):
            call()

    def train(worker: mt.Worker) -> None:
        opt = worker.optimizer
        kept.append(torch.optim.AdamW(worker.model.parameters(), 0.01))
        refused(opt.step, r"step without a batch, .* worker\.loader,")
        refused(lambda: worker.epoch, "epoch outside the loop")
        batches = iter(worker.loader(DATA, batch_size=SIZE))
        x, y = next(batches)
        F.cross_entropy(worker.model(x), y).backward()
        others.step()
        told = r"a step of torch\.optim\.adamw\.AdamW over .*=mpips\.AdamW\(1e-3, weight_decay=0"
        refused(kept[0].step, told)
        told = r"a batch of 8 samples that was taken and not pushed, .* for steps of k batches "
        refused(lambda: next(batches), told + r"give mpips\.torch\.run accumulate=k")
        opt.step()
        assert worker.epoch == 0
        worker.stop()
        assert next(batches, None) is None
        again = r"a second loop .* one pass in each epoch of worker\.epochs\(\)"
        refused(lambda: next(iter(worker.loader(DATA, batch_size=SIZE))), again)
        refused(opt.step, "step without a batch")

    refused(lambda: run(train, net, seed="x"), "seed 'x', expected an integer >= 0")
    run(train, net, quiet=False)
    assert "the loop takes 40 epochs: epochs= was not given" in capfd.readouterr().out
    kept[0].step()
