"""Tables of rows in mode sync: ``round_tables.py all OUT`` shares a world of 5.

The counting problem by rows: each sample adds 1 to its rows and to its parameter, exactly, as its
gradient is as many times as large as there are workers, and these have equally many samples.
``kills OUT SERVERS``: the same, slow and saved often, for whoever kills it; ``check OUT`` looks at
what that has left.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tables import (
    CHAIN,
    SEVERAL,
    WIDE,
    WORLD,
    ZEROS,
    check_counts,
    done,
    in_blocks,
    main,
    rows_of,
    run,
)

import mpips
from mpips.checkpoint import list_checkpoints, newest_whole, open_checkpoint, verify
from mpips.tables.saved_rows import find_rows

N, BATCH, EPOCHS = 232, 4, 3
EVERY = np.arange(N)
INIT = {"counts": np.zeros(N)}
TABLES = {
    "one": mpips.Table(rows=N, dim=1, init=ZEROS, optimizer=mpips.SGD(1.0)),
    "wide": mpips.Table(
        rows=SEVERAL, dim=WIDE, init=ZEROS, optimizer=mpips.SGD(1.0), capacity="lazy"
    ),
    "slots": mpips.Table(rows=1000, dim=5, init=mpips.Uniform(0.5), optimizer=mpips.Adagrad(0.1)),
}
SYNC: dict[str, Any] = {"mode": "sync", "params": INIT, "tables": TABLES}
Train = Callable[[mpips.Worker], None]


def counter(stop: int = -1, pause_s: float = 0.0, n: int = N, epochs: int = EPOCHS) -> Train:
    """Return a training function whose worker 0 stops the run when it has pushed so many."""

    def train(worker: mpips.Worker) -> None:
        for pushed, batch in enumerate(worker.batches(n, batch_size=BATCH, epochs=epochs), 1):
            ids, size = batch.ids, float(worker.workers)
            counts = worker.pull()["counts"]
            np.testing.assert_array_equal(worker.pull_rows("one", EVERY)[:, 0], counts)
            worker.ask_rows("one", EVERY)  # too early for the next round
            rows = worker.pull_rows("slots", ids)
            worker.grads["counts"][:] = -size * np.bincount(ids, minlength=N)
            worker.push_rows("one", ids, np.full((len(ids), 1), -size))
            half = len(ids) // 2
            for part in (ids[:half], ids[half:]):
                worker.push_rows("wide", part % SEVERAL, np.full((len(part), WIDE), -size))
            worker.push_rows("slots", 4 * ids, rows - 1)
            time.sleep(pause_s)
            worker.push(0.0)
            if pushed == stop and worker.id == 0:
                worker.stop()

    return train


def exact(folder: Path) -> None:
    """Stops, resumes on other workers, owners and nodes; in the end all counts are whole.

    A last batch of an epoch is smaller than the others. What a round of more workers has left to
    fewer of them is a step of several batches, whose gradients weigh less: then rows are as the
    parameters are, and no whole numbers.
    """
    out, counts = folder / "exact", np.zeros(N)
    parts: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (1, 21, {"snapshot": "stall", "checkpoint_every": "4steps"}),
        (2, 15, {"window": "private"}),
        (4, 12, {"servers": 2, "node_size": 2}),
        (4, 5, {"node_size": 1, "servers": 0}),
        (5, 6, {"servers": 1, "checkpoint_every": "2steps", **CHAIN}),
        (4, -1, {"node_size": 2, "servers": 0}),
        (4, 3, {}),
        (2, 3, {"node_size": 1}),
        (3, -1, {"servers": 2, "checkpoint_every": "2steps", **CHAIN}),
    )
    for number, (ranks, stop, options) in enumerate(parts):
        epochs = EPOCHS + (number > 5)
        named = {**SYNC, "tables": in_blocks(TABLES) if number % 2 else TABLES, **options}
        result = run(counter(stop, epochs=epochs), ranks, out, resume="auto", **named)
        if WORLD.rank == 0:
            summary = done(result).summary
            assert (summary["bytes_received"] > 0) == (len(summary["nodes"]) > 1)
            assert done(result).reason == ("epochs" if stop < 0 else "stopped")
            counts = check_counts(out, whole=number < 7).read_params()
            assert number != 5 or counts.tolist() == [EPOCHS] * N
            bases = [open_checkpoint(path).base for path in list_checkpoints(out)]
            assert any(bases) or "checkpoint_rows" not in options
    if WORLD.rank == 0:
        np.testing.assert_array_equal(done(result).rows("one", np.arange(N))[:, 0], counts)
        assert summary["tables"]["one"]["pushed"] > 0
        assert summary["tables"]["one"]["torn"] + summary["tables"]["one"]["again"] == 0


def without_samples(folder: Path) -> None:
    """Where a last batch does not go round, workers bring no rows; others are in the next round."""
    for size in (0, 1, 2):
        out = folder / f"few-{size}"
        run(counter(n=N - 6, epochs=4), 4, out, node_size=size, **SYNC)
        if WORLD.rank == 0:  # 14 batches of 16 and one of 2, of which each weighs twice as much
            counts = check_counts(out, whole=False).read_params()
            assert sorted({*counts[: N - 6].tolist()}) == [4.0, 5.0], counts
            assert (counts == 5).sum() == 8, "two samples in each of four epochs"


def placed(folder: Path) -> None:
    """How ranks lie on nodes, or who owns a row, changes no bit of it.

    Owners add up in the order of the workers; a norm's order is another with other owners.
    """
    found = []

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches(60, batch_size=7, epochs=3):
            ids = np.concatenate([batch.ids % 11, batch.ids[::-1] % 5])
            rows = worker.pull_rows("slots", ids)
            worker.push_rows("slots", ids, rows * np.sqrt(1 + ids)[:, None] - 0.3)
            worker.push(float((rows**2).mean()))

    tables = {"slots": TABLES["slots"]}  # a model of tables alone
    options = {**SYNC, "params": {}, "dtype": "float64"}
    clipped, whole = {"tables": tables, "clip": 0.9}, {"tables": tables}
    blocks = {"tables": in_blocks(tables)}
    for number, (size, more) in enumerate(
        [(0, clipped), (1, clipped), (2, clipped), (0, whole), (0, blocks), (2, blocks)]
    ):
        out = folder / f"placed-{number}"
        run(train, 4, out, node_size=size, **{**options, **more})
        if WORLD.rank == 0:
            checkpoint, _ = newest_whole(out)
            assert checkpoint is not None
            found.append(rows_of(checkpoint, "slots"))
    for k, (numbers, columns) in enumerate(found):
        first = found[k // 3 * 3]
        np.testing.assert_array_equal(numbers, first[0])
        for name, column in columns.items():
            np.testing.assert_array_equal(column, first[1][name], strict=True)


def packed(folder: Path) -> None:
    """By a codec rows are the same bits in each run, whoever comes first, and near whole ones."""
    found, sent, rng = list[np.ndarray](), list[int](), np.random.default_rng(WORLD.rank)

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches(600, batch_size=150, epochs=6):
            time.sleep(rng.uniform(0, 3e-3))
            rows = worker.pull_rows("long", batch.ids)
            worker.push_rows("long", batch.ids, (rows - np.sin(batch.ids)[:, None]) * 4)
            worker.push(0.0)

    init = mpips.Normal(0.5)
    table = mpips.Table(rows=600, dim=1001, init=init, optimizer=mpips.SGD(0.5))
    for number, codec in enumerate(("int8", "int8", "none")):
        codecs = {"codec": codec, "pull_codec": codec, "node_size": 2}
        tables = {"params": {}, "tables": {"long": table}}
        result = run(train, 4, folder / f"packed-{number}", **{**SYNC, **tables, **codecs})
        if WORLD.rank == 0:
            found.append(done(result).rows("long", np.arange(600)))
            sent.append(done(result).summary["bytes_sent"])
    if WORLD.rank == 0:
        np.testing.assert_array_equal(found[0], found[1], strict=True)
        assert sent[0] == sent[1] < 0.27 * sent[2], sent
        assert 0 < np.abs(found[0] - found[2]).max() < 0.1


def weighed(folder: Path) -> None:
    """A norm is bounded over parameters and rows; batches of a step weigh by their samples."""

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches(samples, batch_size=2, epochs=1):
            worker.grads["counts"][:] = 0
            worker.grads["counts"][0] = 12
            worker.push_rows("wide", [3], [[3.0, 4.0, 0.0]])
            worker.push_rows("one", batch.ids, np.ones((len(batch), 1)))
            worker.push(0.0)

    samples = 4
    result = run(train, 2, folder / "clip", clip=1.3, node_size=1, **SYNC)
    if WORLD.rank == 0:
        norm = np.sqrt(12**2 + 5**2 + 4 / 4)  # the mean of two workers has half of each sample's
        expected = np.array([-3.0, -4.0, 0.0]) * 1.3 / norm
        np.testing.assert_allclose(done(result).rows("wide", [3])[0], expected, rtol=1e-12)
        assert np.isclose(done(result).params["counts"][0], -12 * 1.3 / norm)
        lone = np.full((4, 1), -0.5 * 1.3 / norm)
        np.testing.assert_allclose(done(result).rows("one", np.arange(4)), lone, rtol=1e-12)
    samples = 5
    result = run(train, 1, folder / "accumulate", accumulate=4, **SYNC)
    if WORLD.rank == 0:  # one step of batches of 2, 2 and 1 samples
        np.testing.assert_allclose(done(result).rows("wide", [3])[0], [-3.0, -4.0, 0.0], rtol=1e-12)
        weights = sorted(done(result).rows("one", np.arange(5))[:, 0])
        np.testing.assert_allclose(weights, [-0.4, -0.4, -0.4, -0.4, -0.2], rtol=1e-12)


COME, LAST, GLOBAL = 120, 7, 12  # rows that come and go, epochs, and samples of a round
TARGETS = np.stack([np.arange(COME), 1 - np.arange(COME)], 1)
RULE = mpips.Adagrad(0.1)
PAIR = {"pair": mpips.Table(rows=COME, dim=2, init=ZEROS, optimizer=RULE, evict_after=2)}


def comes(ids: np.ndarray, epoch: int) -> np.ndarray:
    """Whether rows are pushed: always, in epochs 0 and 1, in 0 and from 5 on, in every second."""
    kinds = [True, epoch < 2, epoch == 0 or epoch >= 5, epoch % 2 == 0]
    return np.array(kinds)[ids % 4]


def serial() -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray, int]:
    """Return rows before and behind each epoch's pushes, when each was last, and how many went."""
    rows, sums, seen = np.zeros((COME, 2)), np.zeros((COME, 2)), np.full(COME, -1)
    before, behind, count = list[np.ndarray](), list[np.ndarray](), 0
    for epoch in range(LAST):
        before.append(rows.copy())
        some = comes(np.arange(COME), epoch)
        grad = (rows[some] - TARGETS[some]) / GLOBAL
        sums[some] += grad**2
        rows[some] -= 0.1 * grad / (np.sqrt(sums[some]) + 1e-8)
        seen[some] = epoch
        behind.append(rows.copy())
        gone = (seen >= 0) & (seen < epoch + 1 - 2)
        rows[gone], sums[gone], seen[gone] = 0, 0, -1
        count += int(gone.sum())
    return before, behind, seen, count


