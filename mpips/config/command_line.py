"""Command line of a job: options, a job file, and requested texts."""

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpips import __version__
from mpips.config import OPTIONS, Config, groups
from mpips.config.jobfile import read_toml, resolve, to_toml
from mpips.config.names import RULES
from mpips.config.option import HELP_WIDTH, Option, help_entry, help_row, meant, metavar, setting
from mpips.errors import UserError

FLAGS = {
    "--help": "show this text, and end",
    "--version": "show the version, and end",
    "--print-config": "show the resolved job as a job file, and end",
    "--check-gradient": "compare the problem's gradient with differences of its loss, in float64, "
    "on the first batch, and end: with code 2 and what is wrong, if anything is",
    "--explain": "show what crosses each link in a step, and what would relieve it, and end",
}
RATE = re.compile(r"(?P<number>[1-9][0-9]{0,5}(\.[0-9]{1,6})?)(?P<unit>kbit|mbit|gbit)")
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Question:
    """Options of ``--explain`` in addition to the job; they are no keys of a job file."""

    link: str = setting(
        "explain", "10gbit", "rate of a node's link, each way", pattern=RATE,
        form="a rate such as 100mbit or 25gbit", metavar="RATE",
    )  # fmt: skip
    step_ms: float = setting(
        "explain", 0.0, "milliseconds in which a worker computes a gradient; 0: links only", ">= 0"
    )
    ranks: int = setting(
        "explain", 0, "answer for a world of N ranks, without starting it", ">= 0",
        unset="that of mpirun",
    )  # fmt: skip
    nodes: int = setting("explain", 1, "nodes of that world, filled one after the other", ">= 1")

    @property
    def bytes_per_s(self) -> float:
        """Rate of a link each way, in bytes per second."""
        match = RATE.fullmatch(self.link)
        assert match is not None, "checked on the command line"
        return float(match["number"]) * BITS[match["unit"]] / 8


QUESTIONS = {field.name: Option.of(field) for field in dataclasses.fields(Question)}
_BY_FLAG = {option.flag: option for option in (*OPTIONS.values(), *QUESTIONS.values())}
_NEGATED = {o.negated: o for o in OPTIONS.values() if o.kind is bool}
_ALL_FLAGS = {option.flag: option for option in OPTIONS.values()} | _NEGATED
OPTION_WORDS = re.compile(
    r"(?P<flag>--[a-z][a-z0-9-]*[a-z0-9])(?P<words> [\w./:*-]*\w(?: or \w+)*)?"
)


class CommandLine(NamedTuple):
    """A parsed command line, before any file is read.

    Attributes:
        job: Path of the job file, or None.
        options: Values of the given options, typed and checked one by one.
        flags: The given flags of `FLAGS`, such as ``print_config``.
        question: Options of ``--explain``.
    """

    job: Path | None
    options: dict[str, Any]
    flags: frozenset[str]
    question: Question = Question()

    def job_values(self) -> dict[str, Any]:
        """Return the values in the job file.

        Raises:
            UserError: If it cannot be read.
        """
        return read_toml(self.job) if self.job else {}

    @property
    def needs_no_world(self) -> bool:
        """Whether a single process can answer the command line, without starting MPI."""
        return bool({"print_config", "check_gradient"} & self.flags or self.question.ranks)


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse a command line without the program's name; the last value of an option counts.

    Raises:
        UserError: For an unknown option, an illegal or missing value, a second job file.
    """
    if "--help" in argv or "-h" in argv:
        return CommandLine(None, {}, frozenset({"help"}))
    job: Path | None = None
    options: dict[str, Any] = {}
    flags: set[str] = set()
    words = list(reversed(argv))
    while words:
        word = words.pop()
        if word in FLAGS:
            flags.add(word[2:].replace("-", "_"))
        elif word.startswith("-"):
            name, value = _take_option(word, words)
            options[name] = value
        elif job is not None:
            raise UserError(f"a second job file {word!r}", "only one", "options begin with --")
        else:
            job = Path(word)
    asked = {name: options.pop(name) for name in QUESTIONS if name in options}
    if asked and "explain" not in flags:
        flag = QUESTIONS[next(iter(asked))].flag
        raise UserError(f"{flag} without --explain", "--explain with it", f"leave out {flag}")
    return CommandLine(job, options, frozenset(flags), Question(**asked))


def _take_option(word: str, words: list[str]) -> tuple[str, Any]:
    """Return ``(name, value)`` of an option; remove a separate value from `words`."""
    flag, equals, text = word.partition("=")
    option = _BY_FLAG.get(flag) or _NEGATED.get(flag)
    if option is None:
        flags = {name: option.flag for name, option in (OPTIONS | QUESTIONS).items()}
        near = meant(flag, [*flags, *_NEGATED, *FLAGS], lambda name: flags.get(name, name))
        raise UserError(f"unknown option {flag}", "one of those that --help lists", near)
    if option.kind is bool:
        if equals:
            raise UserError(f"option {word}", "no value", f"write {flag}, without a value")
        return option.name, flag in _BY_FLAG
    if not equals:
        text = _take_value(option, words)
    return option.name, option.check(option.from_text(text), remedy=f"see {flag} in --help")


def _take_value(option: Option, words: list[str]) -> str:
    if option.bare is not None:
        return words.pop() if words and words[-1] in option.legal else option.bare
    if not words or words[-1].startswith("--"):
        usage = f"write {option.flag} {metavar(option)}"
        raise UserError(f"option {option.flag} without a value", option.expected, usage)
    return words.pop()


def given_values(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values in a command line and its job file, without defaults.

    Raises:
        UserError: If an option is wrong, or the file cannot be read.
    """
    line = parse_command_line(argv)
    return {**line.job_values(), **line.options}


