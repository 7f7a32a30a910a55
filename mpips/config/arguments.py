"""The command lines of all commands but training, which are argparse's."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from mpips.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"command line: {message}", "what --help lists")


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return a command's own words, and those of a job behind ``--``, None where that is not."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]
