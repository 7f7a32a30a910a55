"""Jobs of measures: a world for each, and one table."""

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
from mpips.tools.bench.measure import Catalogue, Measure, Options, Row, aims_for, say_rows, table

LIMIT_S = 900.0
TAIL = 2000  # characters of a failed job's output that are shown
TRAIN = ("-m", "mpips.train", "--quiet")
FACTS = "import json; from mpips.tools.bench.world import facts; print(json.dumps(facts()))"
Part = tuple[str, Callable[[], Iterable[Row]]]


class Failed(Exception):
    """A job that a measure needs has failed, with the end of what it printed."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="mpips-bench-") as name:
        yield Path(name)


def run(
    ranks: int,
    args: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> tuple[float, str]:
    """Run ``mpirun -n ranks python *args`` in `cwd`; returns its seconds and what it printed.

    Raises:
        Failed: If it does not end in time with exit code 0.
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
    """Take a measure in a world of its own.

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
    """Take measures one after the other; rows to stderr as they come, and the table at the end.

    Args:
        measures: All that there are.
        names: Of measures; empty for all.
        options: What to do.
        path: File for the rows as JSON, or None; written after each measure.

    Returns:
        0, or 1 if a measure could not be taken.

    Raises:
        UserError: If a name is not known, or needs several nodes, or if no world can be started.
    """
    chosen = measures.choose(names)
    report: dict[str, Any] = {"machine": machine()}
    report |= {"repeats": options.repeats, "quick": options.quick, "failed": []}
    rows: list[Row] = []
    for label, part in _parts(chosen, options):
        start, outcome = time.perf_counter(), ""
        try:
            for row in part():
                found = aims_for(options, [row])
                say_rows(found)
                rows += found
        except (Failed, UserError) as error:  # what it has measured counts
            report["failed"].append(label)
            outcome = f", failed: {error}"
        told = f"mpips bench: {label}: {time.perf_counter() - start:.1f} s{outcome}"
        print(told, file=sys.stderr, flush=True)
        report["rows"] = [row.to_json() for row in rows]
        if path:
            write_json(path, report)
    print(_heading(report))
    print(table(rows), flush=True)
    return 1 if report["failed"] else 0


def _parts(chosen: Sequence[Measure], options: Options) -> Iterator[Part]:
    """Yield what is to be done, each with its label."""
    for measure in chosen:
        for ranks in measure.worlds[: 1 if options.quick else None]:
            label = f"{measure.name}, {ranks} rank{'s' * (ranks > 1)}"
            yield label, partial(world, measure, ranks, options)
        if measure.has_jobs:
            yield measure.name, partial(measure.run, options)


def machine() -> dict[str, Any]:
    """Return the facts of this machine, as a rank sees them.

    Raises:
        UserError: If no rank can be started.
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
