"""Rows of a table pulled and pushed on one core, by the loops of workers and servers.

``python -m benchmarks.core_rows GIVEN`` is a separate process. A pull finds the places of ids by
the permutation that distributes rows among servers, without an index, and reads their rows. It
checks the version word of each row before and after. A push sorts the places and sums the gradients
of each row, as a worker does, and applies them, as a server does. Both make as many Python calls
as in a job.

Times are CPU times, so other load of the core is not counted. All rows were written before. They
lie in large pages, as in a server's shared memory. FBGEMM's rows are ordered by their ids. They
lie in small pages, unless ``THP_MEM_ALLOC_ENABLE=1`` makes PyTorch request large ones.
"""

import json
import math
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import mpips
from benchmarks.row_workers import DRAWN
from mpips.layout.tables import Ownership, combine
from mpips.mpi.pages import LargePages, Remapped, keep_freed_memory, large_page
from mpips.optim.row_rules import make_row_rule
from mpips.tables.shard import TableShard, row_fields
from mpips.tools.bench import jobs
from mpips.tools.bench.row_ids import ROW_DIM, ROW_IDS, row_ids

OUT = "seconds.json"
SETTLED_S = 10.0  # longest wait until memory is in large pages
RATE, GRADIENT = 0.05, 1e-3
WORK = {
    "pull": "pull", "adagrad": "push by Adagrad", "row-adagrad": "push by row-wise Adagrad",
}  # fmt: skip


def case(measure: str, rows: int) -> str:
    """Return the text of a measure's case; measures have names such as ``zipf-pull``."""
    law, _, work = measure.partition("-")
    table = f"{ROW_IDS:,} x {ROW_DIM} floats of {rows / 1e6:g} M rows"
    drawn = DRAWN[f"{law}-rows"]
    return f"{table}, {drawn}, one core, {WORK[work]}"


def rate(measure: str, rows: int, steps: int) -> float:
    """Measure in a separate process, and return the rate in millions of rows/s.

    Raises:
        Failed: If the process fails.
    """
    given = json.dumps({"measure": measure, "rows": rows, "steps": steps})
    with jobs.temporary_folder() as folder:
        jobs.run(1, ["-m", "benchmarks.core_rows", given], folder)
        seconds = json.loads((folder / OUT).read_text())
    return float(steps * ROW_IDS / seconds / 1e6)


def shared_zeros(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of zeros in shared memory, mapped as a window's memory."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    file = os.memfd_create("rows")
    os.ftruncate(file, size)
    mapped = Remapped(np.frombuffer(mmap.mmap(file, size), np.uint8)).memory
    os.close(file)
    return mapped.view(dtype).reshape(shape)


def settle(shard: TableShard) -> None:
    """Write all rows, and move them into large pages, as a server does while it waits."""
    rows, size = shard.ownership.table.rows, large_page()
    for begin in range(0, rows, ROW_IDS):
        local = np.arange(begin, min(begin + ROW_IDS, rows))
        shard.apply(local, np.full((len(local), ROW_DIM), GRADIENT, "f4"), RATE)
    lines, end = shard.used()[0], time.perf_counter() + SETTLED_S
    pages = LargePages(lambda: [lines])
    while size and pages.nbytes < lines.nbytes - 2 * size and time.perf_counter() < end:
        pages.look()


def make_shard(rows: int, row_wise: bool) -> TableShard:
    """Return the shard of a new table with one server."""
    ownership = Ownership("rows", mpips.Table(rows, ROW_DIM, init=mpips.Zeros()), 1)
    rule = make_row_rule(mpips.RowAdagrad(RATE) if row_wise else mpips.Adagrad(RATE))
    fields = row_fields(ownership, 0, rule, "f4")
    return TableShard(ownership, 0, {f.name: shared_zeros(f.dtype, f.shape) for f in fields}, rule)


def make_step(measure: str, rows: int) -> tuple[Callable[[np.ndarray], float], np.ndarray]:
    """Return a function that makes a step and returns its seconds, and the ids of the steps."""
    law, _, work = measure.partition("-")
    lists, shard = row_ids(f"{law}-rows", rows), make_shard(rows, work == "row-adagrad")
    grads = np.full((ROW_IDS, ROW_DIM), GRADIENT, "f4")

    def time_pull(ids: np.ndarray) -> float:
        begin = time.process_time()
        pull(shard, ids, np.empty_like(grads))
        return time.process_time() - begin

    def time_push(ids: np.ndarray) -> float:
        places = shard.ownership.places(ids)  # known from the pull
        begin = time.process_time()
        push(shard, places, grads)
        return time.process_time() - begin

    settle(shard)
    return (time_pull if work == "pull" else time_push), lists


def pull(shard: TableShard, ids: np.ndarray, out: np.ndarray) -> None:
    """Read the row of each id."""
    shard.gather(shard.ownership.places(ids), out)


def push(shard: TableShard, places: np.ndarray, grads: np.ndarray) -> None:
    """Apply a gradient to each of some places."""
    grouped = shard.ownership.sort(places)
    shard.apply(grouped.local, combine(grouped, grads), RATE)


def main(measure: str, rows: int, steps: int) -> None:
    """Make `steps` steps twice, and write the seconds of the second time."""
    keep_freed_memory()  # as a worker does
    step, lists = make_step(measure, rows)
    for _ in range(2):
        seconds = sum(step(lists[k % len(lists)]) for k in range(steps))
    Path(OUT).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