def load(argv: Sequence[str]) -> Config:
    """Resolve a command line and its job file.

    Raises:
        UserError: If the command line, the file or a value is wrong.
    """
    line = parse_command_line(argv)
    return resolve(line.options, line.job_values())


def requested_text(line: CommandLine, config: Config | None) -> str | None:
    """Return the text that the flags of a command line ask for; None if there are no such flags.

    Args:
        line: The command line.
        config: The resolved job; None before it is known, then without ``--print-config``.
    """
    if "help" in line.flags:
        return help_text()
    if "version" in line.flags:
        return f"mpips {__version__}\n"
    return to_toml(config) if config is not None and "print_config" in line.flags else None


def in_python(text: str) -> str:
    """Return a text with options written as in a program: ``mode="sync"`` for ``--mode sync``."""
    return OPTION_WORDS.sub(_as_argument, text)


def _as_argument(match: re.Match[str]) -> str:
    """Return an option as an argument, with the following words that are its values."""
    option, words = _ALL_FLAGS.get(match["flag"]), match["words"] or ""
    if option is None:
        return match[0]
    if option.kind is bool:
        return f"{option.name}={match['flag'] == option.flag}{words}"
    values = [_as_value(option, word) for word in words.strip().split(" or ")]
    if all(values):
        return f"{option.name}={' or '.join(values)}"
    if values[0]:
        return f"{option.name}={values[0]}{words[len(words.split(' or ')[0]) :]}"
    if words and option.kind is str and not option.legal:
        return f"{option.name}{words}"
    return f"{option.name}={option.bare is not None or ''}{words}"


def _as_value(option: Option, word: str) -> str:
    """Return the value of an option as Python; "" if a word is no value."""
    if option.name == "optimizer":
        return f"mpips.{RULES[word]}()" if word in RULES else ""
    if word.isupper() or option.from_text(word) != word:
        return word
    known = word in option.legal
    if option.pattern is not None:
        known = known or option.pattern.fullmatch(word) is not None
    elif not option.legal:
        # Otherwise it may be the next word of a sentence.
        known = re.search("[./]", word) is not None
    return f'"{word}"' if word and option.kind is str and known else ""


def help_text() -> str:
    """Return the text of ``--help``, at most 100 columns wide."""
    intro = (
        "Every option is also a key of the job file, with _ in place of - (batch_size = 32). The "
        "command line overrides the job file, and the job file overrides the defaults. With "
        "--resume, the values of the saved run take the place of the defaults. An option of "
        "another mode is an error. If --mode overrides the mode of a job file or a saved run, its "
        "options of the other mode are ignored."
    )
    parts = [
        "usage: mpirun -n RANKS python -m mpips.train [JOB.toml] [--option value ...]\n",
        textwrap.fill(intro, HELP_WIDTH) + "\n",
    ]
    for group, options in groups().items():
        parts.append(f"{group}:\n" + "".join(map(help_entry, options)))
    parts.append("explain:\n" + "".join(map(help_entry, QUESTIONS.values())))
    parts.append("other:\n" + "".join(help_row(*row) for row in FLAGS.items()))
    return "\n".join(parts)
