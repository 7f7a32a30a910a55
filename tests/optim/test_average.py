"""The average of the parameters that servers keep, against the serial one."""

from pathlib import Path

import numpy as np
import pytest

from mpips.config import Config
from mpips.config.jobfile import resolve
from mpips.errors import UserError
from mpips.kernels.vectors import addresses_of
from mpips.layout import Layout
from mpips.optim import Sum, grouped, rule_of

LION = f"{Path(__file__).parents[2] / 'jobs' / 'lion_rule.py'}:Lion"
N, DECAY = 70, 0.75


@pytest.mark.parametrize(
    ("name", "summed"),
    [("sgd", False), ("adam", True), ("amsgrad", False), ("lion", False), (LION, False)],
)
def test_a_rule_with_an_average(name: str, summed: bool) -> None:
    rng = np.random.default_rng(2)
    plain = rule_of(Config(optimizer=name, weight_decay=0.01))
    rule = rule_of(Config(optimizer=name, weight_decay=0.01, ema=DECAY)).continued(3)
    plain = plain.continued(3)
    assert rule.slots == ("ema", *plain.slots)
    params = rng.normal(size=N)
    slots = tuple(np.full(N, np.nan) for _ in rule.slots)
    rule.init(params, slots)
    alone, state = params.copy(), tuple(np.zeros(N) for _ in plain.slots)
    mean = params.copy()
    assert np.array_equal(slots[0], params)
    for t in range(1, 6):
        grad = rng.normal(size=N)
        plain.apply(alone, grad, state, t, 0.1)
        mean = DECAY * mean + (1 - DECAY) * alone
        if summed:
            rule.apply_sum(
                params, Sum(addresses_of([grad]), np.ones(1), 0, np.empty(30)), slots, t, 0.1
            )
        else:
            rule.apply(params, grad, slots, t, 0.1)
    np.testing.assert_allclose(params, alone, rtol=1e-13)
    np.testing.assert_allclose(slots[0], mean, rtol=1e-13)
    for mine, his in zip(slots[1:], state, strict=True):
        np.testing.assert_allclose(mine, his, rtol=1e-13)


def test_what_is_no_parameter_has_its_newest_value_as_average() -> None:
    layout = Layout.of({"w": (4,), "running_mean": (3,)})
    rule = rule_of(Config(optimizer="momentum", ema=DECAY))
    parts = grouped(rule, layout, (), 0.1, ["running_mean"]).parts(0, 7)
    (_, last) = parts
    params, slots = np.ones(3), (np.zeros(3), np.full(3, 7.0))
    last.rule.apply(params, np.array([0.5, 0, 1]), slots, 1, 0.1)
    assert np.array_equal(params, [0.5, 1, 0])
    assert np.array_equal(slots[0], params)
    assert np.array_equal(slots[1], [7, 7, 7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "local_sgd", "ema": 0.9}, "ema 0.9 in mode local_sgd, expected mode async or"),
        ({"ema": 1.0}, r"ema 1.0, expected a number in \[0, 1\)"),
        ({"eval_ema": True}, "eval_ema by itself, expected ema > 0 and evaluators >= 1; they"),
        ({"eval_ema": True, "evaluators": 1}, "eval_ema by itself"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(options)
