"""Options of a job: type, legal values, help and errors.

`setting` creates a field of a dataclass with the metadata of an option. `Option.of` reads them from
the field. `Option` checks values, creates the errors, and writes the rows of ``--help``.

Messages:
    option in mode M: The mode does not have the option. Leave it out, or take a mode that is named.
"""

import dataclasses
import difflib
import functools
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpips.errors import UserError, nearest

BOUNDS: dict[str, Callable[[float], bool]] = {
    "> 0": lambda v: v > 0,
    ">= 0": lambda v: v >= 0,
    ">= 1": lambda v: v >= 1,
    "0 or >= 2": lambda v: v == 0 or v >= 2,
    "in [0, 1]": lambda v: 0 <= v <= 1,
    "in [0, 1)": lambda v: 0 <= v < 1,
    "in (0, 1)": lambda v: 0 < v < 1,
    "in (0, 1]": lambda v: 0 < v <= 1,
}
KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    tuple: "a list of integers",
}
METAVARS: dict[Any, str] = {bool: "", int: "N", float: "X", str: "TEXT", tuple: "N,N,..."}
INT_LIMIT = 2**63
HELP_WIDTH = 100
HELP_COLUMN = 30


def setting(group: str, default: Any, text: str, bound: str = "", **metadata: Any) -> Any:
    """Return a field of `Config`.

    Metadata: legal, pattern, form, metavar, unset, bare, numeric; modes, the modes that have the
    option; only, the modes of each value that not all of these have.
    """
    metadata = {"group": group, "help": text, "bound": bound, **metadata}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """Properties of a field of `Config`: its type, its legal values, its help."""

    name: str
    kind: Any
    default: Any
    group: str
    help: str
    bound: str
    optional: bool = False
    legal: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    form: str = ""
    metavar: str = ""
    unset: str = ""
    bare: str | None = None
    numeric: bool = False
    modes: tuple[str, ...] = ()
    only: Mapping[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, field: "dataclasses.Field[Any]") -> "Option":
        """Read an option from a field of `Config`."""
        union = isinstance(field.type, types.UnionType)
        kind = typing.get_args(field.type)[0] if union else field.type
        kind = typing.get_origin(kind) or kind
        return cls(field.name, kind, field.default, optional=union, **field.metadata)

    @property
    def flag(self) -> str:
        """The option on the command line, such as ``--batch-size``."""
        return "--" + self.name.replace("_", "-")

    @property
    def negated(self) -> str:
        """The flag that sets a boolean option to false, such as ``--no-quiet``."""
        return f"--no-{self.flag[2:]}"

    def fits(self, value: Any, mode: str) -> bool:
        """Return whether a job of a mode may have the value; each mode allows the default."""
        modes = self.modes_of(value)
        return not modes or mode in modes or value == self.default

    def modes_of(self, value: Any) -> tuple[str, ...]:
        """Return the modes that have a value; () for all."""
        return self.only.get(value, self.modes)

    def mode_error(self, value: Any, mode: str) -> UserError:
        """Return the error for a value in a mode that does not have the option."""
        modes = " or ".join(self.modes_of(value))
        flag = self.negated if value is False else self.flag
        remedy = f"leave out {flag}, or use --mode {modes}"
        return UserError(f"{self.name} {shown(value)} in mode {mode}", f"mode {modes}", remedy)

    @property
    def expected(self) -> str:
        """The constraint on a value, as text."""
        if self.legal or self.form:
            names = ", ".join(filter(None, (*self.legal, self.form)))
            return f"one of {names}" if self.legal else names
        return f"{KINDS[self.kind]} {self.bound}".rstrip()

    def error(self, value: Any, where: str = "", remedy: str = "") -> UserError:
        """Return the error for an illegal value; `where` names its file."""
        if self.legal and isinstance(value, str):
            got = f"{where}unknown {self.name} {value!r}"
            if value.endswith(".py"):
                return UserError(got, self.expected, f"name the class too: {value}:Class")
            return UserError(got, self.expected, nearest(value, self.legal) or remedy)
        large = self.kind is int and type(value) is int and abs(value) >= INT_LIMIT
        expected = "an integer below 2**63" if large else self.expected
        return UserError(f"{where}{self.name} {shown(value)}", expected, remedy)

    def check(self, value: Any, where: str = "", remedy: str = "") -> Any:
        """Return `value` in the type of the field.

        Args:
            value: A value from TOML: a list for a tuple; an integer or a float for a number.
            where: Prefix of the error, such as the file's name and a colon.
            remedy: End of the error.

        Raises:
            UserError: If the type or the value is not legal.
        """
        if value is None and self.optional:
            return value
        if self.numeric and type(value) in (int, float) and abs(value) < INT_LIMIT:
            value = str(value)
        if self.kind is float and type(value) is int and abs(value) < INT_LIMIT:
            value = float(value)
        if self.kind is tuple and isinstance(value, list):
            value = tuple(value)
        if not self._accepts(value):
            raise self.error(value, where, remedy)
        return value

    def _accepts(self, value: Any) -> bool:
        """Return whether a value has the field's type and is legal; bool is no integer here."""
        if type(value) is not self.kind:
            return False
        if self.kind is str:
            return self._accepts_text(value)
        items = value if self.kind is tuple else (value,)
        number = float if self.kind is float else int
        if self.kind is not bool and any(type(v) is not number or not _finite(v) for v in items):
            return False
        return not self.bound or all(BOUNDS[self.bound](v) for v in items)

    def _accepts_text(self, value: str) -> bool:
        # Lone surrogates (from a command line that is not UTF-8) cannot be written to a job file.
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            return False
        if value in self.legal:
            return True
        if self.pattern is not None:
            return self.pattern.fullmatch(value) is not None
        return not self.legal

    def from_text(self, text: str) -> Any:
        """Return the typed value of a word on the command line, or the word if it has none."""
        try:
            if self.kind is tuple:
                return tuple(_integer(part) for part in text.split(",")) if text else ()
            return {int: _integer, float: _number}.get(self.kind, str)(text)
        except ValueError:
            return text


@functools.cache
def called_elsewhere() -> dict[str, dict[str, str]]:
    """Return names of options in other libraries, and their options that mpips lacks."""
    return tomllib.loads(Path(__file__).with_name("called.toml").read_text())


def meant(name: str, legal: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """Return the remedy for an unknown option, or "" if none is known.

    It suggests the option that shares the most words with `name`, in its own name or in a name from
    another library. Otherwise it suggests an option with similar letters.

    Args:
        name: The unknown option, as written.
        legal: Names of the options.
        shown: Returns an option's name in the form that the user has to write.
    """
    legal, bare, own = list(legal), _squashed(name), _words(name)
    others = called_elsewhere()

    def agreement(known: str) -> tuple[bool, int, int]:
        """Return whether an option has this name, and how many words and letters match."""
        names = {n: _squashed(n) == bare for n in (known, *others["called"].get(known, "").split())}
        found = [
            (same, len(_words(n)), len(n)) for n, same in names.items() if same or _words(n) <= own
        ]
        return max(found, default=(False, 0, 0))

    found = max(legal, key=agreement, default="")
    if not any(agreement(found)):
        letters = {_squashed(known): known for known in reversed(legal)}
        close = difflib.get_close_matches(bare, letters, n=1, cutoff=0.75)
        found = letters[close[0]] if close else ""
    if found:
        return f"did you mean {shown(found)!r}?"
    remedies = others["elsewhere"].items()
    return next((remedy for remedy, n in remedies if bare in map(_squashed, n.split())), "")


def _words(name: str) -> set[str]:
    return {word.rstrip("s") for word in re.split("[-_.]+", name.lower()) if word}


def _squashed(name: str) -> str:
    return re.sub("[-_.]", "", name).lower()


def shown(value: Any) -> str:
    """Return a value as in a job file."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "with an endless integer"


def _finite(value: float) -> bool:
    return abs(value) < INT_LIMIT if isinstance(value, int) else math.isfinite(value)


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def _number(text: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise ValueError(text)
    return float(text)


def metavar(option: Option) -> str:
    """Return the placeholder for an option's value in ``--help``."""
    if option.legal and not option.metavar:
        return "{" + ",".join(option.legal) + "}"
    return option.metavar or METAVARS[option.kind]


def default_text(option: Option) -> str:
    """Return the default of an option as text."""
    if option.kind is bool:
        return "on" if option.default else "off"
    values = option.default if option.kind is tuple else (option.default,)
    return option.unset or ",".join(map(str, values))


def legal_text(option: Option) -> str:
    """Return the constraint on an option's value, unless its metavar shows it."""
    legal = option.expected if option.metavar and not option.bare else ""
    return option.bound or legal.removeprefix("text")


def help_entry(option: Option) -> str:
    """Return the rows of one option: its purpose, legal values and default."""
    modes = f"; mode {' or '.join(option.modes)}" if option.modes else ""
    note = f"default: {default_text(option)}{modes}"
    if option.kind is bool:
        return help_row(f"{option.flag}, {option.negated}", f"{option.help} [{note}]")
    note = f"{legal}; {note}" if (legal := legal_text(option)) else note
    return help_row(f"{option.flag} {metavar(option)}", f"{option.help} [{note}]")


def help_row(left: str, text: str) -> str:
    """Return `text` in the right column beside `left`, or below it if `left` is too long."""
    indent = " " * HELP_COLUMN
    head = f"  {left}".ljust(HELP_COLUMN)
    head = head if head[-1] == " " else f"{head}\n{indent}"
    body = textwrap.wrap(text, HELP_WIDTH - HELP_COLUMN, break_on_hyphens=False)
    return head + f"\n{indent}".join(body) + "\n"
