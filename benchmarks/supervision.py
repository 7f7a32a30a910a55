"""Cost of supervision and of fault tolerance, while no rank fails.

Whole runs with 4 MB of parameters. A gradient sleeps for 10 ms, so ranks do not compete for cores.
Jobs are started by mpirun alone, by `mpips.launch`, which supervises them, and by `mpips.launch`
with ULFM if MPI supports it. With ULFM, two servers keep an undo log for shard takeover, and
messages between nodes are more expensive.
"""

import shlex
import time
from functools import partial
from pathlib import Path

from benchmarks import recovery
from benchmarks.turns import compare_rates, steady_rate, take_turns
from mpips.checkpoint.run_folder import METRICS
from mpips.launch.mpirun import default_launcher, survivors_launcher
from mpips.tools.bench import jobs
from mpips.tools.bench.jobs import Failed, temporary_folder
from mpips.tools.bench.measure import Options, Row
from tests.chaos.job import Job

SIZE = 1_000_000
CASES = {  # ranks, options, whether the job continues after a death
    "async, 1 server, 3 workers": (4, "--mode async --servers 1", True),
    "async, 2 servers, 2 workers": (4, "--mode async --servers 2", True),
    "async, each rank a node": (3, "--mode async --servers 1 --node-size 1", True),
    "sync, 3 workers": (3, "--mode sync", True),
}
EPOCHS = 8
REACH = 0.98
LIMIT_S = 120.0


def run(options: Options) -> list[Row]:
    """Compare each case under mpirun, and under `mpips.launch` without and with ULFM.

    Raises:
        Failed: If a run fails.
    """
    repeats, rows = 1 if options.quick else options.repeats, []
    survives = bool(survivors_launcher())
    cases = list(CASES.items())[: 1 if options.quick else None]
    for name, (ranks, words, goes_on) in cases:
        ways = ["mpirun", "watched", *["going on"] * (survives and goes_on)]
        with temporary_folder() as folder:
            given = folder, ranks, words.split(), options.quick
            sides = {way: partial(_rate, way, *given) for way in ways}
            found = take_turns(sides, repeats)
        for way in ways[1:]:
            mine, other, ratio = compare_rates(found[way], found["mpirun"])
            case = f"{name}: {'mpips.launch' + ' --ft' * (way == 'going on')}"
            rows.append(Row("supervision", case, mine, "samples/s", "mpirun", other, ratio, REACH))
    return rows


def _rate(way: str, folder: Path, ranks: int, more: list[str], quick: bool) -> float:
    """Run once; returns the rate in samples/s."""
    place = folder / f"run-{len(list(folder.iterdir()))}"
    place.mkdir()
    given = {
        "--problem": f"{recovery.__file__}:Large", "--hidden": f"{SIZE}", "--batch-size": "8",
        "--optimizer": "sgd", "--dtype": "float32", "--epochs": "3" if quick else f"{EPOCHS}",
        "--out": f"{place / 'out'}", "--eval-every": "0", "--checkpoint-every": "0",
        "--log-every": "0.1",
    }  # fmt: skip
    words = [word for pair in given.items() for word in pair] + more
    if way == "mpirun":
        jobs.run(ranks, [*jobs.TRAIN, *words], place)
    else:
        if way == "going on" and "sync" in more:
            words += ["--on-death", "shrink"]
        alone = ["--mpirun", shlex.join(default_launcher())] if way == "watched" else []
        _supervise(ranks, [*words, "--quiet"], ["--restarts", "0", *alone], place)
    return steady_rate(place / "out" / METRICS)


def _supervise(ranks: int, words: list[str], options: list[str], place: Path) -> None:
    with Job(place, ranks, words, options, place) as job:
        try:
            job.wait_until(lambda: False, time.monotonic() + LIMIT_S)
        except TimeoutError:
            raise Failed(f"not over after {LIMIT_S:g} s:\n{job.output[-jobs.TAIL :]}") from None
        if job.process.returncode:
            raise Failed(f"exit code {job.process.returncode}:\n{job.output[-jobs.TAIL :]}")
