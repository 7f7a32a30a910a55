"""Replay of a run made with --record: ``python -m mpips replay RUN``.

One process does the work of all ranks, in the order in which the servers applied pushes, from the
configuration in the record, and compares with all checkpoints that are there, bit by bit. Of a run
of several jobs each is replayed from what it began with. The exit code is 1 if something differs,
or if the record is damaged; it is named. Run it where the job ran: on a processor of that type, in
the folder that its paths begin in. With --until it stops at an update, and says which push that
was; -o keeps the parameters and slots as they were then, in a file that --init-from and numpy.load
read.

A run of a program of mpips.run is replayed with the program, whose file and words come last, as in
python -m mpips replay runs/mine digits.py --lr 0.1. The program is started as one process; where it
comes to its run that is made again, each worker in a process of its own, and that is the end.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mpips.config.jobfile import verbatim
from mpips.errors import perform, write_line


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this command."""
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
    """Replay what a command line asks for, and print what is to be told."""
    at = next((k for k, word in enumerate(argv) if word.endswith(".py")), len(argv))
    args = make_parser().parse_args(argv[:at])
    args.program += argv[at:]
    from mpips.tools.replay.run import replay, replay_program
    from mpips.tools.replay.worker_process import Over

    try:
        if args.program:
            replay_program(args.run, args.program, args.until, args.out)
            return
        for line in replay(args.run, args.until, args.out):
            write_line(line)
    except Over as over:  # the process of a worker
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(over.code)


def main(argv: Sequence[str]) -> int:
    """Replay a run; returns the exit code."""
    return perform(show, argv)
