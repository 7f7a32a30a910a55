"""What only several ranks can refuse: the same error on every rank, before anything has begun."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpips
from mpips.library.start import limit_of

WORLD = MPI.COMM_WORLD
INIT = {"w": np.zeros(4)}
ITEM = mpips.Table(rows=5, dim=2)


def train(worker: mpips.Worker) -> None:
    """Take batches and push zeroes."""
    for batch in worker.batches(100):
        worker.grads["w"][:] = 0
        worker.push(float(len(batch)))


def loop(*args: Any, **options: Any) -> Callable[[mpips.Worker], None]:
    """Return a training function that begins with those arguments of `batches`."""

    def train(worker: mpips.Worker) -> None:
        next(iter(worker.batches(*args, **options)))

    return train


def tabled(out: Path, **options: Any) -> mpips.Result:
    """Run with a table."""
    return mpips.run(train, INIT, mpips.SGD(), out=out, **{"tables": {"item": ITEM}, **options})


CASES: dict[str, Callable[[Path], Any]] = {
    "unknown option": lambda out: mpips.run(train, INIT, batchsize=3, out=out),
    "a rank alone": lambda out: mpips.run(
        train, INIT, lr=-1.0 if WORLD.rank == 1 else 0.1, out=out
    ),
    "no server of a store": lambda out: mpips.Store(WORLD, INIT, servers=WORLD.size),
    "options that differ": lambda out: mpips.run(train, INIT, clip=1.0 + WORLD.rank, out=out),
    "an option of some": lambda out: mpips.run(
        train, INIT, out=out, **({"keep": 5} if WORLD.rank == 2 else {})
    ),
    "loops that differ": lambda out: mpips.run(loop(100, batch_size=8 + WORLD.rank), INIT, out=out),
    "words on one rank": lambda out: mpips.run(
        train, {"w": "zero" if WORLD.rank == 1 else np.zeros(4)}, out=out
    ),
    "shapes that differ": lambda out: mpips.run(train, {"w": np.zeros(1 + WORLD.rank)}, out=out),
    "no server": lambda out: mpips.run(train, INIT, servers=WORLD.size, out=out),
    "data that differ": lambda out: mpips.run(loop(100 + WORLD.rank), INIT, out=out),
    "tables that differ": lambda out: mpips.run(
        train, INIT, tables={"item": mpips.Table(rows=5 + WORLD.rank, dim=2)}, out=out
    ),
    "tables aggregated": lambda out: tabled(out, node_size=1, node_aggregation=True),
    "a table too large": lambda out: tabled(
        out, tables={"item": mpips.Table(1 << 36, 64, capacity="full")}
    ),
    "a lazy table too large": lambda out: tabled(
        out, servers=2, tables={"item": mpips.Table(1 << 36, 64)}
    ),
    "tables and init_from": lambda out: tabled(out, init_from=str(out.parent / "w.npz")),
    "tables and compensation": lambda out: tabled(out, delay_compensation=0.1),
    "a folder in use": lambda out: mpips.run(train, INIT, out=out.parent),
}


def main(folder: Path) -> None:
    """Try all; every rank has the same errors, and the last run goes well."""
    (folder / "file").write_text("in use")
    if WORLD.rank == 0:
        np.savez(folder / "w.npz", w=np.zeros(4))
    WORLD.Barrier()
    assert [limit_of({"timeout": given}) for given in (-1, 2, "2")] == [0, 2, 300], "not checked"
    for name, call in CASES.items():
        try:
            call(folder / name.replace(" ", "-"))
            told = "nothing"
        except mpips.UserError as error:
            told = str(error) if type(error) is mpips.UserError else repr(error)
        found = set(WORLD.allgather(told))
        if WORLD.rank == 0:
            print(f"{name}: {' | '.join(sorted(found))}")
    assert {path.name for path in folder.iterdir()} == {"file", "w.npz"}, "no folder is left"
    result = mpips.run(train, INIT, epochs=1, out=folder / "good", quiet=True)
    if WORLD.rank == 0:
        print(f"good: {result.reason} behind {len(CASES)} refused", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    mpips.run(train, {"w": "zero"})  # what nobody catches
