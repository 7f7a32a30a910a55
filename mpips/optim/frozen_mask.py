"""Updates without the arrays that are frozen.

Such an array keeps its parameters and slots as they are, without weight decay and momentum. Rules
that count their updates, as Adam does for the correction of its bias, count those of each array.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from mpips.optim.rules import Part, Rule

Range: TypeAlias = tuple[int, int]  # of an array in the flat vector
Ranges: TypeAlias = tuple[Range, ...]  # in their order there


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


def _add(parts: list[Part], part: Part) -> None:
    """Add a part, or make the last one longer by it."""
    last = parts[-1] if parts else None
    if last is not None and last[1:] == (part.begin, part.rule, part.scale):
        parts[-1] = last._replace(end=part.end)
    elif part.begin < part.end:
        parts.append(part)


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
