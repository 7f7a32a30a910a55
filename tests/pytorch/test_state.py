"""What an optimizer of torch has kept, as a run's rule keeps it, and back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpips.config import Config  # noqa: E402
from mpips.errors import UserError  # noqa: E402
from mpips.layout import Layout  # noqa: E402
from mpips.optim import RULES, make_rule  # noqa: E402
from mpips.torch.state import KINDS, TorchState, torch_optimizer  # noqa: E402

LAYOUT = Layout.of({"a": (2, 3), "b": (4,), "mean": (2,)})
TRAINED = Layout.of({"a": (2, 3), "b": (4,)})


def config(name: str, **fields: Any) -> Config:
    return Config(optimizer=name, lr=0.1, **fields)


def state_of(c: Config, steps: int = 7) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return a state of torch's optimizer of a job, and the vectors that are in it."""
    rng = np.random.default_rng(0)
    vectors = [rng.random(TRAINED.size) for _ in RULES[c.optimizer].slots]
    return torch_optimizer(c, TRAINED, vectors, steps).state_dict(), vectors


@pytest.mark.parametrize("groups", ["", "*b: weight_decay=0.5, lr=0.2"])
@pytest.mark.parametrize("name", KINDS)
def test_a_state_is_the_same_there_and_back(name: str, groups: str) -> None:
    c = config(name, groups=groups)
    state, vectors = state_of(c)
    found = TorchState(state, c, LAYOUT, ("mean",))
    assert found.slot_names == RULES[name].slots
    assert found.steps == (0 if name in ("sgd", "momentum", "nesterov") else 7)
    for slot, vector in zip(found.slot_names, vectors, strict=True):
        whole = found.read_slot(slot)
        np.testing.assert_array_equal(whole, [*vector, 0, 0])
        part = found.read_slot(slot, 3, 11, np.full(8, np.nan))
        np.testing.assert_array_equal(part, whole[3:11])


def test_each_parameter_has_its_own_number_of_steps() -> None:
    c = config("adam")
    vectors = [np.ones(TRAINED.size)] * 2
    for left_out, kept in ((2, [0, 1]), (7, [0])):
        state = torch_optimizer(c, TRAINED, vectors, 7, {"b": left_out}).state_dict()
        assert list(state["state"]) == kept
        found = TorchState(state, c, LAYOUT, ("mean",))
        assert (found.steps, found.skipped) == (7, {"b": left_out})


def test_a_rule_goes_on_counting() -> None:
    """Adam's corrections of the bias are those of all steps."""
    for name in ("adam", "adamw"):
        fresh, begun = make_rule(name), make_rule(name).continued(9)
        assert begun.scalars(2, 0.1) == fresh.scalars(11, 0.1)


Change = Callable[[dict[str, Any]], Any]


def group(**fields: Any) -> Change:
    """Return what changes the only group of parameters."""
    return lambda state: state["param_groups"][0].update(fields)


WRONG: dict[str, tuple[str, Change, str]] = {
    "no state": ("adam", lambda s: s.clear(), "optimizer_state of type dict, expected what the st"),
    "another rule": (
        "adam",
        lambda s: s.update(torch.optim.SGD([torch.zeros(2, 3), torch.zeros(4)]).state_dict()),
        "without betas, expected one of torch.optim.Adam",
    ),
    "decoupled": ("adam", group(decoupled_weight_decay=True), "decay True, expected False"),
    "other numbers": ("adamw", group(betas=(0.9, 0.99)), r"\(0.9, 0.99\), expected \(0.9, 0.999\)"),
    "a decay": ("adamw", group(weight_decay=0.01), "with weight_decay 0.01, expected 0"),
    "another variant": ("adam", group(amsgrad=True), "with amsgrad True, expected False"),
    "a parameter less": ("adam", group(params=[0]), r"of \[1\] parameters, expected \[2\]"),
    "another shape": (
        "momentum",
        lambda s: s["state"][0].update(momentum_buffer=torch.zeros(3, 2)),
        r"momentum_buffer of shape \(3, 2\) for 'a', expected \(2, 3\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str) -> None:
    name, change, message = WRONG[case]
    state, _ = state_of(config(name))
    change(state)
    with pytest.raises(UserError, match=message):
        TorchState(state, config(name), LAYOUT, ("mean",))


def test_a_state_for_easgd_is_refused() -> None:
    state, _ = state_of(config("sgd"))
    with pytest.raises(UserError, match="easgd, whose workers each have an optimizer"):
        TorchState(state, config("sgd", mode="easgd"), LAYOUT, ("mean",))


def test_a_fresh_optimizer_and_another_rate_will_do() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    opt = torch.optim.Adam(parameters, 3.0)
    torch.optim.lr_scheduler.ConstantLR(opt)  # leaves a rate of its own
    found = TorchState(opt.state_dict(), config("adam"), LAYOUT, ("mean",))
    assert found.steps == 0
    assert not found.read_slot("m").any()
