"""Update rules as text: parameter groups, and the rule of table rows.

A group is a set of arrays with their own learning rate or weight decay. On the command line and in
job files, groups are one text: ``*.bias: weight_decay=0; head.*: lr=0.1``. A rule of rows is
``ftrl: lr=1, l1=1``.
"""

import glob
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

from mpips.errors import UserError

NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
SETTING = rf"\s*(lr|weight_decay)\s*=\s*{NUMBER}\s*"
GROUP = rf"\s*[^:;\s][^:;]*:{SETTING}(,{SETTING})?"
GROUPS = re.compile(rf"({GROUP}(;{GROUP})*)?")
GROUPS_FORM = "PATTERN: lr=X, weight_decay=X; PATTERN: ... (such as *.bias: weight_decay=0)"
RULE_SETTING = rf"\s*\w+\s*=\s*[+-]?{NUMBER}\s*"
RULE_SETTINGS = rf"(\s*:(?P<settings>{RULE_SETTING}(,{RULE_SETTING})*))?"
OWN_RULE = r"[^\0]*[^/\0]\.py:[^\W\d]\w*"
OWN_OPTIMIZER = re.compile(rf"(?P<name>{OWN_RULE}){RULE_SETTINGS}")
OWN_FORM = "path/file.py:Class"
ROW_OPTIMIZER = re.compile(rf"((?P<name>{OWN_RULE}|[a-z_]+){RULE_SETTINGS})?")
ROW_FORM = "NAME, or NAME: lr=X, .. (such as ftrl: lr=0.1, l1=0.03)"


@dataclass(frozen=True)
class Group:
    """Arrays whose names match a pattern, with settings that replace the run's.

    An array belongs to the first group that matches.

    Attributes:
        pattern: Pattern as for file names: ``*``, ``?`` and ``[...]``; without ``:`` and ``;``.
        lr: Learning rate; the schedule applies to it as to the run's.
        weight_decay: Weight decay.

    Raises:
        UserError: If there is no setting, or a number or the pattern is not valid.
    """

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        given = self.settings()
        if not given:
            raise UserError(f"group {self.pattern!r} without lr and weight_decay", "one of them")
        for name, value in given.items():
            if not isinstance(value, Real) or not 0 <= value < math.inf:
                raise UserError(f"group {self.pattern!r} with {name} {value!r}", "a number >= 0")
        if not re.fullmatch(r"[^:;\s][^:;]*", self.pattern):
            got = f"group with the pattern {self.pattern!r}"
            raise UserError(got, "names with *, without : and ;", "? stands for any character")

    def settings(self) -> dict[str, float]:
        """Return the given settings, by name of the option."""
        both = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {name: value for name, value in both.items() if value is not None}

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={float(x)!r}" for name, x in self.settings().items())
        return f"{self.pattern}: {settings}"


def parse_groups(text: str) -> tuple[Group, ...]:
    """Return the groups in a text that matches `GROUPS`.

    Raises:
        UserError: If a number is too large, or a setting is given twice.
    """
    return tuple(_parse(item) for item in text.split(";") if item.strip())


def _parse(item: str) -> Group:
    pattern, _, settings = item.rpartition(":")
    numbers = parse_numbers(settings, f"groups, {item.strip()!r}")
    return Group(pattern.strip(), numbers.get("lr"), numbers.get("weight_decay"))


def parse_numbers(settings: str, where: str) -> dict[str, float]:
    """Return the numbers in ``name=X, name=X``.

    Raises:
        UserError: If a name occurs twice; the message contains `where`.
    """
    numbers: dict[str, float] = {}
    for setting in filter(None, settings.split(",")):
        name, _, number = (part.strip() for part in setting.partition("="))
        if name in numbers:
            raise UserError(f"{name} twice in {where}", "once")
        numbers[name] = float(number)
    return numbers


def pattern_of(name: str) -> str:
    """Return a pattern that matches a name, and others only where they differ in ``:`` or ``;``."""
    return glob.escape(name).replace(":", "?").replace(";", "?")


def text_of(groups: Iterable[Group]) -> str:
    """Return the text of groups, the inverse of `parse_groups`.

    Raises:
        UserError: If an element is no group.
    """
    found = list(groups)
    for group in found:
        if not isinstance(group, Group):
            raise UserError(f"groups with {group!r}", 'such as mpips.Group("*.bias", lr=0.1)')
    return "; ".join(map(str, found))


def members(names: Sequence[str], groups: Sequence[Group]) -> list[list[str]]:
    """Return lists of names: those in no group, then those of each group."""
    lists: list[list[str]] = [[] for _ in range(1 + len(groups))]
    for name in names:
        matches = (k for k, group in enumerate(groups, 1) if fnmatchcase(name, group.pattern))
        lists[next(matches, 0)].append(name)
    return lists


@dataclass(frozen=True)
class RowOptimizer:
    """An update rule by name and hyperparameters; `mpips.optim.row_rules` checks both.

    Attributes:
        name: Name of the rule.
        numbers: Hyperparameters by name.
    """

    name: str
    numbers: dict[str, float]

    def options(self) -> dict[str, Any]:
        """Return the name as ``optimizer``, and the hyperparameters."""
        return {"optimizer": self.name, **self.numbers}


def parse_rule(text: str, option: str) -> RowOptimizer:
    """Return the rule in a text such as ``ftrl: lr=1`` or ``file.py:Class: beta=0.9``.

    Args:
        text: Text that matches `ROW_OPTIMIZER`.
        option: Name of the option, for errors.

    Raises:
        UserError: If a number is given twice.
    """
    match = ROW_OPTIMIZER.fullmatch(text)
    name, settings = match.group("name", "settings") if match else (text, None)
    return RowOptimizer(name or "", parse_numbers(settings or "", f"{option} {text!r}"))
