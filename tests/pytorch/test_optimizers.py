"""Optimizers of torch: the rule that equals each, its state there and back, and the run's own."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.optim import lr_scheduler  # noqa: E402

import mpips  # noqa: E402
import mpips.torch as mt  # noqa: E402
from jobs.muon import Muon  # noqa: E402
from mpips.config import Config  # noqa: E402
from mpips.errors import UserError  # noqa: E402
from mpips.layout import Layout  # noqa: E402
from mpips.optim import RULES, make_rule  # noqa: E402
from mpips.torch.rule_of import _patterns, read_optimizer  # noqa: E402
from mpips.torch.state import KINDS, TorchState, torch_optimizer  # noqa: E402

TRAINED = Layout.of({"a": (2, 3), "b": (4,)})
LAYOUT = Layout.of({"a": (2, 3), "b": (4,), "mean": (2,)})
NUMBERS = {"momentum": 0.7, "decay": 0.8, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3}
ADAM: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}
T = torch.optim
OPTIMIZERS: dict[str, Any] = {  # torch's of each rule, with these numbers
    "sgd": partial(T.SGD, lr=0.1),
    "momentum": partial(T.SGD, lr=0.1, momentum=0.7),
    "nesterov": partial(T.SGD, lr=0.1, momentum=0.7, nesterov=True),
    "adagrad": partial(T.Adagrad, lr=0.1, eps=1e-3),
    "rmsprop": partial(T.RMSprop, lr=0.1, alpha=0.8, eps=1e-3),
    "adadelta": partial(T.Adadelta, lr=0.1, rho=0.8, eps=1e-3),
    "adam": partial(T.Adam, **ADAM),
    "adamw": partial(T.AdamW, **ADAM, weight_decay=0),
    "amsgrad": partial(T.Adam, **ADAM, amsgrad=True),
    "nadam": partial(T.NAdam, **ADAM),
    "radam": partial(T.RAdam, **ADAM),
}


def net_of_two() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))


@pytest.fixture
def in_64_bits() -> Iterator[None]:
    """Have torch keep scalars, such as NAdam's, in 64 bits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("in_64_bits")
def test_a_rule_and_its_state_are_torchs_there_and_back(name: str, decay: float) -> None:
    numbers = {**NUMBERS, "weight_decay": decay}
    rule, rng = make_rule(name, **numbers), np.random.default_rng(0)
    params, *slots = np.zeros((1 + len(rule.slots), TRAINED.size))
    theirs = [torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in TRAINED.shapes]
    opt, (equal, groups) = OPTIMIZERS[name](theirs), read_optimizer(OPTIMIZERS[name], net_of_two())
    numbers_read = {"optimizer": name, "lr": 0.1, "weight_decay": 0.0, **NUMBERS}
    assert equal.options().items() <= numbers_read.items()
    assert equal.options().keys() == {"optimizer", *(f.name for f in fields(equal))}, "all are read"
    assert not groups
    opt.param_groups[0]["weight_decay"] = decay
    for step in range(1, 201):
        grad = rng.standard_normal(TRAINED.size)
        rule.apply(params, grad, tuple(slots), step, 0.1)
        for p, view in zip(theirs, TRAINED.views(grad).values(), strict=True):
            p.grad = torch.tensor(view)
        opt.step()
    for p, view in zip(theirs, TRAINED.views(params).values(), strict=True):
        torch.testing.assert_close(p.data, torch.tensor(view), rtol=1e-12, atol=1e-12)
    config = Config(optimizer=name, lr=0.1, **numbers)
    found, expected = torch_optimizer(config, TRAINED, slots, 200).state_dict(), opt.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(found["state"], expected["state"])
    back = TorchState(found, config, LAYOUT, ("mean",))
    assert back.steps == (0 if name in ("sgd", "momentum", "nesterov") else 200)
    assert back.slot_names == rule.slots
    for slot, vector in zip(rule.slots, slots, strict=True):
        whole = back.read_slot(slot)
        np.testing.assert_array_equal(whole, [*vector, 0, 0])
        np.testing.assert_array_equal(back.read_slot(slot, 3, 11, np.ones(8)), whole[3:11])
    opt.load_state_dict(found)
    opt.step()


