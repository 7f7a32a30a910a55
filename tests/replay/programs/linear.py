"""Runs of NumPy whose loops draw, evaluate and keep to themselves what a rank has for itself."""

import sys
from pathlib import Path

import numpy as np

import mpips
from mpips.datasets import Batch

N, FEATURES = 330, 3000
x = np.random.default_rng(3).normal(size=(N, FEATURES))
y = x[:, :6] @ np.arange(6) + 0.5
pushed: list[int] = []


def gradient(params: dict[str, np.ndarray], batch: Batch, out: dict[str, np.ndarray]) -> float:
    """Return the loss over noisy samples; the noise is of the process."""
    noisy = batch.x + 0.01 * np.random.normal(size=batch.x.shape)
    error = noisy @ params["w"] + params["b"] - batch.y
    out["w"][:] = error @ noisy / len(batch)
    out["b"][...] = error.mean()
    return float((error**2).mean() / 2)


def squares(params: dict[str, np.ndarray], batch: Batch) -> dict[str, float]:
    """Return the mean square."""
    return {"loss": float(((batch.x @ params["w"] + params["b"] - batch.y) ** 2).mean())}


class Train:
    """The loop of a worker that stops the run behind so many pushes."""

    def __init__(self, stop: int) -> None:
        self._stop = stop

    def __call__(self, worker: mpips.Worker) -> None:
        """Push, and now and then one without a part of its gradient, as it is evaluated."""
        np.random.seed(worker.id)
        for batch in worker.batches((x, y), batch_size=10, epochs=6):
            loss = gradient(worker.pull(), batch, worker.grads)
            if len(pushed) % 7 == worker.id:
                found = worker.evaluate(squares, (x[:50], y[:50]))
                worker.grads["w"][:] *= 1 / (1 + found["loss"])
                worker.log(seen=found["loss"])
            pushed.append(len(batch))
            worker.push(loss)
            if len(pushed) == self._stop:
                worker.stop()


def main(out: str, servers: int, dtype: str, codec: str, changed: float = 0.0) -> int:
    """Run; returns the exit code."""
    global y
    y = y + changed
    pushed.clear()
    train = Train(0 if Path(out, "record", "part-0001").exists() else 12)
    options = {"mode": "async", "servers": servers, "dtype": dtype, "node_size": 2, "codec": codec}
    result = mpips.run(
        train, {"w": np.zeros(FEATURES), "b": np.zeros(())}, mpips.Adam(0.001), evaluate=squares,
        held_out=(x, y), out=out, read="consistent", record=True, resume="auto", quiet=True,
        checkpoint_every="40steps", keep=100, clip=5.0, **options,
    )  # fmt: skip
    return 0 if result.reason in ("stopped", "epochs") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:5], *map(float, sys.argv[5:])))
