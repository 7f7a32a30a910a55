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


def runs(
    step: Step, out: Path, make: Callable[[], nn.Module] = net, **options: Any
) -> tuple[mt.Result, list[float]]:
    """Return what a run of such steps ends with, and the losses that it was told."""
    losses = list[float]()

    class Noted(mpips.Callback):
        def on_step(self, worker: Any, loss: float) -> None:
            losses.append(loss)

    def train(worker: mt.Worker) -> None:
        for x, y in worker.loader(DATA, batch_size=SIZE):
            step(worker.model, worker.optimizer, x, y)

    given = {"mode": "sync", "epochs": 1, "shuffle": False, "quiet": True, "out": out, **options}
    return mt.run(train, make, mpips.Adam(0.01), callbacks=[Noted()], **given), losses


def plain(step: Step, size: int = SIZE, make: Callable[[], nn.Module] = net) -> nn.Module:
    """Return the model after the same steps of plain torch."""
    torch.manual_seed(0)
    model = make()
    opt = torch.optim.Adam(model.parameters(), 0.01)
    for begin in range(0, len(points), size):
        step(model, opt, *(t[begin : begin + size] for t in DATA.tensors))
    return model


def assert_alike(result: mt.Result, model: nn.Module, remote: float = 1e-5) -> None:
    """Assert that a run has ended as plain torch has."""
    expected = model.state_dict()
    assert result.state_dict.keys() == expected.keys()
    torch.testing.assert_close(
        dict(result.state_dict), dict(expected), rtol=remote, atol=remote / 10
    )


class Odd(nn.Module):
    """A net with all that is not plain: frozen, tied and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(6, 9), nn.Linear(3, 2)
        self.out, self.same = nn.Linear(9, 2), nn.Linear(9, 2)
        self.same.weight = self.out.weight
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.out(x) + self.same(x)


@pytest.mark.parametrize(("step", "make"), [(plainly, net), (anew, net), (plainly, Odd)])
def test_steps_are_those_of_torch(
    step: Step, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    result, losses = runs(step, tmp_path / "run", make)
    assert_alike(result, plain(step, make=make))
    assert len(losses) == STEPS
    assert max(losses) < 3, "of the gradients that were pushed"


PLACES = ((torch.autograd, "backward"), (F, "linear"), (F, "embedding"), (torch.Tensor, "backward"))
PLACES += ((nn.Linear, "forward"), (nn.Embedding, "__init__"), (torch.optim.SGD, "step"))


def test_functions_of_torch_are_as_they_were(tmp_path: Path) -> None:
    """In a run, and after it."""
    before = [getattr(*place) for place in PLACES]

    def step(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        plainly(model, opt, x, y)
        assert [getattr(*place) for place in PLACES] == before
        assert {type(module) for module in model} == {nn.Linear, nn.Tanh}

    runs(step, tmp_path / "run")
    assert [getattr(*place) for place in PLACES] == before


def test_batches_are_added_up(tmp_path: Path) -> None:
    """The last step is of two batches, where the others have five."""
    result, losses = runs(plainly, tmp_path / "run", accumulate=5)
    assert_alike(result, plain(plainly, 5 * SIZE))
    assert len(losses) == STEPS
    assert result.summary["global_step"] == 3


def test_a_batch_without_a_step_is_told_what_adds_up(tmp_path: Path) -> None:
    def train(worker: mt.Worker) -> None:
        batches = iter(worker.loader(DATA, batch_size=SIZE))
        x, y = next(batches)
        F.cross_entropy(worker.model(x), y).backward()
        told = r"a batch of 8 samples that was taken and not pushed, .* for steps of k batches "
        with pytest.raises(mpips.UserError, match=told + r"give mpips\.torch\.run accumulate=k"):
            next(batches)
        worker.optimizer.step()
        worker.stop()

    mt.run(train, net, mpips.Adam(0.01), mode="sync", steps=1, quiet=True, out=tmp_path / "run")


def normal() -> nn.Module:
    """Return one with running means, and a layer that stays frozen."""
    found = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    found[2].requires_grad_(False)
    return found


def changed(model: nn.Module) -> None:
    """Change all that a model has, some of it in a way that PyTorch does not count."""
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    model[0].weight.data.fill_(1)


def begins(
    out: Path, change: Callable[[nn.Module], object], **options: Any
) -> tuple[mt.Result, list[dict[str, torch.Tensor]]]:
    """Run steps; returns the result, and the state of the model at the first batch."""
    first = list[dict[str, torch.Tensor]]()

    def train(worker: mt.Worker) -> None:
        worker.model.eval()(points)  # is no change
        worker.model[0].requires_grad_(False).requires_grad_(True)
        change(worker.model)
        for x, y in worker.loader(DATA, batch_size=SIZE):
            first.append({k: v.clone() for k, v in worker.model.state_dict().items()})
            plainly(worker.model.train(), worker.optimizer, x, y)

    given = {"mode": "sync", "resume": "auto", "out": out, **options}
    return mt.run(train, normal, mpips.Adam(0.01), **given), first


def test_a_run_begins_with_what_the_model_is_before_the_loop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resumed one goes on with its own, and tells it."""
    torch.manual_seed(0)
    model = normal()
    changed(model)
    result, first = begins(tmp_path / "run", changed, steps=1)
    torch.testing.assert_close(first[0], dict(model.state_dict()), rtol=0, atol=0)
    assert "own parameters" not in capfd.readouterr().out
    _, first = begins(tmp_path / "run", changed, steps=2)
    told = "goes on with its own parameters, not with the program's '0.weight' and 5 more"
    assert told in capfd.readouterr().out
    kept = {name: result.state_dict[name] for name in result.params}
    assert all(torch.equal(first[0][name], kept[name]) for name in kept)
    assert torch.equal(first[0]["2.weight"], model[2].weight), "it is frozen: the program has it"
    saved = dict(result.state_dict) | {"more": torch.zeros(2)}
    _, first = begins(tmp_path / "other", callable, steps=1, init_from=saved)
    torch.testing.assert_close(first[0], dict(result.state_dict), rtol=0, atol=0)
    assert "not in the model, left out of init_from: more" in capfd.readouterr().out


