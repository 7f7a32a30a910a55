"""Run a job under a supervisor: ``python -m mpips.launch -n 8 -- [options of mpips.train]``.

It starts mpirun, watches the run, and starts it again from its newest checkpoint when ranks die or
hang, until the run is complete or would get no further.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mpips.config.arguments import Parser
from mpips.config.command_line import parse_command_line
from mpips.errors import UserError

EPILOG = """\
Behind -- stand the options of mpips.train; or a program, whose name ends in .py, or -m MODULE, with
its own options: it calls mpips.run or mpips.torch.run with out= and resume="auto". The exit code is
0 if the run is complete, 85 if it was saved at a signal, 2 if it was refused, else 1. Ctrl-C asks
the ranks to save and end, a second one ends them at once.
"""
USAGE = (
    "python -m mpips.launch -n N [--restarts K] [--timeout S] [--mpirun WORDS] -- "
    "[options of mpips.train | PROGRAM.py ... | -m MODULE ...]"
)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this command."""
    parser = Parser(
        prog="python -m mpips.launch",
        usage=USAGE,
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", dest="ranks", type=int, required=True, metavar="N", help="ranks to start")
    add("--restarts", type=int, default=5, metavar="K",
        help="start it again at most so often [default: 5]")  # fmt: skip
    add("--timeout", type=float, default=300.0, metavar="S",
        help="end a job that has done nothing for so many seconds: longer than a start, a step or "
        "an evaluation takes [default: 300]")  # fmt: skip
    add("--mpirun", default="", metavar="WORDS", help="the launcher with its options but -n, such "
        "as 'mpirun -hosts a,b -ppn 4' [default: mpirun on this host]")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a job; returns the exit code."""
    ours, words = list(argv), []
    if "--" in ours:
        at = ours.index("--")
        ours, words = ours[:at], ours[at + 1 :]
    try:
        args = make_parser().parse_args(ours)
        if "--" not in argv:
            raise UserError("no --", "-- before the options of mpips.train, or a program")
        from mpips.launch.supervise import Order, supervise

        launcher = shlex.split(args.mpirun)
        order = Order(args.ranks, words, launcher, args.restarts, args.timeout)
        _check(order.ranks, order.restarts, order.timeout_s, launcher)
        if not order.is_program:
            _check_job(words)
        elif words[0] != "-m" and not Path(words[0]).is_file():
            raise UserError(f"no program {words[0]}", "a file", "give its path from this folder")
        return supervise(order)
    except UserError as error:
        print(f"mpips: {error}", file=sys.stderr)
        return error.code


def _check(ranks: int, restarts: int, timeout_s: float, launcher: Sequence[str]) -> None:
    """Check what was given.

    Raises:
        UserError: If something cannot be.
    """
    if ranks < 1:
        raise UserError(f"-n {ranks}", "an integer >= 1")
    if restarts < 0:
        raise UserError(f"--restarts {restarts}", "an integer >= 0")
    if not 1 <= timeout_s < 1e9:
        raise UserError(f"--timeout {timeout_s:g}", "seconds >= 1")
    if launcher and shutil.which(launcher[0]) is None:
        raise UserError(f"--mpirun {launcher[0]!r}", "a program on PATH", "load its module")


def _check_job(words: Sequence[str]) -> None:
    """Check that options are those of a run, before any rank is started.

    Raises:
        UserError: If one is illegal, or asks for something else than a run.
    """
    line = parse_command_line(words)
    asked = [*sorted(line.flags), *(["eval_only"] if line.options.get("eval_only") else [])]
    if asked:
        flag = "--" + asked[0].replace("_", "-")
        raise UserError(f"{flag} starts no run", "options of a run", f"give {flag} to mpips.train")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
