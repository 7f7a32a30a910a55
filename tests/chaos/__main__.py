"""Disturb jobs that count digits, and judge what comes of it: ``python -m tests.chaos``.

Faults are injected into a job under `mpips.launch`, in an order and at moments drawn from a seed.
Then the run must be complete, each batch of data applied once, and nothing left of the job. The
exit code is 0 if all runs were complete and right, 1 if not, 2 if the command was refused.
"""

import argparse
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from mpips.config.jobfile import verbatim
from mpips.config.option import HELP_WIDTH
from mpips.errors import UserError, complain
from tests.chaos.builtin import MODES, parse_modes
from tests.chaos.hosts import join
from tests.chaos.plan import DEFAULT, FAULTS, SAVING, TRAINING, chosen
from tests.chaos.run import Order, Result, Struck, run

EPILOG = "\n".join(
    [
        "faults:",
        *(f"  {name:18s}{text}" for name, text in FAULTS.items()),
        textwrap.fill(f"jobs: {', '.join(MODES)}", HELP_WIDTH),
    ]
)


def line(result: Result, where: Path) -> str:
    """Return a run in a line, and below it what is wrong."""
    faults = ", ".join(map(_fault_text, result.struck)) or "no fault"
    attempts = f"{result.attempts} attempt{'s' * (result.attempts != 1)}"
    text = f"seed {result.seed}  {result.mode}  {faults}  {attempts}, {result.seconds:.1f} s"
    wrong = (*result.wrong, f"see {where}") if result.wrong else ()
    return "\n  ".join([f"{text}  {result.verdict}", *wrong])


def _fault_text(struck: Struck) -> str:
    """Return a fault, when it came, whom it hit, and the time to the first progress after it."""
    after = "" if struck.seconds is None else f" {struck.seconds:.1f} s"
    moments = {TRAINING: f"{struck.step}", SAVING: f"{struck.step}+save"}
    when = moments.get(struck.fault.moment, "start")
    return f"{struck.fault.name}@{when} ({', '.join(struck.hit[:2])}){after}"


def make_parser() -> argparse.ArgumentParser:
    parser = verbatim("python -m tests.chaos", __doc__, epilog=EPILOG)
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="S",
        help="of the first run; the next ones take the next ones [default: 0]")  # fmt: skip
    add("--faults", default=DEFAULT, metavar="LIST", help=f"with commas [default: {DEFAULT}]")
    add("--most", type=int, default=0, metavar="M",
        help="draw 1 to M faults of the list for each run [default: each of them]")  # fmt: skip
    add("--runs", type=int, default=1, metavar="K", help="runs [default: 1]")
    add("-n", dest="ranks", type=int, default=4, metavar="N", help="ranks [default: 4]")
    add("--hosts", type=int, default=0, metavar="K", help="of the ranks: namespaces of this one, "
        "which takes root [default: this one]")  # fmt: skip
    add("--modes", default="async", metavar="LIST",
        help="jobs, which runs take in turn, or all [default: async]")  # fmt: skip
    add("--timeout", type=float, default=20.0, metavar="S", help="as of mpips.launch: longer than "
        "a start, a step or an evaluation takes [default: 20]")  # fmt: skip
    add("--limit", type=float, default=600.0, metavar="S",
        help="seconds after which a run counts as one that hangs [default: 600]")  # fmt: skip
    add("--folder", type=Path, metavar="DIR", help="where it runs; what went wrong is kept "
        "[default: chaos-TIME]")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    try:
        return _run_all(make_parser().parse_args(argv))
    except UserError as error:
        complain(error)
        return error.code
    except KeyboardInterrupt:
        print("tests.chaos: interrupted; its job is ended", file=sys.stderr)
        return 1


def _run_all(args: argparse.Namespace) -> int:
    """Do the runs, and print what comes of them; returns the exit code."""
    hosts = [f"host{k}" for k in range(1, args.hosts + 1)]
    faults, modes = chosen(args.faults, "fault", [*FAULTS]), parse_modes(args.modes)
    order = Order(args.ranks, args.timeout, faults, args.most, args.limit, hosts)
    if hosts:
        join(hosts)
    folder = (args.folder or Path(f"chaos-{time.strftime('%Y%m%d-%H%M%S')}")).absolute()
    results = list[Result]()
    for k in range(args.runs):
        seed = args.seed + k
        where = folder / f"seed-{seed}"
        results.append(run(order, seed, modes[k % len(modes)], where))
        print(line(results[-1], where), flush=True)
        if not results[-1].wrong:
            shutil.rmtree(where)
    if not any(folder.iterdir()):
        folder.rmdir()
    good = sum(not result.wrong for result in results)
    struck, attempts = sum(len(k.struck) for k in results), sum(k.attempts for k in results)
    print(f"{good} of {args.runs} runs exact or balanced; {struck} faults, {attempts} attempts")
    return int(good < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
