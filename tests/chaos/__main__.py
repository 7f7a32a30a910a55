"""Disturb a job and judge what comes of it: ``python -m tests.chaos [-- options of mpips.train]``.

Faults are injected into a job under `mpips.launch`, in an order and at moments drawn from a seed.
Then the run must be complete, each batch of data applied once, and nothing left of the job. Without
a job of yours digits are counted, by which that is proved.
"""

import argparse
import dataclasses
import json
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from mpips.config.command_line import given_values, load
from mpips.config.jobfile import split_words, verbatim
from mpips.config.option import HELP_WIDTH
from mpips.errors import UserError, complain
from mpips.launch.__main__ import check
from mpips.launch.order import Order as JobOrder
from tests.chaos.builtin import MODES, OUT, parse_modes
from tests.chaos.hosts import join
from tests.chaos.plan import DEFAULT, FAULTS, SAVING, TRAINING, Fault, parse_faults
from tests.chaos.run import Order, Result, Struck, run

TEXT = """\
Behind -- stand the options of mpips.train without --out; or a program, as of mpips.launch, with
{out} among its words for the folder of the run. It has to last until all faults have come.
The exit code is 0 if all runs were complete and right, 1 if
not, 2 if the command was refused.
"""
EPILOG = "\n".join(
    [
        "faults:",
        *(f"  {name:18s}{text}" for name, text in FAULTS.items()),
        textwrap.fill(f"built-in jobs: {', '.join(MODES)}", HELP_WIDTH),
        "",
        TEXT,
    ]
)
USAGE = "python -m tests.chaos [--seed S] [--faults LIST] [options] [-- options of mpips.train]"


def line(result: Result, where: Path) -> str:
    """Return a run in a line, and below it what is wrong."""
    faults = ", ".join(_fault_text(struck) for struck in result.struck) or "no fault"
    attempts = f"{result.attempts} attempt{'s' * (result.attempts != 1)}"
    head = f"seed {result.seed}  {result.mode or 'your job'}  {faults}"
    text = f"{head}  {attempts}, {result.seconds:.1f} s  {result.verdict}"
    if result.wrong:
        text += "".join(f"\n  {wrong}" for wrong in (*result.wrong, f"see {where}"))
    return text


def _fault_text(struck: Struck) -> str:
    """Return a fault, when it came, and how long it was to the first progress after it."""
    after = "" if struck.seconds is None else f" {struck.seconds:.1f} s"
    return f"{struck.fault.name}@{_moment(struck.fault, struck.step)}{after}"


def _moment(fault: Fault, step: int) -> str:
    if fault.moment in (TRAINING, SAVING):
        return f"{step}{'+save' * (fault.moment == SAVING)}"
    return "start"


def table(results: Sequence[Result]) -> str:
    """Return the table of all runs: a line for each mode, and a line for each fault."""
    rows = [["job", "runs", "exact or balanced", "faults", "attempts"]]
    for mode in dict.fromkeys(result.mode for result in results):
        runs = [result for result in results if result.mode == mode]
        good = sum(not result.wrong for result in runs)
        counts = sum(len(result.struck) for result in runs), sum(r.attempts for r in runs)
        rows.append([mode or "your job", *map(str, (len(runs), good, *counts))])
    times = [["fault", "times", "s to progress: median", "worst", "went by"]]
    struck = [one for result in results for one in result.struck]
    for name in dict.fromkeys(sorted(one.fault.name for one in struck)):
        ones = [one for one in struck if one.fault.name == name]
        known = [one.seconds for one in ones if one.seconds is not None]
        figures = [f"{median(known):.1f}", f"{max(known):.1f}"] if known else ["-", "-"]
        times.append([name, f"{len(ones)}", *figures, f"{len(ones) - len(known)}"])
    return f"{_aligned(rows)}\n\n{_aligned(times)}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)


def write(path: Path, results: Sequence[Result], facts: dict[str, Any]) -> None:
    """Write all that is known of the runs as JSON."""
    text = json.dumps({**facts, "runs": list(map(_facts, results))}, indent=1)
    try:
        path.write_text(f"{text}\n")
    except OSError as problem:
        got = f"--json {path}: {problem.strerror}"
        raise UserError(got, "a file that can be written") from None


