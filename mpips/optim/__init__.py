"""Update rules, schedules, clipping, and corrections for stale gradients."""

from mpips.optim.making import clip_factor, make_rule, rated, rule_of, schedule, warm
from mpips.optim.parts import FrozenMask, Range, Ranges, common, grouped, leaving_out
from mpips.optim.rule import Part, Rule, RuleState, Slots, Sum
from mpips.optim.rules import RULES, Averaging, Change, Sgd

__all__ = [
    "RULES", "Averaging", "Change", "FrozenMask", "Part", "Range", "Ranges", "Rule", "RuleState",
    "Sgd", "Slots", "Sum", "clip_factor", "common", "grouped", "leaving_out", "make_rule", "rated",
    "rule_of", "schedule", "warm",
]  # fmt: skip