@pytest.mark.skipif(not hasattr(T, "Muon"), reason="torch < 2.9")
@pytest.mark.parametrize("shape", [(12, 3), (3, 12), (5, 5)])
def test_muon_of_the_examples_is_torchs(shape: tuple[int, int]) -> None:
    """The outputs of a layer come first in torch's matrix, whose iteration has 16 bits."""
    weight, given = torch.nn.Parameter(torch.zeros(shape)), {"lr": 0.1, "weight_decay": 0.1}
    opt, axes = T.Muon([weight], **given), (lambda g: g, np.transpose)
    found = [[turned(np.zeros(shape)) for _ in range(2)] for turned in axes]
    for step in range(1, 4):
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        opt.step()
        for k, turned in enumerate(axes):
            w, m = found[k]
            muon, grad = Muon(**given, outputs=k), turned(weight.grad.double().numpy())
            w, m, _ = muon.update("w", w, grad, m, 0 * w, t=step, lr=0.1)
            found[k] = [w, m]
            theirs = weight.detach().numpy()
            assert np.linalg.norm(turned(w) - theirs) < 0.1 * np.linalg.norm(theirs)


# Read as a rule ------------------------------------------------------------------------------


def test_groups_of_an_optimizer_become_patterns() -> None:
    """Frozen parameters are in none."""

    def by_shape(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        flat = [p for p in params if p.dim() < 2]
        first, last = (p for p in params if p.dim() > 1)
        groups = [{"params": flat, "weight_decay": 0.0}, {"params": [last], "lr": 0.5}]
        return torch.optim.AdamW([*groups, {"params": [first]}])

    def decayed(params: Any) -> torch.optim.Optimizer:
        first, *_, last = params
        return torch.optim.AdamW([{"params": [first]}, {"params": [last], "weight_decay": 0.0}])

    model = net_of_two()
    rule, groups = read_optimizer(by_shape, model)
    assert rule == mpips.AdamW(1e-3, 0.9, 0.999, 1e-8, 0.01)  # torch's defaults
    weights = [mpips.Group("*.bias", weight_decay=0.0), mpips.Group("1.*", weight_decay=0.0)]
    assert groups == [*weights, mpips.Group("2.weight", lr=0.5)]
    model.requires_grad_(False)
    model[2].bias.requires_grad_(True)
    assert read_optimizer(decayed, model)[1] == [mpips.Group("*.bias", weight_decay=0.0)]


def test_the_patterns_of_a_deep_model_are_found_at_once() -> None:
    """Each norm has a pattern of its own, beside one of all biases."""
    parts = ("norm.weight", "norm.bias", "mix.weight", "mix.bias")
    names = [f"layers.{k}.{part}" for k in range(1000) for part in parts]
    flat = [name for name in names if not name.endswith("mix.weight")]
    start = time.perf_counter()
    found = _patterns(flat, names)
    assert time.perf_counter() - start < 5
    assert found == ["*.bias", *sorted(f"layers.{k}.norm.*" for k in range(1000))]


def test_a_name_may_have_letters_that_patterns_use() -> None:
    def rated(params: Any) -> torch.optim.Optimizer:
        first, *rest = params
        return torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": rest}])

    for names, pattern in ((("a:[b];", "c"), "a?[[]b]?.weight"), (("a*", "ab"), "a[*].weight")):
        odd = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in names})
        assert read_optimizer(rated, odd)[1] == [mpips.Group(pattern, lr=0.5)]
    alike = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in ("a:", "a;")})
    with pytest.raises(UserError, match=r"group with 'a:.weight', expected names without : and ;"):
        read_optimizer(rated, alike)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "torch.optim.LBFGS, expected one of torch.optim.SGD"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True of torch.optim.AdamW"),
        (lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.5), "dampening=0.5 .*expected 0"),
        (lambda p: torch.optim.SGD([next(iter(p))], 0.1), "without parameter '0.bias' and 4 more"),
        (lambda p: torch.optim.SGD([torch.zeros(2)], 0.1), "of other parameters"),
        (lambda p: torch.optim.Adam([{"params": p, "eps": 1.0}]), "eps=1.0 of a parameter group"),
        (lambda: 3, "raised TypeError"),
    ],
)
def test_an_optimizer_that_no_rule_equals_is_refused(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_optimizer(make, net_of_two())


# A state that a run begins with --------------------------------------------------------------


@pytest.mark.parametrize("groups", ["", "*b: weight_decay=0.5, lr=0.2"])
@pytest.mark.parametrize(("left_out", "kept"), [(2, [0, 1]), (7, [0])])
def test_each_parameter_has_its_own_number_of_steps(
    left_out: int, kept: list[int], groups: str
) -> None:
    c = Config(optimizer="adam", groups=groups)
    vectors = np.random.default_rng(0).random((2, TRAINED.size))
    state = torch_optimizer(c, TRAINED, [*vectors], 7, {"b": left_out}).state_dict()
    assert list(state["state"]) == kept
    found = TorchState(state, c, LAYOUT, ("mean",))
    assert (found.steps, found.skipped) == (7, {"b": left_out})
    np.testing.assert_array_equal(found.read_slot("m", 0, 6), vectors[0, :6])


def test_a_state_may_be_in_the_order_of_torchs_own_groups() -> None:
    """With parameters that are frozen: those of a checkpoint of Lightning."""
    a, b, frozen = (torch.nn.Parameter(torch.ones(s)) for s in (*TRAINED.shapes, (2,)))
    opt = torch.optim.Adam([{"params": [frozen, b], "lr": 0.2}, {"params": [a]}], 0.1)
    a.grad, b.grad = torch.ones(2, 3), torch.full((4,), 2.0)
    opt.step()
    c, order = Config(optimizer="adam", lr=0.1, groups="b: lr=0.2"), [["frozen", "b"], ["a"]]
    found = TorchState(opt.state_dict(), c, LAYOUT, ("mean",), order)
    np.testing.assert_allclose(found.read_slot("m"), [0.1] * 6 + [0.2] * 4 + [0, 0], rtol=1e-6)
    assert (found.steps, found.skipped) == (1, {})


def test_a_fresh_optimizer_and_another_rate_will_do() -> None:
    opt = torch.optim.Adam([torch.nn.Parameter(torch.zeros(s)) for s in TRAINED.shapes], 3.0)
    lr_scheduler.ConstantLR(opt)  # leaves a rate of its own
    found = TorchState(opt.state_dict(), Config(optimizer="adam"), LAYOUT, ("mean",))
    assert (found.steps, found.read_slot("m").any()) == (0, False)


Change = Callable[[dict[str, Any]], Any]


def group(**fields: Any) -> Change:
    """Return what changes the only group of parameters."""
    return lambda state: state["param_groups"][0].update(fields)


SGD = torch.optim.SGD([torch.zeros(s) for s in TRAINED.shapes]).state_dict()
WRONG: dict[str, tuple[str, Change, str]] = {
    "no state": ("adam", lambda s: s.clear(), "optimizer_state of type dict, expected what the st"),
    "another rule": ("adam", lambda s: s.update(SGD), "without betas, expected one of torch.optim"),
    "other numbers": ("adamw", group(betas=(0.9, 0.99)), r"\(0.9, 0.99\), expected \(0.9, 0.999\)"),
    "a decay": ("adamw", group(weight_decay=0.01), "with weight_decay 0.01, expected 0"),
    "decoupled": ("adam", group(decoupled_weight_decay=True), "decay True, expected False"),
    "a parameter less": ("adam", group(params=[0]), r"of \[1\] parameters, expected \[2\]"),
    "another shape": (
        "momentum",
        lambda s: s["state"][0].update(momentum_buffer=torch.zeros(3, 2)),
        r"momentum_buffer of shape \(3, 2\) for 'a', expected \(2, 3\)",
    ),
    "easgd": ("sgd", group(), "easgd, whose workers each have an optimizer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_state_that_does_not_fit_is_refused(case: str) -> None:
    name, change, message = WRONG[case]
    c = Config(optimizer=name, mode="easgd" if case == "easgd" else "sync")
    vectors = [np.ones(TRAINED.size) for _ in RULES[name].slots]
    state = torch_optimizer(c, TRAINED, vectors, 7).state_dict()
    change(state)
    with pytest.raises(UserError, match=message):
        TorchState(state, c, LAYOUT, ("mean",))


# The run's own, which pushes -----------------------------------------------------------------


def optimizer(pushed: list[float], *rates: float) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates]
    return mt.Optimizer(groups, pushed.append, pushed.clear)


def test_hooks_see_a_step() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook as of_all

    pushed, called = list[float](), list[str]()
    opt = optimizer(pushed, 0.5)
    opt.step()
    opt.register_step_pre_hook(lambda *_: called.append("before"))
    opt.register_step_post_hook(lambda *_: called.append("behind"))
    handle = of_all(lambda *_: called.append("behind any"))
    opt.step()
    handle.remove()
    assert called == ["before", "behind", "behind any"]
    assert pushed == [1, 1]


def test_a_push_carries_what_the_rates_were_multiplied_by() -> None:
    """A script that saves the rates with its scheduler's state goes on at them."""
    pushed, saved = list[float](), list[dict[str, Any]]()
    for _ in range(2):
        opt = optimizer(pushed, 0.5, 0.25, 0.0)
        scheduler = lr_scheduler.StepLR(opt, 1, 0.1)
        for each, state in zip((opt, scheduler), saved, strict=False):
            each.load_state_dict(state)
        for _ in range(2):
            opt.step()
            scheduler.step()
        with pytest.warns(UserWarning, match=r"rates alone: mpips\.torch\.optimizer_state\(run\)"):
            saved = [opt.state_dict(), scheduler.state_dict()]
    plateau = lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    for loss in (1.0, 2.0):
        plateau.step(loss)
    opt.step()
    assert pushed == pytest.approx([1, 0.1, 0.01, 0.001, 0.00005])


STATE = {"state": {0: {"momentum_buffer": torch.zeros(2)}}, "param_groups": []}
REFUSED: dict[str, tuple[dict[str, float], Callable[[Any], object]]] = {
    r"went different ways, by \[2\.0, 1\.0\], expected one": ({"lr": 1.0}, lambda o: o.step()),
    r"rates \[-1\.0, 0\.25\] of the parameter groups": ({"lr": -1.0}, lambda o: o.step()),
    r"weight decays \[0\.1, None\] .*, as in the run": ({"weight_decay": 0.1}, lambda o: o.step()),
    "a parameter group that is added in a run": ({}, lambda o: o.add_param_group({"params": []})),
    r"load_state_dict\(\) .*, optimizer_state=state": ({}, lambda o: o.load_state_dict(STATE)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_push_can_carry_is_refused(message: str) -> None:
    changed, call = REFUSED[message]
    pushed = list[float]()
    opt = optimizer(pushed, 0.5, 0.25)
    opt.param_groups[0].update(changed)
    with pytest.raises(UserError, match=message):
        call(opt)
    assert not pushed


def test_a_group_that_began_without_a_rate_keeps_none() -> None:
    opt = optimizer([], 0.5, 0.0)
    opt.param_groups[1]["lr"] = 0.1
    with pytest.raises(UserError, match=r"began with \[0\.5, 0\.0\], expected a rate of 0 that st"):
        opt.step()


def test_a_scaler_is_refused_at_its_first_step() -> None:
    """One that is not enabled, as where there is no device, hands a step on."""
    pushed = list[float]()
    opt = optimizer(pushed, 0.5)
    torch.amp.GradScaler("cpu", enabled=False).step(opt)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(opt.param_groups[0]["params"][0].sum()).backward()
    with pytest.raises(UserError, match=r"a step by a GradScaler, .* train in bfloat16"):
        scaler.step(opt)
    assert pushed == [1]
