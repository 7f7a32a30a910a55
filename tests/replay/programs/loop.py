"""Runs of NumPy whose loops draw, evaluate, read rows, and keep what a rank has for itself.

In the epochs between the first and the last few rows of a table are pushed: the others are evicted.
"""

import sys
from pathlib import Path

import numpy as np

import mpips
from mpips.datasets import Batch

N, FEATURES, ROWS, DIM, FEW, EPOCHS = 330, 3000, 90, 4, 30, 5
TABLES = {
    "item": mpips.Table(ROWS, DIM, evict_after=1),
    "user": mpips.Table(ROWS, DIM, optimizer=mpips.Adagrad(0.1)),
}
x = np.random.default_rng(3).normal(size=(N, FEATURES))
y = x[:, :6] @ np.arange(6) + 0.5
pushed, stop = list[int](), 12  # behind so many pushes a worker stops a run that is new


def squares(params: dict[str, np.ndarray], batch: Batch) -> dict[str, float]:
    """Return the mean square."""
    return {"loss": float(((batch.x @ params["w"] + params["b"] - batch.y) ** 2).mean())}


def train(worker: mpips.Worker) -> None:
    """Push, and now and then what an evaluation, or rows that were read again, change."""

    def means(params: dict[str, np.ndarray], batch: Batch) -> dict[str, float]:
        items = worker.pull_rows("item", batch.ids % ROWS)
        return {"loss": float(np.square(items).mean() + params["b"])}

    np.random.seed(worker.id)
    for batch in worker.batches((x, y), batch_size=10, epochs=EPOCHS):
        often = batch.epoch in (0, EPOCHS - 1)
        items, users = batch.ids % (ROWS if often else FEW), batch.ids * 7 % ROWS
        ours, theirs = worker.pull_rows("item", items), worker.pull_rows("user", users)
        if len(pushed) % 5 == worker.id:
            ours = ours + worker.evaluate(means, 20)["loss"] * worker.pull_rows("item", items)
        noisy, params = batch.x + 0.01 * np.random.normal(size=batch.x.shape), worker.pull()
        error = noisy @ params["w"] + params["b"] + (ours * theirs).sum(axis=1) - batch.y
        worker.push_rows("item", items, error[:, None] * theirs / len(batch))
        worker.push_rows("user", users, error[:, None] * ours / len(batch))
        worker.grads["w"][:], worker.grads["b"][...] = error @ noisy / len(batch), error.mean()
        if len(pushed) % 7 == worker.id:
            found = worker.evaluate(squares, (x[:50], y[:50]))
            worker.grads["w"][:] *= 1 / (1 + found["loss"])
            worker.log(seen=found["loss"])
        pushed.append(len(batch))
        worker.push(float(np.square(error).mean() / 2))
        if len(pushed) == stop:
            worker.stop()


def main(out: str | Path, dtype: str, codec: str, changed: str = "0") -> int:
    """Run; returns the exit code."""
    global y, stop
    y, stop = y + float(changed), 0 if Path(out, "record", "part-0001").exists() else stop
    pushed.clear()
    result = mpips.run(
        train, {"w": np.zeros(FEATURES), "b": np.zeros(())}, mpips.Adam(0.001), tables=TABLES,
        evaluate=squares, held_out=(x, y), out=out, read="consistent", record=True, resume="auto",
        quiet=True, checkpoint_every="40steps", keep=100, clip=5.0, mode="async", servers=2,
        dtype=dtype, node_size=2, codec=codec,
    )  # fmt: skip
    return 0 if result.reason in ("stopped", "epochs") else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
