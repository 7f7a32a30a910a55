"""Replay of a run made with --record: ``python -m mpips replay RUN``.

One process repeats the work of all ranks, with the configuration and the order of pushes in the
record, and compares the results with all checkpoints of the run, bit by bit. Each job of the run is
replayed from its own start. If a value differs or the record is damaged, the command names it, and
the exit code is 1. Use the same type of processor and the same working folder as the job. With
--until, the replay stops at an update, and prints the push that made it. -o saves the parameters
and slots at the end, in a file for --init-from and numpy.load.

To replay a program that called mpips.run, give its file and arguments last, as in python -m mpips
replay runs/mine digits.py --lr 0.1. The program starts as one process. Its call of mpips.run is
replaced by the replay, with a process for each worker, and the program ends there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mpips.config.jobfile import verbatim
from mpips.errors import perform, write_line


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = verbatim("python -m mpips replay", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--until", type=int, metavar="UPDATE", help="replay the last job that made "
        "this update, up to it")  # fmt: skip
    parser.add_argument("-o", "--out", type=Path, metavar="FILE.npz", help="keep parameters and "
        "slots at the end, or after --until")  # fmt: skip
    parser.add_argument("program", nargs="*", metavar="PROGRAM ...", help="the "
        "program of the run and its words, where it has one")  # fmt: skip
    return parser


def show(argv: Sequence[str]) -> None:
    """Replay the run of a command line, and print messages."""
    at = next((k for k, word in enumerate(argv) if word.endswith(".py")), len(argv))
    args = make_parser().parse_args(argv[:at])
    args.program += argv[at:]
    from mpips.tools.replay.run import replay, replay_program

    if args.program:
        replay_program(args.run, args.program, args.until, args.out)
        return
    for line in replay(args.run, args.until, args.out):
        write_line(line)


def main(argv: Sequence[str]) -> int:
    """Replay a run, and return the exit code."""
    return perform(show, argv)
