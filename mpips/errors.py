"""Errors for users: the given value, the constraint, and the remedy."""

import contextlib
import difflib
import enum
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

_worded: Callable[[str], str] = str


class Exit(enum.IntEnum):
    """Exit codes of jobs and commands.

    Exit codes:
        0: Complete: ``DONE`` is in the run's folder. A command succeeded.
        1: Failed: a loss that is not finite, an exception, a file that cannot be read, a last state
            that could not be saved, no progress. Whole checkpoints stay: mend the cause, then
            ``--resume``. Of commands: ``mpips doctor`` found a ``fail``, ``mpips replay`` a
            difference, ``mpips checkpoint verify`` damage.
        2: Refused before training began; nothing was changed. The message names the value, the
            constraint and the remedy.
        3: ``mpips doctor`` found nothing worse than a ``warn``.
        85: Saved at a signal, or before a start that found no hosts: run it again, with
            ``--resume``.
        137: A rank was killed, often for memory, or has ended because another rank had died. Whole
            checkpoints stay: ``--resume``.
    """

    DONE, FAILED, REFUSED, WARNED, SAVED, KILLED = 0, 1, 2, 3, 85, 137


class UserError(Exception):
    """Mistake that the user can correct.

    The message has the form ``<what> <got>, expected <constraint>; <remedy>``.

    Args:
        got: Name and value of the given thing.
        expected: Constraint that it violates.
        remedy: Action that corrects it; may be empty.

    Attributes:
        code: Exit code of a job that the error ends: 2, or 1 if training had begun.
        speaks: Whether this rank prints it, if every rank raises it; None if only this rank does.
    """

    code: int = Exit.REFUSED
    speaks: bool | None = None

    def __init__(self, got: str, expected: str, remedy: str = "") -> None:
        message = f"{got}, expected {expected}"
        super().__init__(_worded(f"{message}; {remedy}" if remedy else message))


class Failure(UserError):
    """Mistake that ends a job or a command after it has begun its work."""

    code = Exit.FAILED


@contextlib.contextmanager
def reworded(change: Callable[[str], str]) -> Iterator[None]:
    """Within the block, apply `change` to the text of new errors and of printed lines."""
    global _worded
    before, _worded = _worded, change
    try:
        yield
    finally:
        _worded = before


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Print `text` and a newline in one write, to stdout unless a stream is given.

    Without buffers, Python's ``print`` writes the newline separately. Launchers forward what they
    read, so another rank's output could come in between.
    """
    stream = sys.stdout if stream is None else stream
    stream.write(f"{_worded(text)}\n")
    stream.flush()


def complain(error: object) -> None:
    """Print an error, or text in the form of one, to stderr."""
    write_line(f"mpips: {error}", sys.stderr)


def perform(act: Callable[[Sequence[str]], object], argv: Sequence[str]) -> int:
    """Run a command with its arguments, and print its error; returns the exit code."""
    try:
        act(argv)
    except (UserError, OSError) as problem:
        error = as_user_error(problem)
        complain(error)
        return error.code
    return Exit.DONE


def as_user_error(problem: UserError | OSError) -> UserError:
    """Return the error of a command; a file that cannot be read, as another user's, is one.

    Raises:
        OSError: If it names no file.
    """
    if isinstance(problem, UserError):
        return problem
    if problem.filename is None:
        raise problem
    return UserError(f"{problem.filename}: {problem.strerror}", "one that can be read")


def answer(text: Callable[[Sequence[str]], str], argv: Sequence[str]) -> int:
    """Print the text that a command returns, or its error; returns the exit code."""
    return perform(lambda words: print(text(words), end=""), argv)


def unknown(kind: str, name: str, legal: Iterable[str]) -> UserError:
    """Return the error for a name outside a closed set, with the nearest legal name as remedy."""
    names = sorted(legal)
    return UserError(f"unknown {kind} {name!r}", f"one of {', '.join(names)}", nearest(name, names))


def nearest(name: str, legal: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the legal name closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(legal), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else ""


def counted(number: int, what: str) -> str:
    """Return a number with a noun, such as ``1 rank`` or ``2 ranks``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def listed(items: Sequence[object], most: int) -> str:
    """Return the first items and the number of the others, such as ``a, b and 2 more``."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most:,} more"


def human_bytes(size: float) -> str:
    """Return a size with its unit, such as ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} EB"
