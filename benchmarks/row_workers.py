"""Rows of a table that two workers pull and push, beside two processes with plain loops.

The processes have the table in shared memory. Both gather the rows of the same ids, compute the
same gradients, and subtract each one, or apply Adagrad by it, which moves twice the bytes. They do
not sum gradients, take locks, count or communicate.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import numpy as np
from numba import njit

from benchmarks.rows_program import warm_steps
from benchmarks.turns import compare_rates, take_turns
from mpips.mpi.pages import keep_freed_memory, shared_zeros
from mpips.tools.bench import jobs
from mpips.tools.bench.measure import Options, Row
from mpips.tools.bench.row_ids import ROW_DIM, ROW_IDS, row_ids
from mpips.tools.bench.rows import gather, scatter_add

WORKERS = 2
STEPS, QUICK_STEPS = 900, 600  # steps of the default size, enough for both processes to overlap
LEAST, MOST = 60, 20_000
ATTEMPTS, LONGER = 3, 4  # if one process ended before the other began, on busy cores
REACH, BESIDE = 0.5, ("2 plain loops, Adagrad", "2 plain loops, SGD")
SIZES, QUICK_SIZES = (1_000_000, 50_000_000), (10_000,)
DRAWN = {"zipf-rows": "Zipf 1.05", "uniform-rows": "uniform"}


@dataclass(frozen=True)
class Case:
    """Table and steps of a comparison.

    Attributes:
        rows: Number of rows of the table.
        drawn: Distribution of ids; see `row_ids`.
        ids: Number of ids in a worker's step.
        dim: Number of columns.
        servers: Number of servers.
    """

    rows: int
    drawn: str = "zipf-rows"
    ids: int = ROW_IDS
    dim: int = ROW_DIM
    servers: int = 1

    def __str__(self) -> str:
        table = f"{self.ids:,} x {self.dim} floats of {self.rows / 1e6:g} M rows"
        owned = f"{self.servers} server{'s' * (self.servers > 1)}, {WORKERS} workers"
        return f"{table}, {DRAWN[self.drawn]}, {owned}"

    def steps(self, quick: bool) -> int:
        """Return the number of steps of each worker."""
        usual = QUICK_STEPS if quick else STEPS
        return max(LEAST, min(MOST, usual * ROW_IDS * ROW_DIM // (self.ids * self.dim)))


def run(options: Options) -> list[Row]:
    """Compare rates, in turn.

    Raises:
        Failed: If a job or a process fails.
    """
    sizes, found = QUICK_SIZES if options.quick else SIZES, list[Row]()
    ways = [*DRAWN][: 1 if options.quick else None]
    for case in (Case(rows, drawn) for rows in sizes for drawn in ways):
        text = f"{case}, pull + Adagrad"
        for beside, (mine, other, ratio) in beside_loops(case, options).items():
            found.append(Row("rows", text, mine, "M rows/s", beside, other, ratio, REACH))
    return found


def beside_loops(case: Case, options: Options) -> dict[str, tuple[float, float, float]]:
    """Return the rate of a job, the rate of each kind of loops, and the ratio, taken in turn.

    Raises:
        Failed: If a job or a process fails.
    """
    steps = case.steps(options.quick)
    sides = {"mpips": partial(rate, case, steps)}
    sides |= {name: partial(plain_rate, case, steps, name == BESIDE[0]) for name in BESIDE}
    taken = take_turns(sides, options.repeats)
    return {name: compare_rates(taken["mpips"], taken[name]) for name in BESIDE}


def rate(case: Case, steps: int) -> float:
    """Run a job whose two workers pull and push rows.

    Args:
        case: The comparison.
        steps: Number of steps of each worker; only steps while both workers run are counted.

    Returns:
        Rate of both workers in millions of rows/s, each row pulled and pushed.

    Raises:
        Failed: If the job fails, or the workers never stepped at the same time.
    """
    return rate_together(partial(_worker_ends, case), steps, case.ids)


def _worker_ends(case: Case, steps: int) -> list[list[float]]:
    given = json.dumps({**vars(case), "steps": steps})
    with jobs.temporary_folder() as folder:
        jobs.run(case.servers + WORKERS, ["-m", "benchmarks.rows_program", given], folder)
        return [json.loads(path.read_text()) for path in folder.glob("worker-*.json")]


def rate_together(
    ends_of: Callable[[int], Sequence[Sequence[float]]], steps: int, ids: int
) -> float:
    """Return the rate while all processes run, in millions of rows/s.

    Args:
        ends_of: Function that makes a number of steps in each process, and returns the times at
            which the steps ended, in seconds.
        steps: Number of steps of each process. If one process ended before the other began, it is
            multiplied by `LONGER`.
        ids: Number of rows in a step.

    Raises:
        Failed: If the processes did not overlap in `ATTEMPTS` attempts.
    """
    for attempt in range(ATTEMPTS):
        found = ends_of(steps * LONGER**attempt)
        if not all(found):
            continue
        begin, end = max(ends[0] for ends in found), min(ends[-1] for ends in found)
        if shared := sum(begin < at <= end for ends in found for at in ends):
            return float(shared * ids / (end - begin) / 1e6)
    raise jobs.Failed(f"no two steps at the same time in {ATTEMPTS} attempts; use quiet cores")


def plain_rate(case: Case, steps: int, adagrad: bool = False) -> float:
    """Run two processes that gather and scatter the same rows in plain loops; see `rate`.

    Raises:
        Failed: If a process fails, or the processes never stepped at the same time.
    """
    return rate_together(partial(_plain_ends, case, adagrad), steps, case.ids)


def _plain_ends(case: Case, adagrad: bool, steps: int) -> list[list[float]]:
    width = case.dim * (1 + adagrad)
    table, lists = shared_zeros("f4", (case.rows, width)), row_ids(case.drawn, case.rows, case.ids)
    few = shared_zeros("f4", (1, 1 + adagrad))
    _step(few, np.zeros(1, np.int64), np.zeros((1, 1), "f4"))  # compiled
    fork, ends = multiprocessing.get_context("fork"), list[Connection]()
    together = fork.Barrier(WORKERS)
    for number in range(WORKERS):
        receive, send = fork.Pipe(duplex=False)
        args = table, case.dim, lists, steps, number, together, send
        fork.Process(target=_loop, args=args, daemon=True).start()
        send.close()
        ends.append(receive)
    try:
        return [receive.recv() for receive in ends]
    except EOFError:
        raise jobs.Failed("a process with plain loops has died") from None


@njit(error_model="numpy", nogil=True)
def scatter_adagrad(table: np.ndarray, ids: np.ndarray, grads: np.ndarray, rate: float) -> None:
    """Apply Adagrad by ``grads[i]`` to ``table[ids[i]]``; the second half of a row has the sums."""
    factor, tiny, dim = table.dtype.type(rate), table.dtype.type(1e-8), grads.shape[1]
    for i in range(ids.size):
        row, total, grad = table[ids[i], :dim], table[ids[i], dim:], grads[i]
        for j in range(dim):
            total[j] += grad[j] * grad[j]
            row[j] -= factor * grad[j] / (np.sqrt(total[j]) + tiny)


def _step(table: np.ndarray, ids: np.ndarray, found: np.ndarray) -> None:
    """Make a step as in `rows_program`, by Adagrad if the table has sums."""
    gather(table, ids, found)
    scatter = scatter_add if table.shape[1] == found.shape[1] else scatter_adagrad
    scatter(table, ids, found * np.float32(1e-3) + np.float32(1e-3), 0.01)


def _loop(
    table: np.ndarray,
    dim: int,
    lists: np.ndarray,
    steps: int,
    number: int,
    together: Barrier,
    send: Connection,
) -> None:
    """Make the steps of one process, and send the time at which each ended."""
    keep_freed_memory()  # as a worker does
    rng, ends = np.random.default_rng(number), list[float]()
    found = np.zeros((lists.shape[1], dim), table.dtype)
    warm = warm_steps(steps)
    for step in range(warm + steps):
        if step == warm:
            together.wait(jobs.LIMIT_S)
        _step(table, lists[step % len(lists) if step < warm else rng.integers(len(lists))], found)
        if step >= warm:
            ends.append(time.monotonic())
    send.send(ends)