def passing(stop: int) -> Train:
    """Return a training function that looks at all rows in each step, and pushes some."""
    before, behind, *_ = serial()

    def train(worker: mpips.Worker) -> None:
        every, size = np.arange(COME), GLOBAL // worker.workers
        for pushed, batch in enumerate(worker.batches(COME, batch_size=size, epochs=LAST), 1):
            rows, epoch = worker.pull_rows("pair", every), batch.epoch
            known = np.isclose(rows, before[epoch]) | np.isclose(rows, behind[epoch])
            assert known.all(), (epoch, np.flatnonzero(~known.all(1)))
            some = batch.ids[comes(batch.ids, epoch)]
            worker.push_rows("pair", some, (rows[some] - TARGETS[some]) / size)
            worker.push(0.0)
            if pushed == stop and worker.id == 0:
                worker.stop()

    return train


def evicted(folder: Path) -> None:
    """Old rows go with an epoch's last round, as in a serial run: on all owners, through stops."""
    _, behind, seen, count = serial()
    often: dict[str, Any] = {"checkpoint_every": "1steps", **CHAIN}
    whole: dict[str, Any] = {**SYNC, "params": {}, "tables": PAIR, "dtype": "float64"}
    cases: dict[str, list[tuple[int, int, dict[str, Any]]]] = {
        "servers": [(4, -1, {"servers": 2, **often})],
        "stops": [
            (4, 20, {"node_size": 1}),
            (5, 25, {"servers": 1, **often}),
            (4, -1, {"node_size": 2, "servers": 0, **often}),
        ],
    }
    for name, parts in cases.items():
        out, total = folder / f"evicted-{name}", 0
        for ranks, stop, options in parts:
            result = run(passing(stop), ranks, out, resume="auto", **{**whole, **options})
            if WORLD.rank == 0:
                total += done(result).summary["tables"]["pair"]["evicted"]
        if WORLD.rank == 0:
            found, _ = newest_whole(out)
            assert found is not None
            assert not verify(found.path)
            numbers, columns = rows_of(found, "pair")
            np.testing.assert_array_equal(numbers, np.flatnonzero(seen >= 0))
            np.testing.assert_array_equal(columns["slots/seen"], seen[numbers])
            np.testing.assert_allclose(columns["params"], behind[-1][numbers], rtol=1e-12)
            assert done(result).summary["tables"]["pair"]["changed"] == len(numbers)
            assert total == count > COME // 4


