"""Construction of a job's update rule, its loops and its learning rate."""

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

FIELDS = ("before", "ranges")  # fields of a rule that are not hyperparameters
SHARES = ("momentum", "beta1", "beta2", "decay")  # hyperparameters below 1


def rule_of(config: Config) -> Rule:
    """Build the update rule of a job.

    Raises:
        UserError: As `make_rule`.
    """
    c = config
    given = {} if c.weight_decay is None else {"weight_decay": c.weight_decay}
    rule = make_rule(
        c.optimizer, momentum=c.momentum, beta1=c.beta1, beta2=c.beta2, eps=c.eps, decay=c.decay,
        **given,
    )  # fmt: skip
    if not c.ema:
        return rule
    numbers = {each.name: getattr(rule, each.name) for each in fields(rule)}
    kind: Any = type(rule)
    return averaging_rule(kind)(**numbers, decay_of_mean=c.ema)


def rated(config: Config) -> Config:
    """Return the configuration, with the default learning rate of a user's rule if `lr` is None.

    Raises:
        UserError: If there is no such rule, or it has no learning rate.
    """
    if config.lr is not None or not names_class(config.optimizer):
        return config
    from mpips.optim import own_rules

    return replace(config, lr=own_rules.default_rate(config.optimizer))


def make_rule(name: str, **options: float) -> Rule:
    """Build the rule called `name`.

    Args:
        name: A key of `RULES`, or ``file.py:Class`` of the user's (`mpips.optim.own_rules`).
        options: Hyperparameters; those that this rule does not have are ignored.

    Raises:
        UserError: If there is no such rule, or one of its hyperparameters is out of range.
    """
    if names_class(name):
        from mpips.optim import own_rules

        return own_rules.make_own_rule(name, options.get("weight_decay"))
    if name not in RULES:
        raise unknown("optimizer", name, RULES)
    names = {found.name for found in fields(RULES[name]) if found.name not in FIELDS}
    used = {key: float(value) for key, value in options.items() if key in names}
    for key, value in used.items():
        if key in SHARES and not 0 <= value < 1:
            raise UserError(f"{key}={value}", f"0 <= {key} < 1", f"{name} keeps that share")
        if not 0 <= value < math.inf:
            raise UserError(f"{key}={value}", f"a finite {key} >= 0")
    make: Callable[..., Rule] = RULES[name]
    return make(**used)


def warm(rule: Rule, dtype: np.typing.DTypeLike, rounds: bool = False) -> None:
    """Compile, or load from the cache on disk, every loop that a run needs.

    Args:
        rule: The rule of the run.
        dtype: dtype of the parameters, float32 or float64.
        rounds: Whether the run makes rounds (modes sync, local_sgd and hybrid).
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
    if rule.whole:  # such a rule has no loop
        return
    rule.apply(params, grad, tuple(slots), 1, 0.1)
    if not rounds:
        none = ours[:0]
        exchange.pull(none, 0, none, none, np.zeros((0, 3), np.int64), words, params, words)
        header = np.zeros(exchange.HEADER, np.int64)
        reals = header.view(np.float64)
        exchange.announce(words, header, reals, none, none, 0, 0, 0, 0, 0, 0, 0.0, 0, 1.0)
        exchange.reached(none, 1, 0)
    else:
        total = Sum(addresses, np.ones(1), 0, np.ones(1, dtype))
        rule.apply_sum(params, total, tuple(slots), 1, 0.1)
        report = np.zeros(exchange.REPORT)
        barriers = ours, 0, ours[:0], report.copy(), report, np.zeros(2)
        args = params, *slots, addresses, 0, grad, np.ones(1), 2, 0, *rule.scalars(1, 0.1)
        rule.round_loop(*barriers, *args, *report)


def schedule(
    name: str,
    lr: float,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    step_every: int = 0,
    step_factor: float = 0.1,
) -> Callable[[int], float]:
    """Return the learning rate as a function of the 1-based number of the update.

    In every schedule, the rate rises linearly from ``lr / warmup_steps`` at step 1 to its full
    value at step `warmup_steps`.

    Args:
        name: ``constant``; ``warmup``, constant after a warm-up; ``cosine``, half a cosine from
            `lr` after the warm-up to 0 after `total_steps`; or ``step``, multiplied by
            `step_factor` after every `step_every` steps, counted from the first step of the run.
        lr: The full learning rate.
        total_steps: Length of the run in steps; only ``cosine`` depends on it.
        warmup_steps: Length of the warm-up in steps, 0 for none.
        step_every: Steps between two drops of ``step``.
        step_factor: Factor of each drop.

    Raises:
        UserError: If there is no such schedule, or one of its numbers is missing or negative.

    References: Goyal et al., arXiv 1706.02677 (warm-up); Loshchilov and Hutter, ICLR 2017 (cosine).
    """
    shapes: dict[str, Callable[[int], float]] = {
        "constant": lambda step: 1.0,
        "warmup": lambda step: 1.0,
        "cosine": lambda step: _cosine(step, warmup_steps, total_steps),
        "step": lambda step: step_factor ** ((step - 1) // step_every),
    }
    if name not in shapes:
        raise unknown("schedule", name, shapes)
    _need(name, "warmup_steps", warmup_steps, name == "warmup")
    _need(name, "step_every", step_every, name == "step")
    shape = shapes[name]
    if not warmup_steps:
        return (lambda step: lr) if name == "constant" else lambda step: lr * shape(step)
    return lambda step: lr * min(1.0, step / warmup_steps) * shape(step)


def _cosine(step: int, begin: int, end: int) -> float:
    """Return the factor that falls from 1 at step begin + 1 to 0 after step `end`."""
    share = (step - 1 - begin) / max(1, end - begin)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, share))))


def _need(name: str, option: str, value: int, needed: bool) -> None:
    """Raise UserError unless `value` is at least 1, or at least 0 if it is not `needed`."""
    if value < needed:
        flag = f"--{option.replace('_', '-')}"
        constraint = f"{option} >= {int(needed)} with schedule {name!r}"
        raise UserError(f"{option}={value}", constraint, f"give {flag} N")


def clip_factor(sum_of_squares: float, max_norm: float) -> float:
    """Return the factor, at most 1, that clips a gradient's norm to `max_norm`.

    Args:
        sum_of_squares: Sum of the squares of the whole gradient, over all shards.
        max_norm: Largest norm allowed; 0 turns clipping off.

    Returns:
        1 if the norm is within the bound. NaN if the sum is NaN. 0 if the sum is infinite: 0 times
        an infinite element is NaN, so the error stays visible.
    """
    norm = math.sqrt(sum_of_squares)
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm
