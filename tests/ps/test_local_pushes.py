"""Rates of the compiled loop of local pushes."""

import numpy as np
import pytest

from mpips.config import Config
from mpips.optim import RULES, rule_of
from mpips.ps.local_pushes import UnknownRate, numbers_of


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_rates_made_of_an_unknown_one_have_the_bits_of_the_rule(
    name: str, decay: float, ema: float
) -> None:
    rule = rule_of(Config(optimizer=name, weight_decay=decay, ema=ema))
    for update, lr in enumerate([0.1, 0.0, *np.random.default_rng(0).random(20)], 1):
        numbers = np.reshape(numbers_of(rule, update), (-1, 3)).tolist()
        made = [lr * times / over * then if over else times for times, over, then in numbers]
        assert np.array(made).tobytes() == np.array(rule.scalars(update, lr)).tobytes()


def test_other_operations_with_it_are_refused() -> None:
    with pytest.raises(AssertionError):
        UnknownRate() / 2.0 / 2.0
    with pytest.raises(AssertionError):
        UnknownRate() * 2.0 * 2.0 * 2.0
    with pytest.raises(TypeError):
        UnknownRate() + 1.0
