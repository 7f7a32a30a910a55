"""`mpips.torch`: PyTorch models with a loop of their own, on real ranks and alone."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, run
from runs import printed_by

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

import mpips  # noqa: E402
import mpips.torch as mt  # noqa: E402
from mpips.config import Config  # noqa: E402
from mpips.errors import UserError  # noqa: E402
from mpips.layout import Layout  # noqa: E402
from mpips.optim import make_rule  # noqa: E402
from mpips.torch.model import (  # noqa: E402
    Bound,
    Initial,
    evaluating,
    make_model,
    trained_parameters,
)
from mpips.torch.optimizer import Losses  # noqa: E402
from mpips.torch.rule_of import read_optimizer  # noqa: E402
from mpips.torch.state import torch_optimizer  # noqa: E402
from mpips.torch.worker import TorchSamples, check_loader  # noqa: E402

PROGRAMS = ROOT / "tests" / "pytorch" / "programs"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    return printed_by(PROGRAMS, tmp_path_factory.mktemp("programs"), request)


# Programs with their arguments, how often they print what, and where they run.
ONE, OTHER = [pytest.mark.one_mpi], [pytest.mark.long, pytest.mark.other_mpi]
PRINTED = [
    ("follows,quick", 3, ": 2 alike", ONE),  # rates, groups, and parameters that are frozen
    ("follows,long", 3, ": 14 alike", OTHER),
    ("schedules", 3, "5 schedules are right", ONE),  # which count steps of several batches
    ("epochs", 3, ": epochs are whole", ONE),  # each sample is in each epoch of a loop once
    ("together", 3, ": together", OTHER),  # tensors are reduced, and models saved
    ("running_means", 3, "10 modes", [pytest.mark.long, *ONE]),  # they travel with parameters
    ("streams", 3, ": streams count", OTHER),  # as many samples as an epoch has
    ("embeddings", 7, " is equal", OTHER),
    ("reads", 1, "each sample once an epoch", OTHER),  # by processes, over a stop too
    ("begins", 1, "begins where the other ended", OTHER),
    ("moves,quick", 3, "quick: as if it had stayed", [pytest.mark.long, *ONE]),  # to torch and back
    ("moves,long", 3, "long: as if it had stayed", OTHER),
]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("line", "count", "printed"),
    [pytest.param(*what, marks=[*marks, pytest.mark.program(what[0])]) for *what, marks in PRINTED],
)
def test_programs_do_as_torch_does(line: str, count: int, printed: str, told: str) -> None:
    assert told.count(printed) == count
    assert line != "together" or told.count("of all workers") == 2, "printed once a run"
    assert line != "follows,quick" or "UserWarning" not in told.partition(" is equal")[0]


@pytest.mark.parametrize("samples", [0, 2.5, "all"])
def test_a_stream_is_told_its_samples(samples: Any) -> None:
    with pytest.raises(UserError, match="of a stream, expected an integer >= 1"):
        mt.Streamed([1, 2], samples=samples)
    with pytest.raises(UserError, match="without a sample for worker 2 of 3"):
        next(mt.Streamed([1, 2], samples=5).part(2, 3))


def test_what_is_no_stream_is_refused_at_once() -> None:
    for once in (iter([1, 2]), (k for k in [1, 2])):
        with pytest.raises(UserError, match=r"iterated only once, expected .* Streamed\(lambda"):
            mt.Streamed(once, samples=2)
    left = iter([1, 2])
    part = mt.Streamed(lambda *_: left, samples=5).part(0, 1)
    with pytest.raises(UserError, match="worker 0 iterates again, and that yields nothing"):
        list(part)
    with pytest.raises(UserError, match=r"batch_size=2, expected one of samples, batch_size=None"):
        mt.Streamed(DataLoader([1, 2], 2), samples=2)
    stream = mt.Streamed(DataLoader([1, 2, 3], None, num_workers=1), samples=2)
    part = stream.part(1, 2)
    assert [next(part) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(
        UserError, match=r"num_workers=4 .* with a stream.*DataLoader\(dataset, None"
    ):
        check_loader(stream, 4, {})


# Without ranks -------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.7),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.7, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, alpha=0.8, eps=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.9), eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1, rho=0.8, eps=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.9), eps=1e-3, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1, betas=(0.8, 0.9), eps=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, 0.1, betas=(0.8, 0.9), eps=1e-3),
}


@pytest.fixture
def in_64_bits() -> Iterator[None]:
    """Have torch keep scalars, such as NAdam's, in 64 bits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("in_64_bits")