def evaluated(folder: Path) -> None:
    """An evaluation in the loop reads rows of this round on every node; an empty push is none."""

    def train(worker: mpips.Worker) -> None:
        def metrics(params: Any, batch: Any) -> dict[str, float]:
            rows = worker.pull_rows("one", batch.ids)[:, 0]
            assert (rows == params["counts"][batch.ids]).all()
            return {"loss": float(rows.mean())}

        for step, batch in enumerate(worker.batches(N, batch_size=29, epochs=2)):
            assert worker.evaluate(metrics, N)["loss"] == step * 116 / N
            worker.grads["counts"][:] = -4.0 * np.bincount(batch.ids, minlength=N)
            if worker.id == 3:
                worker.push_rows("wide", [], np.zeros((0, WIDE)))
            worker.push_rows("one", batch.ids, np.full((len(batch), 1), -4.0))
            worker.push(0.0)

    run(train, 4, folder / "evaluated", node_size=2, **SYNC)


def diverged(folder: Path) -> None:
    """A loss that is not finite ends the run, and so do rows that are not: none of it is saved."""
    bad: tuple[float, float] = (0.0, 0.0)

    def train(worker: mpips.Worker) -> None:
        for step, _ in enumerate(worker.batches(N, batch_size=BATCH, epochs=1)):
            loss, gradient = bad if step >= 4 and worker.id == 1 else (0.0, 1.0)
            worker.grads["counts"][:] = 0
            if np.isfinite(loss):
                worker.push_rows("one", [0, 1], [[gradient], [gradient]])
            worker.push(loss)

    for name, found in (("nan", (np.nan, 1.0)), ("overflow", (0.0, 1.7e308))):
        bad, out = found, folder / name
        fast = {"one": dataclasses.replace(TABLES["one"], optimizer=mpips.SGD(1e3))}
        options = {"node_size": 1, "checkpoint_every": "1steps", "tables": fast}
        result = run(train, 3, out, **{**SYNC, **options})
        if WORLD.rank == 0:
            assert (done(result).reason, done(result).code) == ("diverged", 1)
            saved, _ = newest_whole(out)
            assert saved is not None
            assert saved.step <= 4, saved.step
            assert np.isfinite(find_rows(saved, "one", np.zeros(1, "i8"))).all()


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tables in mode 'local_sgd', expected mode async or ssp or sync", {"mode": "local_sgd"}),
    ("tables in mode 'easgd'", {"mode": "easgd", "servers": 1}),
    ("reduce 'allreduce' with tables", {"reduce": "allreduce"}),
    ("codec 'powersgd' with tables", {"codec": "powersgd", "node_size": 1}),
    ("backup_workers=1 with tables", {"backup_workers": 1, "servers": 1}),
)


def refused(folder: Path) -> None:
    """What tables are not made for is refused on every rank."""
    for told, options in REFUSED:
        result = run(counter(), 3, folder / "refused", **{**SYNC, **options})
        if WORLD.rank < 3:
            assert told in str(result), result
            assert not (folder / "refused").exists()


def slow(out: Path, servers: int = 0) -> None:
    """Train slowly, and save often."""
    mpips.run(
        counter(pause_s=0.02), INIT, mpips.SGD(1.0), tables=TABLES, mode="sync",
        servers=servers, out=out, resume="auto", checkpoint_every="3steps", quiet=True,
        node_size=2 * (not servers),
    )  # fmt: skip


if __name__ == "__main__":
    main(
        (exact, without_samples, placed, packed, weighed, evicted, evaluated, diverged, refused),
        slow,
        check_counts,
    )
