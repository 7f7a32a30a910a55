"""A table of 200 M rows of which 5 M are touched: ``mpirun -n N+1 ... huge_table.py OUT N``.

Run with N of 1, then 2, then 3 servers it touches 94 % of them and more, and then all, saves, and
goes on from what the servers before have saved. Each row that is saved, and each of its slots, is
what it must be to the bit. And no server ever takes more than 1.15 times its rows, slots and keys,
as it trains, saves and resumes, beside what a process takes that does the same with few rows.
"""

import resource
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpips
from mpips.checkpoint import need_whole

WORLD = MPI.COMM_WORLD
ROWS, DIM, PUSH = 200_000_000, 16, 50_000
STEPS, FEW = 100, 12  # pushes; and of the run with few rows
RATE = 0.5  # with which Adagrad's first update is exact
STRIDE = 61_803_399  # from one row that is touched to the next
BACK = pow(STRIDE, -1, ROWS)
ROW_BYTES = 2 * 4 * DIM + 4  # with its slot and its key
BOUND = 1.15
SNAPSHOT = {1: "copy", 2: "stall", 3: "copy"}
MB = 1e6


def gradient(ids: np.ndarray) -> np.ndarray:
    """Return small whole numbers, other ones for each row."""
    column = np.arange(DIM)
    signs = 1 - 2 * (ids[:, None] >> column & 1)
    return (signs * (ids[:, None] % 97 + column + 1)).astype("f4")


def values(ids: np.ndarray) -> np.ndarray:
    """Return what rows are that were touched: rate * g / sqrt(g * g) below 0, which is exact."""
    return -np.float32(RATE) * np.sign(gradient(ids))


def train_for(steps: int, of: int):
    """Return a training function that ends in so many steps of the whole run, `of` some."""

    def train(worker: mpips.Worker) -> None:
        seen = np.random.default_rng(0).integers(of * PUSH, size=1000) * STRIDE % ROWS
        left = steps
        for batch in worker.batches(of * PUSH, batch_size=PUSH, epochs=1):
            rows = worker.pull_rows("huge", seen)
            assert ((rows == values(seen)).all(1) | (rows == 0).all(1)).all()
            ids = batch.ids * STRIDE % ROWS
            worker.push_rows("huge", ids, gradient(ids) - 1)
            worker.push_rows("huge", ids[::-1], np.ones((len(ids), DIM), "f4"))
            worker.push(0.0)
            left -= 1
            if not left:
                worker.stop()
                time.sleep(1)  # that a step under way takes while the others hear of it

    return train


def run(out: Path, servers: int, steps: int, of: int) -> mpips.Result:
    """Make so many more steps of a run of `of`."""
    table = mpips.Table(
        rows=ROWS, dim=DIM, capacity="lazy", init=mpips.Zeros(), optimizer=mpips.Adagrad(RATE)
    )
    return mpips.run(
        train_for(steps, of), params={}, tables={"huge": table}, servers=servers, out=out, keep=1,
        resume="auto", quiet=True, checkpoint_every="40steps", snapshot=SNAPSHOT[servers], seed=5,
    )  # fmt: skip


def peak() -> float:
    """Return the most memory that this process had until now, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def changed(result: mpips.Result) -> int:
    """Return how many rows of this server have been changed; of a worker 0."""
    of_servers = [each["rows_changed"]["huge"] for each in result.summary["per_server"]]
    return [*of_servers, 0][min(WORLD.rank, len(of_servers))]


def check(out: Path) -> int:
    """Check every row and slot of the newest checkpoint; returns how many there are."""
    found, complaints = need_whole(out)
    assert not complaints, complaints
    seen = np.zeros(STEPS * PUSH, bool)
    for piece in found.read_table("huge"):
        number = piece.rows * BACK % ROWS  # which of those to be touched it is
        assert number.max() < len(seen), "a row that nobody has touched"
        assert not seen[number].any(), "a row that is there twice"
        seen[number] = True
        np.testing.assert_array_equal(piece.params, values(piece.rows), strict=True)
        (slot,) = piece.slots.values()
        np.testing.assert_array_equal(slot, gradient(piece.rows) ** 2, strict=True)
    assert seen.sum() == found.state["samples"]
    return int(seen.sum())


def main(out: Path, servers: int) -> None:
    """Run with few rows, then with all, and check what that has taken and left."""
    few = out.with_name(f"few-{servers}")
    run(few, servers, FEW - 3, FEW)
    base = peak() - ROW_BYTES * changed(run(few, servers, FEW, FEW))
    result = run(out, servers, {1: 94, 2: 3, 3: STEPS}[servers], STEPS)
    mine, used = changed(result), peak() - base
    told = WORLD.gather((mine, used, base))
    for rank, (rows, took, process) in enumerate(told or ()):
        if rank < servers:
            ratio = took / (rows * ROW_BYTES)
            print(
                f"server {rank} of {servers}: {rows:,} rows, {took / MB:.0f} MB at most beside "
                f"{process / MB:.0f} of a process, {ratio:.3f} of rows, slots and keys",
                flush=True,
            )
            assert ratio < BOUND
    if told:
        print(f"{check(out):,} of {ROWS:,} rows are exact", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
