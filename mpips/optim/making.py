"""Making of a job's update rule, and of its compiled loops."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from mpips.config import Config
from mpips.config.user_file import names_class
from mpips.errors import UserError, unknown
from mpips.kernels import atomics, exchange, vectors
from mpips.optim.rule import Rule, Sum
from mpips.optim.rules import RULES, averaging_rule

FIELDS = ("before", "ranges")  # of a rule, which are no hyperparameters
SHARES = ("momentum", "beta1", "beta2", "decay")  # hyperparameters below 1


def rule_of(config: Config) -> Rule:
    """Build the rule of a job.

    Raises:
        UserError: As `make_rule`.
    """
    c = config
    rule = make_rule(
        c.optimizer, momentum=c.momentum, beta1=c.beta1, beta2=c.beta2, eps=c.eps,
        weight_decay=c.weight_decay, decay=c.decay,
    )  # fmt: skip
    if not c.ema:
        return rule
    numbers = {each.name: getattr(rule, each.name) for each in fields(rule)}
    kind: Any = type(rule)
    found: Rule = averaging_rule(kind)(**numbers, decay_of_mean=c.ema)
    return found


def rated(config: Config) -> Config:
    """Return a configuration with the learning rate that a user's rule has by default.

    Raises:
        UserError: If there is no such rule, or it has none.
    """
    if config.lr is not None or not names_class(config.optimizer):
        return config
    from mpips.optim import own_rules

    return replace(config, lr=own_rules.default_rate(config.optimizer))


def make_rule(name: str, **options: float) -> Rule:
    """Build the rule called `name`; hyperparameters that it does not have are ignored.

    Args:
        name: A key of `RULES`, or what names a class of the user's (`mpips.optim.own_rules`).
        options: Hyperparameters of any rule.

    Raises:
        UserError: If there is no such rule, or a hyperparameter that it has is out of range.
    """
    if names_class(name):
        from mpips.optim import own_rules

        return own_rules.make_own_rule(name, options.get("weight_decay", 0.0))
    if name not in RULES:
        raise unknown("optimizer", name, RULES)
    names = {found.name for found in fields(RULES[name]) if found.name not in FIELDS}
    used = {key: float(value) for key, value in options.items() if key in names}
    for key, value in used.items():
        if key in SHARES and not 0 <= value < 1:
            raise UserError(f"{key}={value}", f"0 <= {key} < 1", f"it is a share kept by {name}")
        if not 0 <= value < math.inf:
            raise UserError(f"{key}={value}", f"a finite {key} >= 0")
    make: Callable[..., Rule] = RULES[name]
    return make(**used)


def warm(rule: Rule, dtype: np.typing.DTypeLike, rounds: bool = False) -> None:
    """Compile, or load from the cache on disk, every loop that a run needs.

    Args:
        rule: The rule of the run.
        dtype: dtype of the parameters, float32 or float64.
        rounds: Whether it has rounds.
    """
    rule.check(dtype)
    words = np.zeros(1, np.int64)
    atomics.publish(words, 0, 1)
    atomics.observe(words, 0)
    ours = vectors.addresses_of([words])
    atomics.find_ahead(ours, np.zeros(1, np.int64), words, words, 0)
    atomics.meet(ours, 1, 0)
    atomics.meet_and_add(ours, 1, 0, ours[:0], np.zeros(1))
    params, grad, *slots = (np.ones(1, dtype) for _ in range(2 + len(rule.slots)))
    addresses = vectors.addresses_of([grad])
    vectors.sum_rows(addresses, np.ones(1), 0, params)
    vectors.sum_rows(addresses[:0], np.ones(0), 0, np.zeros(1))
    vectors.sum_squares(grad)
    vectors.all_finite(grad)
    vectors.copy_finite(grad, params)
    vectors.scale(grad, 1.0)
    vectors.add_scaled(grad, 1.0, params, 1.0)
    rule.init(params, tuple(slots))
    if rule.whole:  # it has no loop
        return
    rule.apply(params, grad, tuple(slots), 1, 0.1)
    if not rounds:
        exchange.pull(ours[:0], ours[:0], np.zeros((0, 3), np.int64), words, params, words)
        exchange.reached(ours[:0], 1, 0)
    else:
        total = Sum(addresses, np.ones(1), 0, np.ones(1, dtype))
        rule.apply_sum(params, total, tuple(slots), 1, 0.1)
