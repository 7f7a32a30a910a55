"""``python -m mpips.bench --scale``: how the cost of a step grows, in one table and one plot.

Without mpirun it starts a world for each number of ranks; under mpirun it measures that world.
``--from`` joins what several such commands wrote: that is how hosts are compared.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpips.bench import growth, jobs, plot
from mpips.bench.driver import described, machine
from mpips.bench.measure import Options
from mpips.bench.points import Points, join, read
from mpips.errors import UserError
from mpips.report import drawing
from mpips.session.metrics import write_json

RANKS, QUICK_RANKS = (1, 2, 3, 4, 6, 8), (2, 3)
MANY_RANKS, MANY_CORES = (12, 16), 16


@dataclass(frozen=True)
class Request:
    """What the command line asks for, beside the options of any measure.

    Attributes:
        json: File for the points, or None.
        plot: File for the picture, or None.
        files: Files to join, instead of measuring.
    """

    json: Path | None = None
    plot: Path | None = None
    files: Sequence[Path] = ()

    def check(self, launched: bool) -> None:
        """Check what can be checked before anything is measured.

        Args:
            launched: Whether this process is a rank of a world.

        Raises:
            UserError: If it cannot be done.
        """
        if launched and (self.files or self.plot):
            name = "--from" if self.files else "--plot"
            remedy = "use --json FILE here, and then --scale --from FILE ... without mpirun"
            raise UserError(f"{name} under mpirun", "a command without it", remedy)
        if self.plot:
            drawing.check(self.plot)


def run(request: Request, options: Options) -> int:
    """Measure in worlds of their own, or join files; print the table. Not for a rank.

    Returns:
        0, or 1 if a world failed.

    Raises:
        UserError: If a file is wrong, or no world can be started.
    """
    if request.files:
        points, failed = join([read(path) for path in request.files]), False
    else:
        points, failed = _measure(options)
    _show(points, request)
    return int(failed)


def _show(points: Points, request: Request) -> None:
    if request.json:
        write_json(request.json, points.to_json())
    for facts in points.machines:
        print(described(facts))
    print(growth.text(points), flush=True)
    if request.plot:
        plot.draw(points, request.plot)


def _measure(options: Options) -> tuple[Points, bool]:
    """Start the worlds, one after the other; returns their points, and whether any failed."""
    cores = int(machine()["cores"])
    ranks = QUICK_RANKS if options.quick else RANKS + MANY_RANKS * (cores >= MANY_CORES)
    parts, failed = [], False
    for number in ranks:
        start = time.perf_counter()
        outcome = ""
        try:
            parts.append(_world(number, options))
        except jobs.Failed as error:
            failed, outcome = True, f", failed: {error}"
        spent = time.perf_counter() - start
        line = f"mpips.bench: scale, {number} rank{'s' * (number > 1)}: {spent:.1f} s{outcome}"
        print(line, file=sys.stderr, flush=True)
    return join(parts), failed


def _world(ranks: int, options: Options) -> Points:
    args = ["-m", "mpips.bench", "--scale", "--json", "points.json", *jobs.words(options)]
    with jobs.temporary_folder() as folder:
        jobs.run(ranks, args, folder)
        return Points.from_json(json.loads((folder / "points.json").read_text()))


def run_in_world(request: Request, options: Options) -> int:
    """Measure in this world; rank 0 prints the table. Collective: yes. Returns the exit code."""
    from mpips.bench import steps, world
    from mpips.cluster.start import whole_world
    from mpips.cluster.world import Cluster

    def work() -> None:
        ranks = Cluster(whole_world())
        ranks.limit_threads()
        points = steps.measure(ranks, options)
        if ranks.rank == 0:
            _show(points, request)
        ranks.barrier()
        ranks.free()

    return world.guarded(work)
