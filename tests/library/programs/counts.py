"""Counts each sample; stopped by signals in the middle of an epoch, and gone on with elsewhere."""

import os
import signal
import time
from pathlib import Path

import numpy as np

import mpips
from mpips.errors import Exit

N, EPOCHS = 230, 4


def main(out: Path) -> None:
    """Run until the signal of a worker that has pushed so many batches, twice; then to the end."""
    handler = signal.getsignal(signal.SIGUSR1)
    for servers, stop in ((1, 5), (2, 4), (1, 0)):

        def train(worker: mpips.Worker, stop: int = stop) -> None:
            batches = worker.batches(N, batch_size=7, epochs=EPOCHS)
            for pushed, batch in enumerate(batches, 1):
                worker.grads["counts"][:] = -np.bincount(batch.ids, minlength=N)
                time.sleep(0.002)
                worker.push(0.0)
                if pushed == stop:
                    os.kill(os.getpid(), signal.SIGUSR1)

        result = mpips.run(
            train, {"counts": np.zeros(N)}, mpips.SGD(1.0), mode="async", out=out, resume="auto",
            servers=servers, quiet=True,
        )  # fmt: skip
        assert signal.getsignal(signal.SIGUSR1) is handler, "it is as it was before"
        counts = result.params["counts"]
        assert counts.sum() == result.summary["samples"]
        assert (result.reason, result.code) == (("SIGUSR1", Exit.SAVED) if stop else ("epochs", 0))
        assert stop == 0 or 0 < counts.sum() < N * EPOCHS
    np.testing.assert_array_equal(counts, EPOCHS)
    print("every sample is counted", flush=True)