def test_what_a_rule_keeps_is_what_torchs_keeps(name: str, decay: float) -> None:
    numbers = {"momentum": 0.7, "decay": 0.8, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3}
    numbers["weight_decay"] = decay
    config, layout = Config(optimizer=name, lr=0.1, **numbers), Layout.of({"a": (2, 3), "b": (4,)})
    rule, rng = make_rule(name, **numbers), np.random.default_rng(0)
    params, *slots = np.zeros((1 + len(rule.slots), layout.size))
    theirs = [torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in layout.shapes]
    opt = OPTIMIZERS[name](theirs)
    opt.param_groups[0]["weight_decay"] = decay
    for step in range(1, 201):
        grad = rng.standard_normal(layout.size)
        rule.apply(params, grad, tuple(slots), step, 0.1)
        for p, view in zip(theirs, layout.views(grad).values(), strict=True):
            p.grad = torch.tensor(view)
        opt.step()
    for p, view in zip(theirs, layout.views(params).values(), strict=True):
        torch.testing.assert_close(p.data, torch.tensor(view), rtol=1e-12, atol=1e-12)
    found, expected = torch_optimizer(config, layout, slots, 200).state_dict(), opt.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(found["state"], expected["state"])
    opt.load_state_dict(found)
    opt.step()


def net_of_two() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))


READ: dict[str, tuple[Any, mpips.library.optimizers.Optimizer]] = {
    "sgd": (OPTIMIZERS["sgd"], mpips.SGD(0.1, weight_decay=0.0)),
    "momentum": (OPTIMIZERS["momentum"], mpips.Momentum(0.1, 0.7, 0.0)),
    "nesterov": (OPTIMIZERS["nesterov"], mpips.Nesterov(0.1, 0.7, 0.0)),
    "adagrad": (OPTIMIZERS["adagrad"], mpips.Adagrad(0.1, 1e-3, 0.0)),
    "rmsprop": (OPTIMIZERS["rmsprop"], mpips.RMSprop(0.1, 0.8, 1e-3, 0.0)),
    "adam": (torch.optim.Adam, mpips.Adam(1e-3, 0.9, 0.999, 1e-8, 0.0)),
    "adamw": (torch.optim.AdamW, mpips.AdamW(1e-3, 0.9, 0.999, 1e-8, 0.01)),
    "adadelta": (torch.optim.Adadelta, mpips.Adadelta(1.0, 0.9, 1e-6, 0.0)),
    "amsgrad": (OPTIMIZERS["amsgrad"], mpips.AMSGrad(0.1, 0.8, 0.9, 1e-3, 0.0)),
    "nadam": (torch.optim.NAdam, mpips.NAdam(2e-3, 0.9, 0.999, 1e-8, 0.0)),
    "radam": (torch.optim.RAdam, mpips.RAdam(1e-3, 0.9, 0.999, 1e-8, 0.0)),
}


@pytest.mark.parametrize("name", READ)
def test_an_optimizer_of_torch_is_read_with_its_defaults(name: str) -> None:
    make, expected = READ[name]
    assert read_optimizer(make, net_of_two()) == (expected, [])


