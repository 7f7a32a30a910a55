"""Program of `mpips.run`; rank 1 dies in the first start as it trains, in the second before."""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import mpips
from mpips.datasets import Batch
from mpips.mpi.start import MPI
from mpips.problems.base import Arrays


def die(name: str) -> None:
    if MPI.COMM_WORLD.rank == 1 and not Path(name).exists():
        Path(name).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(worker: mpips.Worker) -> None:
    def gradient(params: Arrays, batch: Batch, out: Arrays) -> float:
        die("first")
        out["w"][:] = 1
        return 0.0

    for batch in worker.batches(64):
        worker.step(gradient, batch)


if Path("first").exists():
    die("second")
given = {"out": "out", "resume": "auto", "mode": "sync", "batch_size": 8, "epochs": 2}
done = mpips.run(train, {"w": np.zeros(4)}, mpips.SGD(0.1), **given)
sys.exit(done.code)
