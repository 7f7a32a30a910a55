"""Supervisor of a job: ``python -m mpips.launch -n 8 -- [options of mpips.train]``.

It starts mpirun and watches the run. When ranks die or hang, it restarts the run from its newest
checkpoint, until the run is complete or makes no more progress.

Give the options of mpips.train after --. Or give a program, whose name ends in .py, or -m MODULE,
with its own options. The program calls mpips.run or mpips.torch.run with out= and resume="auto".
The exit code is 0 if the run is complete, 85 if it was saved at a signal, 2 if it was refused, else
1. Ctrl-C asks the ranks to save and end; a second one ends them at once.
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mpips.config.jobfile import split_words, verbatim
from mpips.errors import UserError, complain, counted

if TYPE_CHECKING:
    from mpips.launch.order import Order

USAGE = (
    "python -m mpips.launch [-n N] [--hosts A:4,B:4 [--elastic [N]] [--rsh WORDS]]\n"
    "       [--restarts K] [--timeout S] [--ft] [--mpirun WORDS] --\n"
    "       [options of mpips.train | PROGRAM.py ... | -m MODULE ...]"
)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this command."""
    parser = verbatim("python -m mpips.launch", __doc__, usage=USAGE)
    add = parser.add_argument
    add("-n", dest="ranks", type=int, metavar="N",
        help="number of ranks [default: all ranks of --hosts]")  # fmt: skip
    add("--hosts", default="", metavar="LIST", help="hosts with the ranks of each, such as "
        "a:4,b:4; a file with a host on each line; or slurm: the nodes of the allocation "
        "[default: this host]")  # fmt: skip
    add("--elastic", type=int, nargs="?", const=1, metavar="N", help="if hosts are lost, "
        "continue with fewer ranks on the other hosts, at least N [default: 1]")  # fmt: skip
    add("--rsh", type=shlex.split, default="", metavar="WORDS", help="command to start processes "
        "on hosts [default: ssh; with --hosts slurm, srun]")  # fmt: skip
    add("--restarts", type=int, default=5, metavar="K",
        help="largest number of restarts [default: 5]")  # fmt: skip
    add("--timeout", type=float, default=300.0, metavar="S",
        help="end a job without progress for so many seconds, which must be longer than a start, a "
        "step or an evaluation; 0: the ranks end it, by mpips.train's --timeout "
        "[default: 300]")  # fmt: skip
    add("--ft", action="store_true", help="let a program's run continue when ranks die (Open "
        "MPI only); runs of mpips.train do so without it in modes async and ssp, except with "
        "--hosts slurm or on hosts with InfiniBand")  # fmt: skip
    add("--mpirun", type=shlex.split, default="", metavar="WORDS", help="launcher and its options "
        "except -n, such as 'mpirun -iface ib0', or without --hosts 'mpirun -hosts a,b -ppn 4' "
        "[default: mpirun]")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a job, and return the exit code."""
    ours, words = split_words(argv)
    try:
        args = make_parser().parse_args(ours)
        if words is None:
            raise UserError("no --", "-- before the options of mpips.train, or a program")
        from mpips.launch.supervise import supervise

        order = _order(args, words)
        check(order)
        return supervise(order)
    except UserError as error:
        complain(error)
        return error.code


def _order(args: argparse.Namespace, words: Sequence[str]) -> "Order":
    """Return the order of a job from the command line.

    Raises:
        UserError: If hosts or options cannot be used.
    """
    from mpips.launch.hosts import SLURM, find_hosts, is_srun
    from mpips.launch.order import Order
    from mpips.launch.returned import find_again

    launcher, ranks = args.mpirun, args.ranks
    how = launcher, args.restarts, args.timeout, args.ft
    if args.hosts and (ranks is None or ranks > 0):
        hosts = find_hosts(args.hosts, ranks)
        again, grows = partial(find_again, args.hosts, ranks, hosts), ranks is None
        ranks = ranks or sum(host.ranks for host in hosts)
        least = ranks if args.elastic is None else args.elastic
        slurm = args.hosts == SLURM or is_srun(*launcher[:1])
        return Order(ranks, words, *how, hosts, least, args.rsh, slurm, again, grows)
    if ranks is None:
        raise UserError("neither -n nor --hosts", "the number of ranks", "give -n")
    for flag, given in (("--elastic", args.elastic is not None), ("--rsh", args.rsh)):
        if given and not args.hosts:
            raise UserError(f"{flag} without --hosts", "both", "name the hosts, such as a:4,b:4")
    return Order(ranks, words, *how)


def check(order: "Order") -> None:
    """Check an order before any rank starts.

    Raises:
        UserError: If a value is not allowed, or a program does not exist.
    """
    ranks, words = order.ranks, order.words
    least, seconds = order.least if order.hosts else 1, order.timeout_s
    for right, got, expected in (
        (ranks >= 1, f"-n {ranks}", "an integer >= 1"),
        (1 <= least <= ranks, f"--elastic {least}", f"1 to {counted(ranks, 'rank')}"),
        (order.restarts >= 0, f"--restarts {order.restarts}", "an integer >= 0"),
        (seconds == 0 or 1 <= seconds < 1e9, f"--timeout {seconds:g}", "seconds >= 1, or 0"),
    ):
        if not right:
            raise UserError(got, expected)
    for flag, command in (("--mpirun", order.launcher), ("--rsh", order.remote)):
        if command and shutil.which(command[0]) is None:
            raise UserError(f"{flag} {command[0]!r}", "a program on PATH", "load its module")
    if order.begins_run and order.is_program and words[0] != "-m" and not os.path.isfile(words[0]):
        raise UserError(f"no program {words[0]}", "a file", "give its path from this folder")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