def test_a_parameter_that_was_replaced_before_the_loop_is_refused(tmp_path: Path) -> None:
    """It would not be trained."""
    changes: dict[str, Callable[[nn.Module], object]] = {
        "0.weight": lambda model: model.load_state_dict(normal().state_dict(), assign=True),
        "head.weight": lambda model: setattr(model, "head", nn.Linear(2, 2)),
    }
    for name, change in changes.items():
        with pytest.raises(mpips.UserError, match=f"{name}' that train has replaced, added"):
            begins(tmp_path / "run", change, steps=1)
    wrong = {**normal().state_dict(), "0.weight": torch.zeros(3)}
    for given, told in (({}, "init_from without '0.weight'"), (wrong, "of shape .3,., expected")):
        with pytest.raises(mpips.UserError, match=told):
            begins(tmp_path / "run", callable, steps=1, init_from=given)
    assert not (tmp_path / "run").exists()


def misused(out: Path, train: Callable[[mt.Worker], object]) -> None:
    """Run a loop of a step."""
    mt.run(train, net, mpips.Adam(0.01), mode="sync", steps=1, quiet=True, out=out)


def test_an_optimizer_of_torch_is_told_what_stands_for_it(tmp_path: Path) -> None:
    """Over the run's parameters alone, while the run goes on; what else a loop cannot do too."""
    told = r"a step of torch\.optim\.adamw\.AdamW over .*=mpips\.AdamW\(1e-3, weight_decay=0\.01\)"
    others = torch.optim.SGD(net().parameters(), 0.1)
    kept = []

    def train(worker: mt.Worker) -> None:
        opt = torch.optim.AdamW(worker.model.parameters(), 0.01)
        kept.append(opt)
        with pytest.raises(mpips.UserError, match=r"step without a batch, .* worker\.loader,"):
            worker.optimizer.step()
        with pytest.raises(mpips.UserError, match="epoch outside the loop"):
            worker.epoch  # noqa: B018
        for x, y in worker.loader(DATA, batch_size=SIZE):
            F.cross_entropy(worker.model(x), y).backward()
            others.step()
            with pytest.raises(mpips.UserError, match=told):
                opt.step()
            worker.optimizer.step()
            assert worker.epoch == 0
        again = r"a second loop .* one pass in each epoch of worker\.epochs\(\)"
        with pytest.raises(mpips.UserError, match=again):
            next(iter(worker.loader(DATA, batch_size=SIZE)))
        with pytest.raises(mpips.UserError, match="step without a batch"):
            worker.optimizer.step()

    misused(tmp_path / "run", train)
    kept[0].step()


