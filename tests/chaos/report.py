"""What is told of runs that were disturbed: a line each, a table, and a file for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from mpips.errors import UserError
from tests.chaos.plan import SAVING, TRAINING, Fault
from tests.chaos.run import Result, Struck


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
