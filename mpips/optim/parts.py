"""Parameter groups and frozen arrays of an update rule.

An update leaves the parameters and the slots of a frozen array unchanged: it applies neither weight
decay nor momentum there. A rule that counts its updates counts those of each array separately, such
as Adam for its bias correction.
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

Range: TypeAlias = tuple[int, int]  # [begin, end) of an array in the flat vector
Ranges: TypeAlias = tuple[Range, ...]  # ascending


def grouped(
    rule: Rule, layout: Layout, groups: Sequence[Group], lr: float, statistics: Sequence[str] = ()
) -> Rule:
    """Return a rule with the hyperparameters of each array (`Rule.ranges`).

    Args:
        rule: The rule, with the hyperparameters of the run.
        layout: Layout of the flat vector.
        groups: Parameter groups, each with its own learning rate or weight decay.
        lr: The run's learning rate, before its schedule.
        statistics: Names of arrays that are not parameters, such as running means. They belong to
            no group, and `Change` updates them.

    Returns:
        `rule` itself if there are neither groups nor statistics, and it is not `Rule.whole`.

    Raises:
        UserError: If a group matches no array, or has weight decay though the rule has none.
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
            got = f"group {group.pattern!r} with weight_decay, which {rule.name} does not have"
            raise UserError(got, "a rule with weight_decay", "leave it out, or add it to step")
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
    got = f"group {group.pattern!r}, which no array belongs to"
    expected = f"a pattern that matches a name which no earlier group matches: {some}"
    return UserError(got, expected, nearest(group.pattern, names))


def _add(parts: list[Part], part: Part) -> None:
    """Append a part, or extend the last one if rule and scale are the same; skip an empty part."""
    last = parts[-1] if parts else None
    if last is not None and last[1:] == (part.begin, part.rule, part.scale):
        parts[-1] = last._replace(end=part.end)
    elif part.begin < part.end:
        parts.append(part)


def leaving_out(rule: Rule, frozen: Ranges, skipped: Mapping[Range, int]) -> Rule:
    """Return a rule that leaves frozen arrays out.

    Args:
        rule: The rule of all arrays.
        frozen: Ranges of the frozen arrays.
        skipped: Number of earlier updates that left an array out, by its range. The array's count
            of updates is lower by this number.
    """
    rest = list(rule.ranges) or [Part(0, sys.maxsize, rule, 1.0)]
    parts, left_out = list[Part](), set(frozen)
    for begin, end in sorted(left_out.union(array for array, count in skipped.items() if count)):
        if begin == end:
            continue
        while rest[0].end <= begin:
            _add(parts, rest.pop(0))
        part = rest[0]  # it contains the whole array
        _add(parts, part._replace(end=begin))
        if (begin, end) not in left_out:
            own = part.rule.continued(part.rule.before - skipped[begin, end])
            _add(parts, Part(begin, end, own, part.scale))
        rest[0] = part._replace(begin=end)
    for part in rest:
        _add(parts, part)
    return replace(rule, ranges=tuple(parts) or (Part(0, 0, rule, 1.0),))


def common(sets: Iterable[Ranges]) -> Ranges:
    """Return the arrays that all of `sets` contain; there is at least one set."""
    first, *others = sets
    if all(other == first for other in others):
        return first
    return tuple(sorted(set(first).intersection(*others)))


class FrozenMask:
    """The arrays that are frozen at present, and a rule that leaves them out.

    Args:
        rule: The rule of all arrays.

    Attributes:
        rule: The rule of the next update, without the frozen arrays.
    """

    def __init__(self, rule: Rule) -> None:
        self._unmasked = self.rule = rule
        self._frozen: Ranges = ()
        self._earlier: dict[Range, int] = {}  # `skipped`, when the mask changed last
        self._updates = 0  # since the mask changed last

    def leave(self, frozen: Ranges) -> bool:
        """Freeze these arrays, and no others, from the next update on.

        Returns:
            Whether the mask has changed.
        """
        if frozen == self._frozen:
            return False
        self._earlier, self._updates, self._frozen = self.skipped, 0, frozen
        self.rule = leaving_out(self._unmasked, frozen, self._earlier)
        return True

    def count(self, updates: int = 1) -> None:
        """Count updates that were made with the present mask."""
        self._updates += updates

    @property
    def skipped(self) -> dict[Range, int]:
        """Number of updates that left an array out, by its range; only arrays ever frozen."""
        counts = dict(self._earlier)
        for array in self._frozen:
            counts[array] = counts.get(array, 0) + self._updates
        return counts
