"""Settings of an update rule for some arrays only."""

import dataclasses
from collections.abc import Sequence

from mpips.config.groups import Group, members
from mpips.errors import UserError, nearest
from mpips.layout import Layout
from mpips.optim.rules import Change, Part, Rule


def grouped(
    rule: Rule, layout: Layout, groups: Sequence[Group], lr: float, statistics: Sequence[str] = ()
) -> Rule:
    """Return a rule that knows where in the vector which settings hold (`Rule.parts`).

    Args:
        rule: The rule, with the settings of the run.
        layout: Of the vector.
        groups: The groups; none leave the rule as it is.
        lr: The run's learning rate, before its schedule.
        statistics: Names of what is no parameter, and of no group.

    Raises:
        UserError: If a group has no array.
    """
    parameters = [name for name in layout.names if name not in statistics]
    found = members(parameters, groups)
    settings: dict[str, tuple[Rule, float]] = dict.fromkeys(parameters, (rule, 1.0))
    settings |= dict.fromkeys(statistics, (Change(), 1.0))
    for group, names in zip(groups, found[1:], strict=True):
        if not names:
            raise _without_array(group, parameters)
        decay = rule.weight_decay if group.weight_decay is None else group.weight_decay
        own = dataclasses.replace(rule, weight_decay=float(decay))
        scale = 1.0 if group.lr is None else group.lr / lr
        settings |= dict.fromkeys(names, (own, scale))
    parts: list[Part] = []
    for name, (begin, end) in layout.slices().items():
        own, scale = settings[name]
        if parts and (parts[-1].rule, parts[-1].scale) == (own, scale):
            parts[-1] = parts[-1]._replace(end=end)
        elif begin < end:
            parts.append(Part(begin, end, own, scale))
    return dataclasses.replace(rule, ranges=tuple(parts)) if groups or statistics else rule


def _without_array(group: Group, names: Sequence[str]) -> UserError:
    some = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    got = f"group {group.pattern!r}, which no array is of"
    expected = f"a pattern that a name matches, and none before it: {some}"
    return UserError(got, expected, nearest(group.pattern, names))
