"""Parsers of all commands but training."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from mpips.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"command line: {message}", "what --help lists")


def verbatim(
    prog: str, text: str | None, usage: str | None = None, epilog: str | None = None
) -> Parser:
    """Return a parser that shows `text` as it stands, and takes no abbreviated option.

    Args:
        prog: What the command is called.
        text: What its help begins with.
        usage: How it is used; by default made of its options.
        epilog: What its help ends with, likewise as it stands.
    """
    as_it_stands = argparse.RawDescriptionHelpFormatter
    return Parser(prog, usage, text, epilog, formatter_class=as_it_stands, allow_abbrev=False)


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return a command's own words, and those of a job behind ``--``, None where that is not."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]