def _facts(result: Result) -> dict[str, Any]:
    faults = [
        {**asdict(one.fault), "step": one.step, "hit": one.hit, "seconds": one.seconds}
        for one in result.struck
    ]
    names = ("seed", "mode", "verdict", "attempts", "seconds", "wrong")
    return {**{name: getattr(result, name) for name in names}, "faults": faults}


def make_parser() -> argparse.ArgumentParser:
    parser = verbatim("python -m tests.chaos", __doc__, usage=USAGE, epilog=EPILOG)
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
    add("--modes", default="", metavar="LIST",
        help="built-in jobs, which runs take in turn, or all [default: async]")  # fmt: skip
    add("--timeout", type=float, default=20.0, metavar="S", help="as of mpips.launch: longer than "
        "a start, a step or an evaluation takes [default: 20]")  # fmt: skip
    add("--limit", type=float, default=600.0, metavar="S",
        help="seconds after which a run counts as one that hangs [default: 600]")  # fmt: skip
    add("--ft", action="store_true", help="as of mpips.launch: for programs")
    add("--folder", type=Path, metavar="DIR", help="where it runs; what went wrong is kept "
        "[default: chaos-TIME]")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write what is known of the runs")
    return parser


def main(argv: Sequence[str]) -> int:
    ours, words = split_words(argv)
    try:
        args = make_parser().parse_args(ours)
        return _run(args, words or [])
    except UserError as error:
        complain(error)
        return error.code
    except KeyboardInterrupt:
        print("tests.chaos: interrupted; its job is ended", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, words: list[str]) -> int:
    _check(args, words)
    job = JobOrder(args.ranks, words, timeout_s=args.timeout, survives=args.ft)
    check(job)
    if job.is_program and not any(OUT in word for word in words):
        raise UserError(f"a program without {OUT}", f"{OUT} among its words", "see --help")
    if words and not job.is_program:
        job = dataclasses.replace(job, words=_often_saved(words))
    hosts = [f"host{k}" for k in range(1, args.hosts + 1)]
    order = Order(job, parse_faults(args.faults), args.most, args.limit, hosts=hosts)
    modes = [""] if words else parse_modes(args.modes or "async")
    if hosts:
        join(hosts)
    folder = (args.folder or Path(f"chaos-{time.strftime('%Y%m%d-%H%M%S')}")).absolute()
    results = _run_all(args, order, modes, folder)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return int(any(result.wrong for result in results))


def _run_all(
    args: argparse.Namespace, order: Order, modes: list[str], folder: Path
) -> list[Result]:
    """Do the runs, and print what comes of them; returns that."""
    facts = {"command": shlex.join(["python", "-m", "tests.chaos", *sys.argv[1:]])}
    results, undisturbed = [], folder / "undisturbed"
    if not modes[0] and not order.job.is_program and load(order.job.words).in_rounds:
        first = run(dataclasses.replace(order, faults=(), most=0), args.seed, "", undisturbed)
        print(line(first, undisturbed), flush=True)
        if first.wrong:
            return [first]
        order = dataclasses.replace(order, same_as=undisturbed / "out")
    for k in range(args.runs):
        seed = args.seed + k
        where = folder / f"seed-{seed}"
        results.append(run(order, seed, modes[k % len(modes)], where))
        print(line(results[-1], where), flush=True)
        if not results[-1].wrong:
            shutil.rmtree(where)
        if args.json:
            write(args.json, results, {**facts, "ranks": args.ranks})
    print(f"\n{table(results)}")
    if not any(result.wrong for result in results):
        shutil.rmtree(undisturbed, ignore_errors=True)
    return results


def _check(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Check what was given beside the job."""
    for flag, value, least in (
        *(("--runs", args.runs, 1), ("--most", args.most, 0), ("--hosts", args.hosts, 0)),
        *(("--seed", args.seed, 0), ("--limit", args.limit, 1)),
    ):
        if not least <= value < 1e9:
            raise UserError(f"{flag} {value:g}", f"a number >= {least}")
    if words and args.modes:
        raise UserError("--modes and a job", "one of the two", "leave out --modes")
    if any(word == "--out" or word.startswith("--out=") for word in words):
        raise UserError("--out", "options without it", "say by --folder where runs go")


def _often_saved(words: list[str]) -> list[str]:
    """Return the options of a job, which saves each second unless they say how often."""
    said = "checkpoint_every" in given_values(words)
    return words if said else [*words, "--checkpoint-every", "1"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
