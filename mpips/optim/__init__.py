"""Update rules, schedules and clipping; what servers do about stale gradients."""

from mpips.optim.rules import (
    RULES,
    Rule,
    Sgd,
    Slots,
    clip_factor,
    make_rule,
    schedule,
    warm,
)

__all__ = [
    "RULES",
    "Rule",
    "Sgd",
    "Slots",
    "clip_factor",
    "make_rule",
    "schedule",
    "warm",
]
