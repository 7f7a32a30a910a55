"""What the ranks of ``rows --peers`` run: ``python -m mpips.bench.rows_program GIVEN``.

It runs in a folder of its own; each worker writes when it began and ended its steps, and how many
they were. A step reads the rows of a list of ids, makes gradients of them, and pushes these.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

import mpips
from mpips.bench.peers.script import ROW_DIM, ROW_LISTS, row_ids

OUT = "worker-{}.json"


def work(measure: str, rows: int, steps: int) -> None:
    """Have each worker make about so many steps, behind some that touch the rows."""
    lists = row_ids(measure, rows)

    def loop(worker: mpips.Worker) -> None:
        rng, begin, done = np.random.default_rng(worker.id), 0.0, -warm
        for _ in worker.batches({"step": np.arange(2 * (steps + warm))}, batch_size=1, epochs=1):
            ids = lists[done + warm if done < 0 else rng.integers(ROW_LISTS)]
            found = worker.pull_rows("rows", ids)
            worker.push_rows("rows", ids, found * np.float32(1e-3) + np.float32(1e-3))
            worker.push(loss=0.0)
            done += 1
            if done == 0:
                begin = time.monotonic()
        told = {"begin": begin, "end": time.monotonic(), "steps": done}
        Path(OUT.format(worker.id)).write_text(json.dumps(told))

    warm = ROW_LISTS
    table = mpips.Table(rows=rows, dim=ROW_DIM, init=mpips.Zeros(), optimizer=mpips.Adagrad(0.01))
    mpips.run(
        loop, params={}, tables={"rows": table}, mode="async", servers=1, out="run", quiet=True,
        eval_every=0, checkpoint_every=0,
    )  # fmt: skip


if __name__ == "__main__":
    work(**json.loads(sys.argv[1]))