def test_tensors_without_a_dimension_are_numbers(tmp_path: Path) -> None:
    found = list[dict[str, float]]()

    def means(model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        out = model(x)
        return {"loss": F.cross_entropy(out, y), "accuracy": (out.argmax(1) == y).double().mean()}

    def train(worker: mt.Worker) -> None:
        for x, y in worker.loader(DATA, batch_size=SIZE):
            plainly(worker.model, worker.optimizer, x, y)
            found.append(worker.evaluate(means, DATA))

    result = mt.run(
        train, net, mpips.Adam(0.01), evaluate=means, held_out=DATA, mode="sync", steps=1,
        quiet=True, out=tmp_path / "run",
    )  # fmt: skip
    assert 0 < found[0]["accuracy"] <= 1
    assert result.summary["accuracy"] == pytest.approx(found[0]["accuracy"], abs=0.2)


def test_epochs_that_are_not_given_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(worker: mt.Worker) -> None:
        for x, y in worker.loader(DATA, batch_size=SIZE):
            plainly(worker.model, worker.optimizer, x, y)
            worker.stop()

    for given in ({}, {"epochs": 2}, {"steps": 3}):
        out = tmp_path / str(given)
        mt.run(train, net, mpips.Adam(0.01), mode="sync", out=out, **given)
        told = "the loop takes 40 epochs: epochs= was not given" in capfd.readouterr().out
        assert told == (not given)


def autocast(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Make a step of a loss in bfloat16."""
    opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        loss = F.cross_entropy(out, y)
    assert out.dtype == torch.bfloat16
    loss.backward()
    opt.step()


def test_a_loss_in_bfloat16(tmp_path: Path) -> None:
    result, losses = runs(autocast, tmp_path / "run")
    assert_alike(result, plain(autocast))
    assert len(losses) == STEPS


def half() -> nn.Module:
    """Return a net with running means, all of it in bfloat16."""
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)).bfloat16()


def test_a_model_in_16_bits(tmp_path: Path) -> None:
    def step(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        plainly(model, opt, x.bfloat16(), y)

    result, losses = runs(step, tmp_path / "run", half, epochs=8)
    types = {t.dtype for t in result.state_dict.values() if t.is_floating_point()}
    assert types == {torch.bfloat16}
    assert result.params["1.weight"].dtype == "float32"
    assert sum(losses[-STEPS:]) < 0.85 * sum(losses[:STEPS])


COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=COMPILER)])
def test_a_compiled_model(backend: str, tmp_path: Path) -> None:
    """In one graph."""
    compiled = functools.cache(functools.partial(torch.compile, backend=backend, fullgraph=True))

    def step(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        plainly(compiled(model), opt, x, y)

    result, _ = runs(step, tmp_path / "run")
    assert_alike(result, plain(plainly), 1e-3)


class Rows(nn.Module):
    """A model of tables alone, one of hashed ids."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = mt.Embedding(10, 2, init=mpips.Zeros())
        self.ids = mt.Embedding(5, 2, init=mpips.Zeros(), hashed=True, optimizer=mpips.SGD(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x).sum() + self.ids(x + (1 << 40)).sum()


def test_a_model_may_be_tables_alone(tmp_path: Path) -> None:
    def train(worker: mt.Worker) -> None:
        for (x,) in worker.loader(TensorDataset(torch.arange(10)), batch_size=5):
            worker.model(x).backward()
            worker.optimizer.step()

    given = {"mode": "sync", "epochs": 3, "quiet": True, "out": tmp_path / "run"}
    result = mt.run(train, Rows, mpips.SGD(0.5), **given)
    assert result.rows("rows", range(10)).tolist() == [[-1.5, -1.5]] * 10
    assert result.rows("ids", [1 << 40]).tolist()[0][0] <= -3
    assert not result.params
    assert not mt.optimizer_state(result.out)["state"]
