"""Rate of each mode with one of six workers slowed down five times.

Whole runs with 2 servers and 6 workers. A gradient sleeps for 10 ms, so cores are free. The rate is
compared with the sum of the workers' own speeds: their rates of computing alone, including the slow
worker's. In mode sync, all workers wait for the slowest one.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.turns import compare_rates, steady_rate, take_turns
from mpips.checkpoint.run_folder import METRICS, SUMMARY
from mpips.tools.bench import jobs
from mpips.tools.bench.jobs import TRAIN, temporary_folder
from mpips.tools.bench.measure import Options, Row

RANKS, SERVERS, FACTOR = 8, 2, 5
PROBLEM = f"{Path(__file__).with_name('sleeping_model.py')}:SleepingModel"
BATCH = 8


@dataclass(frozen=True)
class Mode:
    """One mode.

    Attributes:
        options: Options that select the mode.
        epochs: Number of epochs, for a run of some seconds.
        reach: Smallest share of the own speeds that is the aim.
    """

    options: tuple[str, ...]
    epochs: int
    reach: float | None = 0.85


MODES = {
    "async": Mode((), 12),
    "ssp, bound 8": Mode(("--mode", "ssp", "--staleness-bound", "8"), 12),
    "sync": Mode(("--mode", "sync"), 3, None),
    "sync, 1 backup": Mode(("--mode", "sync", "--backup-workers", "1"), 12),
}


def run(options: Options) -> list[Row]:
    """Compare each mode with the workers' own speeds.

    Raises:
        Failed: If a run fails.
    """
    repeats = 1 if options.quick else options.repeats
    modes = dict(list(MODES.items())[: 2 if options.quick else None])
    with temporary_folder() as folder:
        sides = {name: partial(_rates, folder, mode, options) for name, mode in modes.items()}
        found = take_turns(sides, repeats)
    rows = []
    for name, mode in modes.items():
        mine, own, ratio = compare_rates(*zip(*found[name], strict=True))
        case = f"{name}, {RANKS - SERVERS} workers, one {FACTOR} x slower"
        beside = "the workers' own speeds"
        rows.append(Row("straggler", case, mine, "samples/s", beside, own, ratio, mode.reach))
    return rows


def _rates(folder: Path, mode: Mode, options: Options) -> tuple[float, float]:
    """Run once; returns the rate, and the sum of the workers' own speeds, in samples/s."""
    out = folder / f"run-{len(list(folder.iterdir()))}"
    given = {
        "--problem": PROBLEM, "--servers": str(SERVERS), "--batch-size": str(BATCH),
        "--epochs": "1" if options.quick else str(mode.epochs), "--out": str(out),
        "--inject-delay": f"{RANKS - SERVERS - 1}:{FACTOR}", "--optimizer": "sgd",
        "--eval-every": "0", "--checkpoint-every": "0", "--log-every": "0.1",
    }  # fmt: skip
    words = [word for pair in given.items() for word in pair]
    jobs.run(RANKS, [*TRAIN, *words, *mode.options], folder)
    summary = json.loads((out / SUMMARY).read_text())
    own = sum(worker["samples"] / worker["compute_s"] for worker in summary["per_worker"])
    if options.quick:  # a short run has only a line or two
        return summary["samples_per_s"], own
    return steady_rate(out / METRICS), own
