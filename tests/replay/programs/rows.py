"""A run whose loop reads rows of two tables, more often here than there, and evaluates by them.

In the epochs between the first and the last few rows of one are pushed: the others are evicted.
"""

import sys

import numpy as np

import mpips
from mpips.datasets import Batch

N, ROWS, DIM, FEW, EPOCHS = 300, 90, 4, 30, 5
TABLES = {
    "item": mpips.Table(ROWS, DIM, evict_after=1),
    "user": mpips.Table(ROWS, DIM, optimizer=mpips.Adagrad(0.1)),
}


def train(worker: mpips.Worker) -> None:
    """Bring rows of both tables, whose products are to be one, together."""

    def means(params: dict[str, np.ndarray], batch: Batch) -> dict[str, float]:
        items = worker.pull_rows("item", batch.ids % ROWS)
        return {"loss": float(np.square(items).mean() + params["b"])}

    for number, batch in enumerate(worker.batches(N, batch_size=10, epochs=EPOCHS)):
        often = batch.epoch in (0, EPOCHS - 1)
        items, users = batch.ids % (ROWS if often else FEW), batch.ids * 7 % ROWS
        ours, theirs = worker.pull_rows("item", items), worker.pull_rows("user", users)
        if number % 5 == worker.id:
            ours = ours + worker.evaluate(means, 20)["loss"] * worker.pull_rows("item", items)
        error = (ours * theirs).sum(axis=1) + worker.pull()["b"] - 1
        worker.push_rows("item", items, error[:, None] * theirs / len(batch))
        worker.push_rows("user", users, error[:, None] * ours / len(batch))
        worker.grads["b"][...] = error.mean()
        worker.push(float(np.square(error).mean() / 2))


def main(out: str, servers: int) -> int:
    """Run; returns the exit code."""
    result = mpips.run(
        train, {"b": np.zeros(())}, mpips.SGD(0.1), tables=TABLES, out=out, mode="async",
        servers=servers, node_size=3, read="consistent", record=True, quiet=True, keep=100,
        checkpoint_every="30steps",
    )  # fmt: skip
    return int(result.code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
