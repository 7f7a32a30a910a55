"""Update rules, schedules and clipping; what servers do about stale gradients."""

from mpips.optim.clipping import clip_factor
from mpips.optim.groups import grouped
from mpips.optim.loops import warm
from mpips.optim.rules import RULES, Change, Part, Rule, RuleState, Sgd, Slots, make_rule
from mpips.optim.schedules import schedule

__all__ = [
    "RULES",
    "Change",
    "Part",
    "Rule",
    "RuleState",
    "Sgd",
    "Slots",
    "clip_factor",
    "grouped",
    "make_rule",
    "schedule",
    "warm",
]
