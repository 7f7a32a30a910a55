"""Update rules by range of the vector: groups and frozen arrays.

A frozen array keeps its parameters and slots as they are, without weight decay and momentum. Rules
that count their updates, as Adam does for the correction of its bias, count those of each array.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from mpips.config.groups import Group, members
from mpips.config.names import EMA
from mpips.errors import UserError, nearest
from mpips.layout import Layout
from mpips.optim.rule import Part, Rule
from mpips.optim.rules import Change

Range: TypeAlias = tuple[int, int]  # of an array in the flat vector
Ranges: TypeAlias = tuple[Range, ...]  # in their order there


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
    if not (groups or statistics or rule.whole):
        return rule
    parameters = [name for name in layout.names if name not in statistics]
    settings: dict[str, tuple[Rule, float]] = dict.fromkeys(parameters, (rule, 1.0))
    settings |= dict.fromkeys(statistics, (Change(averaged=EMA in rule.slots), 1.0))
    for group, names in zip(groups, members(parameters, groups)[1:], strict=True):
        if not names:
            raise _without_array(group, parameters)
        if group.weight_decay and not rule.decays:
            got = f"group {group.pattern!r} with weight_decay, which {rule.name} has not"
            raise UserError(got, "a rule that has it", "leave it out, or take it in step")
        decay = rule.weight_decay if group.weight_decay is None else group.weight_decay
        own = replace(rule, weight_decay=float(decay))
        settings |= dict.fromkeys(names, (own, 1.0 if group.lr is None else group.lr / lr))
    parts: list[Part] = []
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    for name, (begin, end) in layout.slices().items():
        own, scale = settings[name]
        _add(parts, Part(begin, end, own.of_array(name, shapes[name]), scale))
    return replace(rule, ranges=tuple(parts))


def _without_array(group: Group, names: Sequence[str]) -> UserError:
    some = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    got = f"group {group.pattern!r}, which no array is of"
    expected = f"a pattern that a name matches, and none before it: {some}"
    return UserError(got, expected, nearest(group.pattern, names))


def _add(parts: list[Part], part: Part) -> None:
    """Add a part, or make the last one longer by it."""
    last = parts[-1] if parts else None
    if last is not None and last[1:] == (part.begin, part.rule, part.scale):
        parts[-1] = last._replace(end=part.end)
    elif part.begin < part.end:
        parts.append(part)


def leaving_out(rule: Rule, frozen: Ranges, skipped: Mapping[Range, int]) -> Rule:
    """Return a rule that has no part for some arrays.

    Args:
        rule: The rule of all.
        frozen: The arrays.
        skipped: Updates that were made without an array before, which it does not count.
    """
    rest = list(rule.ranges) or [Part(0, sys.maxsize, rule, 1.0)]
    found, left_out = list[Part](), set(frozen)
    for begin, end in sorted(left_out.union(array for array, count in skipped.items() if count)):
        while rest[0].end <= begin:
            _add(found, rest.pop(0))
        part = rest[0]  # the whole array is in it
        _add(found, part._replace(end=begin))
        if (begin, end) not in left_out:
            own = part.rule.continued(part.rule.before - skipped[begin, end])
            _add(found, Part(begin, end, own, part.scale))
        rest[0] = part._replace(begin=end)
    for part in rest:
        _add(found, part)
    return replace(rule, ranges=tuple(found) or (Part(0, 0, rule, 1.0),))


def common(several: Iterable[Ranges]) -> Ranges:
    """Return the arrays that are in all of several, at least one."""
    first, *others = several
    if all(other == first for other in others):
        return first
    return tuple(sorted(set(first).intersection(*others)))


class FrozenMask:
    """A rule, and the arrays that its updates leave alone at present.

    Args:
        rule: The rule of all arrays.

    Attributes:
        rule: That of the next update.
    """

    def __init__(self, rule: Rule) -> None:
        self._whole = self.rule = rule
        self._frozen: Ranges = ()
        self._earlier: dict[Range, int] = {}
        self._updates = 0  # since these are left alone

    def leave(self, frozen: Ranges) -> bool:
        """Leave these arrays alone from the next update on; returns whether they are others."""
        if frozen == self._frozen:
            return False
        self._earlier, self._updates, self._frozen = self.skipped, 0, frozen
        self.rule = leaving_out(self._whole, frozen, self._earlier)
        return True

    def count(self, updates: int = 1) -> None:
        """Count updates that were made so."""
        self._updates += updates

    @property
    def skipped(self) -> dict[Range, int]:
        """How many updates were made without each array, of those that any was made without."""
        found = dict(self._earlier)
        for array in self._frozen:
            found[array] = found.get(array, 0) + self._updates
        return found
