"""Jobs that measures start: worlds of this command, runs of ``mpips.train``."""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mpips.launch.mpirun import Running
from mpips.tools.bench.catalogue import Measure
from mpips.tools.bench.measure import Options, Row

LIMIT_S = 900.0
TAIL = 2000  # characters of a failed job's output that are shown
TRAIN = ("-m", "mpips.train", "--quiet")


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
