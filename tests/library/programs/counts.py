"""Counts each sample; stopped by a signal in the middle of an epoch, and gone on with.

``counts.py OUT STOP``: the worker that has pushed STOP batches sends itself SIGUSR1.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import mpips

N, EPOCHS = 230, 4


def main(out: Path, stop: int) -> int:
    """Run until the signal, or to the end; returns the exit code."""
    handler = signal.getsignal(signal.SIGUSR1)

    def train(worker: mpips.Worker) -> None:
        batches = worker.batches(N, batch_size=7, epochs=EPOCHS)
        for pushed, batch in enumerate(batches, 1):
            worker.grads["counts"][:] = -np.bincount(batch.ids, minlength=N)
            time.sleep(0.002)
            worker.push(0.0)
            if pushed == stop:
                os.kill(os.getpid(), signal.SIGUSR1)

    result = mpips.run(
        train, {"counts": np.zeros(N)}, mpips.SGD(1.0), mode="async", out=out, resume="auto",
        servers=1, quiet=True,
    )  # fmt: skip
    assert signal.getsignal(signal.SIGUSR1) is handler, "it is as it was before"
    counts = result.params["counts"]
    assert counts.sum() == result.summary["samples"]
    if result.code == 0:
        np.testing.assert_array_equal(counts, EPOCHS)
    else:
        assert result.reason == "SIGUSR1"
        assert 0 < counts.sum() < N * EPOCHS
    return result.code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
