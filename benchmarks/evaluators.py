"""Throughput of the workers in a job with an evaluator, beside a job without one.

Whole runs with a server and three workers. A gradient sleeps for 10 ms. The evaluator reads a
checkpoint every epoch, and sleeps for 200 ms. So the ranks do not compete for cores. The other job
neither evaluates nor saves before its end.
"""

import time
from functools import partial
from pathlib import Path

from benchmarks.sleeping_model import SleepingModel
from benchmarks.turns import compare_rates, steady_rate, take_turns
from mpips.checkpoint.run_folder import METRICS
from mpips.datasets import Batch
from mpips.problems.base import Arrays
from mpips.tools.bench import jobs
from mpips.tools.bench.jobs import TRAIN, temporary_folder
from mpips.tools.bench.measure import Options, Row

SIZE = 100_000
EVALUATION_S = 0.2
TRAINING = 4  # number of ranks that train
EPOCHS = 16
REACH = 0.98
MODES = {"async": ("--servers", "1"), "sync": ("--mode", "sync", "--servers", "1")}


class Watched(SleepingModel):
    """A large vector of parameters, whose evaluation sleeps."""

    size = SIZE

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return a loss of 1, after a while."""
        time.sleep(EVALUATION_S)
        return {"loss": 1.0}


def run(options: Options) -> list[Row]:
    """Compare jobs with and without an evaluator in each of two modes.

    Raises:
        Failed: If a run fails.
    """
    repeats, rows = 1 if options.quick else options.repeats, []
    for mode, words in list(MODES.items())[: 1 if options.quick else None]:
        with temporary_folder() as folder:
            sides = {str(k): partial(_rate, folder, words, k, options) for k in (1, 0)}
            found = take_turns(sides, repeats)
        mine, other, ratio = compare_rates(found["1"], found["0"])
        case = f"{mode}, {TRAINING} ranks and an evaluator, {SIZE:,} parameters"
        rows.append(Row("evaluators", case, mine, "samples/s", "without", other, ratio, REACH))
    return rows


def _rate(folder: Path, mode: tuple[str, ...], evaluators: int, options: Options) -> float:
    """Run a job, and return its rate in samples/s."""
    out = folder / f"run-{len(list(folder.iterdir()))}"
    given = {
        "--problem": f"{__file__}:Watched", "--batch-size": "8", "--optimizer": "sgd",
        "--epochs": "4" if options.quick else str(EPOCHS), "--out": str(out),
        "--evaluators": str(evaluators), "--eval-every": str(evaluators),
        "--checkpoint-every": "0", "--log-every": "0.1",
    }  # fmt: skip
    words = [word for pair in given.items() for word in pair]
    jobs.run(TRAINING + evaluators, [*TRAIN, *words, *mode], folder)
    return steady_rate(out / METRICS)