def test_groups_of_an_optimizer_become_patterns() -> None:
    def by_shape(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        flat = [p for p in params if p.dim() < 2]
        first, last = (p for p in params if p.dim() > 1)
        groups = [{"params": flat, "weight_decay": 0.0}, {"params": [last], "lr": 0.5}]
        return torch.optim.AdamW([*groups, {"params": [first]}], 0.1)

    _, groups = read_optimizer(by_shape, net_of_two())
    weights = [mpips.Group("*.bias", weight_decay=0.0), mpips.Group("1.*", weight_decay=0.0)]
    assert groups == [*weights, mpips.Group("2.weight", lr=0.5)]


def test_frozen_parameters_are_left_out_of_groups() -> None:
    def decayed(params: Any) -> torch.optim.Optimizer:
        first, *_, last = params
        return torch.optim.AdamW([{"params": [first]}, {"params": [last], "weight_decay": 0.0}])

    model = net_of_two()
    model.requires_grad_(False)
    model[2].bias.requires_grad_(True)
    assert read_optimizer(decayed, model)[1] == [mpips.Group("*.bias", weight_decay=0.0)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "torch.optim.LBFGS, expected one of torch.optim.SGD"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True of torch.optim.AdamW"),
        (lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.5), "dampening=0.5 .*expected 0"),
        (lambda p: torch.optim.SGD([next(iter(p))], 0.1), "without parameter '0.bias' and 4 more"),
        (lambda p: torch.optim.SGD([torch.zeros(2)], 0.1), "of other parameters"),
        (lambda p: torch.optim.Adam([{"params": p, "eps": 1.0}]), "eps=1.0 of a parameter group"),
        (lambda p: 3, "returns builtins.int"),
        (lambda: 3, "raised TypeError"),
    ],
)
def test_an_optimizer_that_no_rule_equals_is_refused(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_optimizer(make, net_of_two())


def optimizer(pushed: list[float], *rates: float) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates]
    return mt.Optimizer(groups, pushed.append, pushed.clear)


def test_hooks_see_a_step() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook as of_all

    pushed, called = list[float](), list[str]()
    opt = optimizer(pushed, 0.5)
    opt.step()
    handles = [
        opt.register_step_pre_hook(lambda *_: called.append("before")),
        opt.register_step_post_hook(lambda *_: called.append("behind")),
        of_all(lambda *_: called.append("behind any")),
    ]
    opt.step()
    for handle in handles:
        handle.remove()
    assert called == ["before", "behind", "behind any"]
    assert pushed == [1, 1]


def test_a_push_carries_what_the_rates_were_multiplied_by() -> None:
    pushed = list[float]()
    opt = optimizer(pushed, 0.5, 0.25, 0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.1)
    for _ in range(3):
        opt.step()
        scheduler.step()
    assert pushed == pytest.approx([1, 0.1, 0.01])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    for loss in (1.0, 2.0):
        plateau.step(loss)
    opt.step()
    assert pushed[-1] == pytest.approx(0.0005)


def test_a_state_dict_has_rates_and_says_so() -> None:
    """A script that saves it with its scheduler's goes on at the rates that it had."""
    pushed, saved = list[float](), list[dict[str, Any]]()
    for _ in range(2):
        opt = optimizer(pushed, 0.5, 0.25)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.1)
        for each, state in zip((opt, scheduler), saved, strict=False):
            each.load_state_dict(state)
        for _ in range(2):
            opt.step()
            scheduler.step()
        with pytest.warns(UserWarning, match=r"rates alone: mpips\.torch\.optimizer_state\(run\)"):
            saved = [opt.state_dict(), scheduler.state_dict()]
    assert pushed == pytest.approx([1, 0.1, 0.01, 0.001])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer(pushed, 0.5).load_state_dict(saved[0])


