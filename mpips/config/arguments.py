"""The command lines of all commands but training, which are argparse's."""

import argparse
from typing import NoReturn

from mpips.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"command line: {message}", "what --help lists")
