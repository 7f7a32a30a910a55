"""Benchmarks of a clone: ``python -m benchmarks [MEASURE ...]``.

Compares mpips with other packages, and its own modes, options and recovery with each other. Prints
one table; above a ratio of 1, mpips is better. Without mpirun, the command takes all measures, and
starts the worlds that they need. Under mpirun or srun, it takes the measures that fit this world.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import curves
from benchmarks.catalogue import MEASURES
from benchmarks.options import BenchmarkOptions
from mpips.config.jobfile import Parser
from mpips.errors import UserError
from mpips.tools.bench import __main__ as bench
from mpips.train import launched


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = bench.make_parser("benchmarks", __doc__)
    add = parser.add_argument
    add("--venv", type=Path, metavar="VENV", help="where the packages of peers are installed")
    add("--plot", type=Path, metavar="FILE", help="of convergence or hosts: "
        "also draw it, as .svg or .png")  # fmt: skip
    return parser


def read_options(args: argparse.Namespace) -> BenchmarkOptions:
    """Check a command line, and return its options.

    Raises:
        UserError: If an option has an illegal value.
    """
    if args.plot:
        if args.measures not in (["convergence"], ["hosts"]) or launched() is not None:
            raise UserError("--plot", "convergence or hosts alone, and without mpirun")
        curves.check(args.plot)
    if args.venv and not (args.venv / "bin" / "python").exists():
        raise UserError(f"--venv {args.venv}", "a virtual environment")
    common = bench.read_options(args)
    return BenchmarkOptions(**asdict(common), venv=args.venv, plot=args.plot)


def main(argv: Sequence[str]) -> int:
    """Take the measures of a command line, and return the exit code."""
    return bench.command(argv, make_parser(), MEASURES, read_options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
