"""Bench of a machine: ``python -m mpips bench [MEASURE ...]``.

Compares mpips with the limit of this machine, and prints a table. The two sides of a ratio take
turns in one run; above 1, mpips is better. Without mpirun, the command takes all measures, and
starts the worlds that they need. Under mpirun or srun, it takes the measures that fit this world.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mpips.config.jobfile import Parser, verbatim
from mpips.errors import Exit, UserError
from mpips.tools.bench.measure import MEASURES, Catalogue, Options
from mpips.train import launched, refuse


def make_parser(package: str = "mpips bench", text: str | None = __doc__) -> Parser:
    """Return the parser of this command, or of another command that takes measures."""
    parser = verbatim(f"python -m {package}", text, add_help=False)
    add = parser.add_argument
    add("measures", nargs="*", metavar="MEASURE", help="see --list [default: all but long ones]")
    add("--quick", action="store_true", help="small sizes: shows that all runs, not how fast")
    add("--repeats", type=int, metavar="N", help="repeats of each side [default: 5, of --quick 1]")
    add("--sizes", default="", metavar="N,N,...", help="bytes of the parameters, where sizes vary")
    add("--json", type=Path, metavar="FILE", help="also write the rows, and the machine's facts")
    add("--list", action="store_true", help="show the measures, and end")
    add("--help", "-h", action="store_true", help="show this text, and end")
    return parser


def read_options(args: argparse.Namespace) -> Options:
    """Check a command line, and return its options.

    Raises:
        UserError: If an option has an illegal value.
    """
    if args.repeats is None:
        args.repeats = 1 if args.quick else Options.repeats
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}", "an integer >= 1")
    words = args.sizes.split(",") if args.sizes else []
    if not all(word.isdecimal() and int(word) >= 4 for word in words):
        raise UserError(f"--sizes {args.sizes}", "bytes >= 4, with commas between them")
    if args.json and not os.path.isdir(args.json.absolute().parent):
        raise UserError(f"--json {args.json}", "a file in a folder that is there")
    return Options(args.repeats, args.quick, tuple(map(int, words)))


def main(argv: Sequence[str]) -> int:
    """Take measures in this world, or without a launcher as the driver; returns the exit code."""
    return command(argv, make_parser(), MEASURES, read_options)


def command(
    argv: Sequence[str],
    parser: Parser,
    measures: Catalogue,
    read: Callable[[argparse.Namespace], Options],
) -> int:
    """Run a command line, and return the exit code.

    Args:
        argv: Words of the command line.
        parser: Parser of the command.
        measures: All measures.
        read: Function that checks the parsed words, and returns their options.
    """
    rank = launched()
    try:
        args = parser.parse_args(argv)
        if args.help or args.list:
            text = parser.format_help() if args.help else measures.listing()
            print(end="" if rank not in (None, "0") else text)
            return Exit.DONE
        options = read(args)
        if rank is None:
            from mpips.tools.bench import jobs

            # The exception ends the worlds that the driver has started.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            return jobs.drive(measures, args.measures, options, args.json)
        from mpips.tools.bench import world

        return world.run(measures, args.measures, options, args.json)
    except UserError as error:
        return refuse(error, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