def test_what_no_push_can_carry_is_refused() -> None:
    pushed = list[float]()
    opt = optimizer(pushed, 0.5, 0.25)
    opt.param_groups[1]["lr"] = 0.5
    with pytest.raises(UserError, match=r"went different ways, by \[1\.0, 2\.0\], expected one"):
        opt.step()
    opt.param_groups[0]["lr"] = -1.0
    with pytest.raises(UserError, match=r"rates \[-1\.0, 0\.5\] of the parameter groups"):
        opt.step()
    with pytest.raises(UserError, match="a parameter group that is added in a run"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    state = {"state": {0: {"momentum_buffer": torch.zeros(2)}}, "param_groups": []}
    with pytest.raises(UserError, match=r"load_state_dict\(\) .*, optimizer_state=state"):
        opt.load_state_dict(state)
    opt.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(UserError, match=r"weight decays \[0\.1, None\] .*, as in the run"):
        opt.step()
    with pytest.raises(ValueError, match="cycle_momentum"):  # torch's own words
        torch.optim.lr_scheduler.OneCycleLR(optimizer(pushed, 0.5), 0.1, total_steps=10)
    assert not pushed


def test_a_scaler_is_refused_at_its_first_step() -> None:
    """One that is not enabled, as where there is no device, hands a step on."""
    pushed = list[float]()
    opt = optimizer(pushed, 0.5)
    torch.amp.GradScaler("cpu", enabled=False).step(opt)
    assert pushed == [1]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(opt.param_groups[0]["params"][0].sum()).backward()
    with pytest.raises(UserError, match=r"a step by a GradScaler, .* train in bfloat16"):
        scaler.step(opt)
    assert pushed == [1]


class Two(torch.nn.Module):  # type: ignore[name-defined, misc]
    """A frozen layer, one that is trained, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.used, self.unused = torch.nn.Linear(3, 1), torch.nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.used(self.frozen(x)).sum()


def memory(model: Any) -> dict[str, np.ndarray]:
    """Return arrays like the trained parameters, of NaN."""
    return {name: np.full_like(array, np.nan) for name, array in Initial(model).items()}


def test_what_a_forward_pass_takes_off_running_means_is_pushed() -> None:
    model = make_model(lambda: torch.nn.BatchNorm1d(2), 0)
    bound, params, out = Bound(model, 0.5), dict(Initial(model)), memory(model)
    params["running_mean"][:] = 1, 2
    bound.move_to(params)
    bound.collect_into(out)
    model(torch.tensor([[2.0, 2.0], [4.0, 2.0]])).sum().backward()
    bound.complete()
    np.testing.assert_allclose(out["running_mean"], [-0.5 * 0.1 * 2, 0], atol=1e-6)
    np.testing.assert_array_equal(params["running_mean"], [1, 2])
    with evaluating(model, {**params, "running_mean": np.array([7, 7], "f4")}):
        assert model.running_mean.tolist() == [7, 7]
    assert model.running_mean.tolist() == pytest.approx([1.2, 2])


def test_what_a_run_was_made_without_cannot_be_trained() -> None:
    model = make_model(Two, 0)
    bound, params = Bound(model), memory(model)
    bound.collect_into(memory(model))
    model.frozen.requires_grad_(True)
    message = (
        r"a gradient of 'frozen\.weight', which was frozen when the model was made, expected .*"
        r'groups=\[mpips\.Group\("frozen\.\*", lr=1e-4\)\]'
    )
    with pytest.raises(UserError, match=message):
        bound.move_to(params)
    model(torch.ones(3)).backward()
    with pytest.raises(UserError, match=message):
        bound.complete()


def test_what_is_frozen_in_the_loop_is_named_and_evaluated() -> None:
    model = make_model(Two, 0)
    initial = Initial(model)
    bound, params, out = Bound(model), dict(initial), memory(model)
    bound.move_to(params)
    for frozen in (False, True, False):
        model.used.weight.requires_grad_(not frozen)
        bound.collect_into(out)
        model(torch.ones(3)).backward()
        bound.complete()
        assert bound.frozen == ("used.weight",) * frozen
        assert out["used.weight"].any() != frozen
        assert list(initial) == list(params)
        assert model.used.weight.grad is None
        other = {name: array + 1 for name, array in params.items()}
        with evaluating(model, other):
            assert float(model.used.bias) == other["used.bias"]
            assert float(model.used.weight[0, 0]) == other["used.weight"][0, 0]
        assert float(model.used.weight.detach()[0, 0]) == params["used.weight"][0, 0]
    again = Bound(model, 1.0, bound.parameters)
    assert list(again.parameters) == list(params)


def test_initial_parameters_are_not_held() -> None:
    model = make_model(Two, 0)
    initial, first = Initial(model), model.used.weight.data_ptr()
    moved = memory(model)
    Bound(model).move_to(moved)
    assert model.used.weight.data_ptr() != first
    assert np.shares_memory(initial["used.weight"], moved["used.weight"])


class Within(torch.autograd.Function):  # type: ignore[misc]
    """A mean whose gradient is left by a pass of its own, as by checkpoints of activations."""

    @staticmethod
    def forward(ctx: Any, w: Any) -> Any:
        ctx.save_for_backward(w)
        return w.detach().mean()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> None:
        (w,) = ctx.saved_tensors
        with torch.enable_grad():
            torch.autograd.backward(5 * w.sum())


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_losses_are_noted() -> None:
    """A call counts with what it differentiates; where there are scalars, with these alone."""
    losses, found = Losses(), dict[str, Any]()
    w = torch.nn.Parameter(torch.tensor([1.0, 2, 3, 6]))
    hook = w.register_post_accumulate_grad_hook(lambda _: losses.notice())
    quarter = torch.tensor(0.25)
    ways: dict[str, Callable[[], object]] = {
        "one": lambda: w.mean().backward(),
        "a function": lambda: torch.autograd.backward(w.mean()),
        "several": lambda: torch.autograd.backward([w[:2].sum() / 4, w[2:].sum() / 4]),
        "one of each": lambda: (w.square() / w.detach()).backward(torch.full((4,), 0.25)),
        "a factor": lambda: torch.autograd.backward([w.sum()], [quarter]),
        "some with a factor": lambda: torch.autograd.backward(
            (w.sum(), w.new_tensor(0) * w[0]), (quarter, None)
        ),
        "two": lambda: [(k * w.mean()).backward() for k in (0.5, 1.5)],
        "a part of a model behind it": lambda: [w.mean().backward(), (2 * w).backward(w.detach())],
        "a part of a model before it": lambda: [(2 * w).backward(w.detach()), w.mean().backward()],
        "one within another": lambda: Within.apply(w).backward(),
        "another thread": lambda: in_thread(w.mean().backward),
    }
    assert losses.mean() is None
    torch.autograd.grad(w.mean(), w)
    assert losses.mean() is None
    for name, way in ways.items():
        way()
        found[name] = losses.mean()
        losses.clear()
    hook.remove()
    w.mean().backward()
    assert losses.mean() is None
    assert found == pytest.approx(dict.fromkeys(ways, 3.0))


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_apart_from_the_replica_is_trained_alike(device: str, tmp_path: Path) -> None:
    args = [str(PROGRAMS / "device.py"), str(tmp_path), device]
    assert run(2, args, tmp_path, 200).check().output.count("is done") == 4


def test_a_model_that_its_owner_moved_is_told() -> None:
    model = torch.nn.Linear(2, 1)
    kept, bound = dict(Initial(model)), Bound(model)
    model.bfloat16()
    with pytest.raises(UserError, match=r"torch.bfloat16 on cpu, .* worker\.to\(device\)"):
        bound.move_to(kept)


def frozen_sparse() -> Any:
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    return model


SPARSE = r", expected an mpips\.torch\.{}, whose rows are a table of the servers; or leave out"
MODELS: dict[str, tuple[Any, str]] = {
    "sparse": (
        lambda: torch.nn.Embedding(3, 2, sparse=True),
        r"'weight' of a torch\.nn\.Embedding\(sparse=True\)" + SPARSE.format("Embedding"),
    ),
    "sparse bags": (
        lambda: torch.nn.Sequential(torch.nn.EmbeddingBag(3, 2, sparse=True)),
        r"'0\.weight' of a torch\.nn\.EmbeddingBag\(sparse=True\)" + SPARSE.format("EmbeddingBag"),
    ),
    "sparse, trained later": (frozen_sparse, "'0.weight' of a torch.nn.Embedding"),
    "complex": (
        lambda: torch.nn.Linear(2, 2).to(torch.complex64),
        "parameter 'weight' of torch.complex64, expected one of .*bfloat16",
    ),
    "elsewhere": (
        lambda: torch.nn.Linear(2, 2, device="meta"),
        "parameter 'weight' on meta, expected .* the memory of the host",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_trained(name: str) -> None:
    make, message = MODELS[name]
    with pytest.raises(UserError, match=message):
        make_model(make, 0, [mpips.Group("0.*", lr=0.1)])
    if make is frozen_sparse:
        assert list(trained_parameters(make_model(make, 0))) == ["1.weight", "1.bias"]


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
Kind = Callable[[], Any]
KINDS: dict[str, Kind] = {
    "tensors": lambda: torch.utils.data.TensorDataset(X, Y),
    "samples": lambda: list(zip(X, Y, strict=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_data_loader(kind: str) -> None:
    dataset = KINDS[kind]()
    (x, y), _ = TorchSamples(dataset).read(np.array([4, 1]))
    assert torch.equal(x, X[[4, 1]])
    assert torch.equal(y, Y[[4, 1]])
    collated, _ = TorchSamples(dataset, lambda samples: len(samples)).read(np.array([3, 2, 5]))
    assert collated == 3
