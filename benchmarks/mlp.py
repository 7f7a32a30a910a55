"""Training a multi-layer perceptron with two workers, beside two runs of one rank.

Samples per second of whole runs, 784-1024-1024-10 with batches of 64 a worker: asynchronous with
one server and two workers, and synchronous on two ranks. Beside them stands the sum of two runs of
one rank each that train at the same time. They share the machine's memory and caches as two workers
do, but exchange nothing.
"""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.turns import compare_rates, steady_rate, take_turns
from mpips.checkpoint.run_folder import METRICS, SUMMARY
from mpips.tools.bench.jobs import TRAIN, temporary_folder
from mpips.tools.bench.jobs import run as run_job
from mpips.tools.bench.measure import Options, Row

SIDES = {
    "async": (3, ("--mode", "async", "--servers", "1")),
    "sync": (2, ("--mode", "sync")),
}
SINGLE = 1, "--mode", "sync", "--threads", "1"
RANKS = {"async": "1 server, 2 workers", "sync": "2 ranks"}
WORKERS = 2
SAMPLES = 8192


class Perceptron:
    """Runs that train 784-1024-1024-10 on random samples by SGD, with batches of 64 per worker.

    Args:
        folder: Folder for the data and the runs.
        quick: Whether to train a small model for a short time.
    """

    def __init__(self, folder: Path, quick: bool) -> None:
        self._folder, self._quick, self._runs = folder, quick, itertools.count()
        self.hidden = 256 if quick else 1024
        self.case = f"784-{self.hidden}-{self.hidden}-10, batch 64"
        self._epochs = 2 if quick else 4
        rng = np.random.default_rng(0)
        count = SAMPLES + 1  # one sample is held out
        x = rng.random((count, 784), "f4")
        np.savez(folder / "samples.npz", x=x, y=rng.integers(0, 10, count))

    def rate(self, ranks: int, *options: str) -> float:
        """Train on `ranks` ranks; returns the rate in samples/s, without start and end.

        Raises:
            Failed: If the run fails, or is too short.
        """
        out = self._folder / f"run-{next(self._runs)}"
        run_job(ranks, [*TRAIN, *self.words(out, self._epochs), *options], self._folder)
        if self._quick:  # a short run has only a line or two
            return float(json.loads((out / SUMMARY).read_text())["samples_per_s"])
        return steady_rate(out / METRICS)

    def rate_of_singles(self) -> float:
        """Train by `WORKERS` runs of one rank at the same time; returns the sum of their rates."""
        with ThreadPoolExecutor(WORKERS) as pool:
            found = [pool.submit(self.rate, *SINGLE) for _ in range(WORKERS)]
            return sum(run.result() for run in found)

    def words(self, out: Path, epochs: int) -> list[str]:
        """Return the options of a run, except its mode."""
        given = {
            "--dataset": "samples.npz", "--test-fraction": "0.0001", "--out": str(out),
            "--hidden": f"{self.hidden},{self.hidden}", "--batch-size": "64",
            "--optimizer": "sgd", "--lr": "0.01", "--epochs": str(epochs),
            "--eval-every": "0", "--checkpoint-every": "0", "--log-every": "0.01",
        }  # fmt: skip
        return [word for pair in given.items() for word in pair]


def run(options: Options) -> list[Row]:
    """Compare both modes.

    Raises:
        Failed: If a run fails.
    """
    with temporary_folder() as folder:
        job = Perceptron(folder, options.quick)
        sides = {k: partial(job.rate, n, *words) for k, (n, words) in SIDES.items()}
        found = take_turns({**sides, "singles": job.rate_of_singles}, options.repeats)
    rows = []
    for mode, ranks in RANKS.items():
        mine, other, ratio = compare_rates(found[mode], found["singles"])
        case = f"{job.case}, {mode}, {ranks}"
        beside = f"{WORKERS} runs of one rank at once"
        rows.append(Row("mlp", case, mine, "samples/s", beside, other, ratio))
    return rows
