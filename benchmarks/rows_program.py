"""Program of the ranks of `row_workers`: ``python -m benchmarks.rows_program GIVEN``.

Each worker writes the times at which its steps ended to the current folder. A step pulls the rows
of a list of ids, computes gradients from them, and pushes the gradients.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

import mpips
from mpips.tools.bench.row_ids import ROW_LISTS, row_ids

OUT = "worker-{}.json"
MOST_WARM = 900


def warm_steps(steps: int) -> int:
    """Return the number of steps before the counted ones.

    The first pass over the lists allocates pages, and the second maps them. Then the server moves
    them into large pages.
    """
    return max(2 * ROW_LISTS, min(steps, MOST_WARM))


def work(drawn: str, rows: int, ids: int, dim: int, servers: int, steps: int) -> None:
    """Make `steps` steps of a `row_workers.Case` on each worker, after steps to warm up."""
    lists = row_ids(drawn, rows, ids)

    def loop(worker: mpips.Worker) -> None:
        rng, done, ends = np.random.default_rng(worker.id), -warm, list[float]()
        for _ in worker.batches(ROW_LISTS, batch_size=1):
            wanted = lists[done % ROW_LISTS if done < 0 else rng.integers(ROW_LISTS)]
            found = worker.pull_rows("rows", wanted)
            worker.push_rows("rows", wanted, found * np.float32(1e-3) + np.float32(1e-3))
            worker.push(loss=0.0)
            done += 1
            if done >= 0:
                ends.append(time.monotonic())
        Path(OUT.format(worker.id)).write_text(json.dumps(ends))

    warm = warm_steps(steps)
    table = mpips.Table(
        rows=rows, dim=dim, init=mpips.Zeros(), optimizer=mpips.Adagrad(0.01), push_rows=ids
    )
    mpips.run(
        loop, params={}, tables={"rows": table}, mode="async", servers=servers, out="run",
        quiet=True, steps=warm + steps, eval_every=0, checkpoint_every=0,
    )  # fmt: skip


if __name__ == "__main__":
    work(**json.loads(sys.argv[1]))
