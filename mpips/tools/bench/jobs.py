"""Driver of the bench, which starts a world for each measure."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mpips.errors import UserError
from mpips.launch.mpirun import Running
from mpips.session.metrics import write_json
from mpips.tools.bench.measure import Catalogue, Measure, Options, Row, say_row, table

LIMIT_S = 900.0
TAIL = 2000  # characters of a failed job's output in an error
TRAIN = ("-m", "mpips.train", "--quiet")
FACTS = "import json; from mpips.tools.bench.world import facts; print(json.dumps(facts()))"
Part = tuple[str, Callable[[], Iterable[Row]]]


class Failed(Exception):
    """Failure of a measure's job, with the end of its output."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder, and remove it after the block."""
    with tempfile.TemporaryDirectory(prefix="mpips-bench-") as name:
        yield Path(name)


def run(
    ranks: int,
    args: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> tuple[float, str]:
    """Run ``mpirun -n ranks python *args`` in `cwd`; returns its seconds and its output.

    Raises:
        Failed: If the job does not end in time with exit code 0.
    """
    start = time.perf_counter()
    with Running(ranks, args, cwd, env, wrapper) as job:
        try:
            done = job.wait(LIMIT_S)
        except TimeoutError as error:
            raise Failed(str(error)[-TAIL:]) from None
        spent = time.perf_counter() - start
    if done.code:
        raise Failed(f"exit code {done.code} of {' '.join(args)}:\n{done.output[-TAIL:]}")
    return spent, done.output


def world(measure: Measure, ranks: int, options: Options) -> list[Row]:
    """Take a measure in a new world.

    Raises:
        Failed: If the world fails.
    """
    args = ["-m", measure.package, measure.name, "--json", "rows.json"]
    args += ["--repeats", str(options.repeats), *["--quick"] * options.quick]
    args += ["--sizes", ",".join(map(str, options.sizes))] * bool(options.sizes)
    with temporary_folder() as folder:
        run(ranks, args, folder)
        return [
            Row.from_json(row) for row in json.loads((folder / "rows.json").read_text())["rows"]
        ]


def drive(measures: Catalogue, names: Sequence[str], options: Options, path: Path | None) -> int:
    """Take measures one after another, print new rows to stderr, and the table at the end.

    Args:
        measures: All measures.
        names: Names of the measures to take; empty for all.
        options: Options of the bench.
        path: File for the rows as JSON, or None; written after each measure.

    Returns:
        0, or 1 if a measure failed.

    Raises:
        UserError: If a name is unknown, a named measure needs several nodes, or no world starts.
    """
    chosen = measures.choose(names)
    report: dict[str, Any] = {"machine": machine()}
    report |= {"repeats": options.repeats, "quick": options.quick, "failed": []}
    rows: list[Row] = []
    for label, part in _parts(chosen, options):
        start, outcome = time.perf_counter(), ""
        try:
            for row in part():
                rows.append(options.aimed(row))
                say_row(rows[-1])
        except (Failed, UserError) as error:  # rows before the error stay
            report["failed"].append(label)
            outcome = f", failed: {error}"
        text = f"mpips bench: {label}: {time.perf_counter() - start:.1f} s{outcome}"
        print(text, file=sys.stderr, flush=True)
        report["rows"] = [row.to_json() for row in rows]
        if path:
            write_json(path, report)
    print(_heading(report))
    print(table(rows), flush=True)
    return 1 if report["failed"] else 0


def _parts(chosen: Sequence[Measure], options: Options) -> Iterator[Part]:
    """Yield the label and the function of each part of the bench."""
    for measure in chosen:
        for ranks in measure.worlds[: 1 if options.quick else None]:
            label = f"{measure.name}, {ranks} rank{'s' * (ranks > 1)}"
            yield label, partial(world, measure, ranks, options)
        if measure.has_jobs:
            yield measure.name, partial(measure.run, options)


def machine() -> dict[str, Any]:
    """Return the facts of this machine, which a job of one rank gathers.

    Raises:
        UserError: If the job fails.
    """
    try:
        with temporary_folder() as folder:
            _, printed = run(1, ["-c", FACTS], folder)
        facts: dict[str, Any] = json.loads(printed.splitlines()[-1])
    except (Failed, ValueError, IndexError) as error:
        raise UserError("no rank can be started", "that mpirun works", str(error)) from None
    return facts


def _heading(report: dict[str, Any]) -> str:
    facts = report["machine"]
    versions = ", ".join(f"{k} {facts[k]}" for k in ("mpips", "python", "numpy", "numba"))
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores; {facts['mpi']}; {versions}; {facts['date']}",
        f"repeats of each side, in turn: {report['repeats']}; medians",
    ]
    if report["quick"]:
        lines.append("quick: small sizes, which say nothing about speed")
    return "\n".join(lines)
