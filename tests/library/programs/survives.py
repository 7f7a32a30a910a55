"""Counts each sample, in a row too, while a worker dies; the others end the run, and go on."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from mpips.datasets import Batch

N, EPOCHS = 230, 8
ROWS = 23
TABLES = {"rows": mpips.Table(ROWS, 2, mpips.Zeros(), capacity="lazy")}


def means(params: dict[str, np.ndarray], batch: Batch) -> dict[str, float]:
    """Return how often the samples of a batch were counted."""
    return {"loss": float(params["counts"][batch.ids].mean())}


def train(worker: mpips.Worker) -> None:
    """Count; worker 1 dies behind its fifth push, with batches in hand, when all have begun."""
    begun = [Path(f"begun-{number}") for number in range(worker.workers)]
    begun[worker.id].touch()
    for pushed, batch in enumerate(worker.batches(N, batch_size=7, epochs=EPOCHS), 1):
        worker.grads["counts"][:] = -np.bincount(batch.ids, minlength=N)
        worker.push_rows("rows", batch.ids % ROWS, -np.ones((len(batch), 2)))
        time.sleep(0.005)
        worker.push(0.0)
        if worker.id == 1 and pushed == 5:
            while not all(path.exists() for path in begun):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    worker.log(left=worker.id)
    assert worker.evaluate(means, N) == {"loss": EPOCHS}


def main(out: Path, mode: str) -> int:
    options = {"mode": mode, "servers": 1, "quiet": True, "tables": TABLES, "resume": "auto"}
    params = {"counts": np.zeros(N)}
    result = mpips.run(train, params, mpips.SGD(1.0), out=out, **options)
    np.testing.assert_array_equal(result.params["counts"], EPOCHS)
    rows = result.rows("rows", np.arange(ROWS))
    np.testing.assert_array_equal(rows, np.full((ROWS, 2), EPOCHS * N / ROWS))
    assert result.summary["lost"] == [2]
    with pytest.raises(mpips.UserError, match="in which a worker has died"):
        mpips.run(train, params, out=out / "other", **options)
    print(f"rank {MPI.COMM_WORLD.rank} is done", flush=True)
    return result.code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
