"""Job files that come with mpips: ``mpips jobs [NAME]``, or ``--copy DIR``."""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mpips.config.arguments import Parser
from mpips.config.jobfile import copy_shared, shared_files, shared_text
from mpips.config.option import HELP_WIDTH
from mpips.errors import UserError, answer, unknown

DESCRIPTION = """\
List the job files that come with mpips, one experiment each, or show one. Each runs by its name,
as in `mpirun -n 8 python -m mpips.train digits-sync`, or as a copy that you change.
"""


def make_parser() -> Parser:
    """Build the parser of this command."""
    parser = Parser(prog="mpips jobs", description=DESCRIPTION)
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this job file")
    parser.add_argument("--copy", type=Path, metavar="DIR", help="copy all of them to DIR")
    return parser


def text(argv: Sequence[str]) -> str:
    """Return what a command line asks for.

    Raises:
        UserError: If it is wrong, there is no such job, or DIR cannot be written.
    """
    args = make_parser().parse_args(argv)
    files = {p.stem: p for p in shared_files("jobs").values() if p.suffix == ".toml"}
    if args.copy and args.name:
        raise UserError(f"--copy beside {args.name}", "one of them")
    if args.copy:
        return "".join(f"{path}\n" for path in copy_shared("jobs", args.copy))
    if args.name is None:
        column = max(map(len, files)) + 2
        return "".join(f"{k.ljust(column)}{_about(p, column)}\n" for k, p in files.items())
    name = args.name.removesuffix(".toml")
    if name not in files:
        raise unknown("job", name, files)
    return shared_text(files[name])


def _about(path: Path, column: int) -> str:
    """Return the first sentence of a job file, as far as its first line and ours have it."""
    line = path.read_text().splitlines()[0].removeprefix("#").partition(". ")[0].rstrip(".")
    return textwrap.shorten(line, HELP_WIDTH - column, placeholder=" ...")


def main(argv: Sequence[str]) -> int:
    """Print it; returns the exit code."""
    return answer(text, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
