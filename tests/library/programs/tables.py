"""Tables of rows, on one node and between nodes: ``tables.py CASE OUT``; ``all`` shares a world.

``exact``: the counting problem, by rows: each push adds 1 to the row of each of its samples, in
two tables of different length, beside a third with another rule; each row ends as its samples came.
Some runs have lazy tables, one of them of 200 M rows, and some tables whose servers own blocks of
rows: what they hold is the same to the bit.
``kills OUT SERVERS``: the same, slow and saved often, for whoever kills it; ``check OUT`` looks at
what that has left.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpips
from mpips.checkpoint import (
    Checkpoint,
    list_checkpoints,
    newest_whole,
    open_checkpoint,
    verify,
)
from mpips.layout.tables import digests_of
from mpips.layout.tables import rows_of as rows_of_ids
from mpips.mpi import abort
from mpips.tables.saved_rows import find_rows

WORLD = MPI.COMM_WORLD
PLACES = np.array([[0, 1, 0], [996, 916, 999]])  # rows changed, and rows that nobody has touched
N, EPOCHS, WIDE = 230, 4, 3
SEVERAL = 17  # rows of the table that each push has many samples of one row of
ZEROS = mpips.Zeros()
TABLES = {
    "one": mpips.Table(rows=N, dim=1, init=ZEROS, optimizer=mpips.SGD(1.0)),
    "wide": mpips.Table(rows=SEVERAL, dim=WIDE, init=ZEROS, optimizer=mpips.SGD(1.0)),
    "slots": mpips.Table(rows=1000, dim=5, init=mpips.Uniform(0.5), optimizer=mpips.Adagrad(0.1)),
}
LAZY = {name: dataclasses.replace(table, capacity="lazy") for name, table in TABLES.items()}
LAZY["slots"] = dataclasses.replace(LAZY["slots"], rows=200_000_000)


WORDS = np.array([f"word {k}" for k in range(N)])
KEYS = np.arange(N, dtype="u8") * np.uint64(0x9E3779B97F4A7C15)
HASHED = {
    "word": mpips.Table(rows=300, dim=1, init=ZEROS, hashed=True),
    "key": mpips.Table(rows=200_000_000, dim=2, init=ZEROS, hashed=True),
}


def in_blocks(tables: dict[str, mpips.Table]) -> dict[str, mpips.Table]:
    """Return tables like these of whose rows each server owns a block."""
    return {k: dataclasses.replace(table, ownership="blocks") for k, table in tables.items()}


INIT = {"counts": np.zeros(N)}
CHAIN: dict[str, Any] = {"checkpoint_rows": "changed"}


def trainer(stop: int = -1, pause_s: float = 0.0, epochs: int = EPOCHS) -> Callable[..., None]:
    """Return a training function whose worker 0 stops the run when it has pushed so many."""

    def train(worker: mpips.Worker) -> None:
        batches = worker.batches(N, batch_size=7, epochs=epochs)
        for pushed, batch in enumerate(batches, 1):
            assert stop < 0 or worker.id or pushed <= stop, "a batch behind its stop"
            ids = batch.ids
            if pushed % 2:
                worker.ask_rows("slots", ids)
                worker.ask_rows("wide", [pushed % SEVERAL])  # which nobody pulls
            rows = worker.pull_rows("slots", ids)
            assert rows.shape == (len(ids), 5)
            worker.grads["counts"][:] = -np.bincount(ids, minlength=N)
            worker.push_rows("one", ids, -np.ones((len(ids), 1)))
            half = len(ids) // 2
            for part in (ids[:half], ids[half:]):
                worker.push_rows("wide", part % SEVERAL, np.full((len(part), WIDE), -1.0))
            worker.push_rows("slots", 4 * ids, rows - 1)
            time.sleep(pause_s)
            worker.push(0.0)
            if pushed == stop and worker.id == 0:
                worker.stop()

    return train


def rows_of(found: Checkpoint, table: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return all rows that are saved, in the order of their numbers, with what goes with each."""
    pieces = list(found.read_table(table))
    numbers = np.concatenate([piece.rows for piece in pieces])
    order = np.argsort(numbers)
    assert len(set(numbers.tolist())) == len(numbers), "a row in two files"
    columns = {name: np.concatenate([p.arrays[name] for p in pieces]) for name in pieces[0].arrays}
    return numbers[order], {k: c[order] for k, c in columns.items() if k != "rows"}


def check_counts(out: Path, whole: bool = True) -> Checkpoint:
    """Check the newest checkpoint of a run against its own parameters; it may be of any step.

    Where a run is not `whole`, what it has counted is not its number of samples.
    """
    found, complaints = newest_whole(out)
    assert found is not None, complaints
    assert not verify(found.path)
    counts = found.read_params()
    assert not whole or counts.sum() == found.state["samples"]
    numbers, columns = rows_of(found, "one")
    np.testing.assert_array_equal(numbers, np.flatnonzero(counts))
    np.testing.assert_array_equal(columns["params"][:, 0], counts[numbers])
    numbers, columns = rows_of(found, "wide")
    sums = np.bincount(np.arange(counts.size) % SEVERAL, counts, SEVERAL)
    np.testing.assert_array_equal(numbers, np.flatnonzero(sums))
    np.testing.assert_array_equal(columns["params"], np.repeat(sums[numbers, None], WIDE, axis=1))
    numbers, columns = rows_of(found, "slots")
    np.testing.assert_array_equal(numbers, 4 * np.flatnonzero(counts))
    assert columns["params"].shape == (len(numbers), 5)
    return found


def run(train: Any, ranks: int, out: Path, **options: Any) -> mpips.Result | str | None:
    """Run on the first ranks of the world, while the others wait; returns why it was refused."""
    comm = WORLD.Split(0 if WORLD.rank < ranks else MPI.UNDEFINED, WORLD.rank)
    result: mpips.Result | str | None = None
    if comm != MPI.COMM_NULL:
        options = {"params": INIT, "tables": TABLES, "quiet": True, "seed": 3, **options}
        try:
            result = mpips.run(train, optimizer=mpips.SGD(1.0), comm=comm, out=out, **options)
        except mpips.UserError as error:  # all ranks have the same
            result = str(error)
        comm.Free()
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.004)
    return result


def done(result: mpips.Result | str | None) -> mpips.Result:
    """Return what a run of this rank's has left."""
    assert isinstance(result, mpips.Result), result
    return result


def exact(folder: Path) -> None:
    """Stops, resumes on other servers and nodes, both modes; in the end every count is whole."""
    parts: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (3, 5, {"servers": 1}),
        (5, 4, {"servers": 3}),
        (4, 5, {"servers": 2, "snapshot": "stall", "checkpoint_every": "3steps", **CHAIN}),
        (5, -1, {"servers": 2, "checkpoint_every": "10steps", **CHAIN}),
    )
    for mode, sizes in (("async", (1, 2, 0, 1)), ("ssp", (0, 1, 2, 2))):
        out = folder / mode
        for part, ((ranks, stop, options), size) in enumerate(zip(parts, sizes, strict=True)):
            nodes = {"node_size": size, "prefetch": mode == "async" and size == 2}
            # From the second part on: rows of a table may become more, its memory another, and
            # then the owners of its rows.
            tables = (TABLES, LAZY, in_blocks(LAZY), LAZY)[part]
            named = {"mode": mode, "tables": tables, **nodes, **options}
            result = run(trainer(stop), ranks, out, resume="auto", **named)
            if WORLD.rank == 0:
                ended = done(result)
                assert (ended.summary["bytes_received"] > 0) == (size > 0)
                assert ended.reason == ("epochs" if stop < 0 else "stopped"), ended.reason
                found = check_counts(out)
                assert found.step == ended.summary["global_step"]
                if part == 2:  # the last one, if no other, adds to one before
                    assert any(open_checkpoint(p).base for p in list_checkpoints(out))
                    assert not [text for p in list_checkpoints(out) for text in verify(p)]
        if WORLD.rank == 0:
            np.testing.assert_array_equal(found.read_params(), EPOCHS)
            np.testing.assert_array_equal(ended.rows("one", np.arange(N)), np.full((N, 1), EPOCHS))


PAIR = {"pair": mpips.Table(rows=N, dim=2, init=ZEROS, evict_after=2)}
LONG = 6  # epochs
KINDS = np.arange(N) % 3  # of rows: pushed always; in epochs 0 and 1; in 0, and from 4 on
PAIRED = np.array([LONG, 0, LONG - 4])  # counts in the end


def pairs(stop: int) -> Callable[..., None]:
    """Return a training function that counts in rows (count, number times it), some at times."""

    def train(worker: mpips.Worker) -> None:
        factors, every = np.arange(1, N + 1), np.arange(N)
        for pushed, batch in enumerate(worker.batches(N, batch_size=7, epochs=LONG), 1):
            kind, epoch = KINDS[batch.ids], batch.epoch
            pushes = (kind == 0) | (epoch == 0) | ((kind == 1) & (epoch == 1))
            some = batch.ids[pushes | ((kind == 2) & (epoch >= 4))]
            worker.push_rows("pair", some, -np.stack([np.ones(len(some)), factors[some]], 1))
            rows = worker.pull_rows("pair", every)
            np.testing.assert_array_equal(rows[:, 1], rows[:, 0] * factors)
            assert rows[:, 0].max() <= LONG
            worker.grads["counts"][:] = -np.bincount(batch.ids, minlength=N)
            worker.push(0.0)
            if pushed == stop and worker.id == 0:
                worker.stop()

    return train


def evicted(folder: Path) -> None:
    """Rows that nobody pushes for two epochs are as at first, on other servers too; others exact.

    No worker is an epoch behind in mode ssp, so that it is known which rows these are.
    """
    parts: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (3, 25, {"servers": 1, "node_size": 1}),
        (5, 37, {"servers": 3, "checkpoint_every": "3steps", **CHAIN}),
        (4, -1, {"servers": 2, "node_size": 2, "checkpoint_every": "3steps", **CHAIN}),
    )
    out, total = folder / "evicted", 0  # how many rows of it a job evicts depends on when it stops
    for ranks, stop, options in parts:
        named = {"mode": "ssp", "tables": PAIR, **options}
        if stop < 0:  # by the option of all tables
            named["tables"] = {"pair": dataclasses.replace(PAIR["pair"], evict_after=None)}
            named["evict_after"] = 2
        result = run(pairs(stop), ranks, out, resume="auto", **named)
        if WORLD.rank == 0:
            assert not [text for p in list_checkpoints(out) for text in verify(p)]
            total += done(result).summary["tables"]["pair"]["evicted"]
    if WORLD.rank == 0:
        ended, (found, _) = done(result), newest_whole(out)
        assert found is not None
        counts = PAIRED[KINDS]
        np.testing.assert_array_equal(ended.rows("pair", np.arange(N))[:, 0], counts)
        numbers, columns = rows_of(found, "pair")
        np.testing.assert_array_equal(numbers, np.flatnonzero(counts))
        np.testing.assert_array_equal(columns["slots/seen"], LONG - 1)
        assert ended.summary["tables"]["pair"]["changed"] == len(numbers)
        assert total >= np.count_nonzero(KINDS)  # each row that is not pushed always, once or more


def same(folder: Path) -> None:
    """Rows and slots that 2 servers have saved are those of 1 and of 3, to the bit."""
    out, saved = folder / "same", []

    def train(worker: mpips.Worker) -> None:
        for _ in worker.batches(N, batch_size=7, epochs=EPOCHS + len(saved)):
            worker.grads["counts"][:] = 0
            worker.push(0.0)

    for servers, function in ((2, trainer()), (1, train), (3, train)):
        result = run(function, servers + 2, out, servers=servers, resume="auto")
        assert not isinstance(result, str), result
        found, _ = newest_whole(out)
        assert found is not None
        assert found.step == -(-N // 7) * (EPOCHS + len(saved))
        assert len(found.rows) == servers
        saved.append({name: rows_of(found, name) for name in TABLES})
    for other in saved[1:]:
        for name, (numbers, columns) in saved[0].items():
            np.testing.assert_array_equal(numbers, other[name][0])
            assert columns.keys() == other[name][1].keys()
            for key, column in columns.items():
                np.testing.assert_array_equal(column, other[name][1][key], strict=True)
    assert len(saved[0]["slots"][1]) > 1, "there is a slot"
    resized(out, saved[0]["slots"])


def remote(folder: Path) -> None:
    """What one worker does to rows of other nodes is what it does to those of its own, to the bit.

    It sees its own pushes in mode ssp, so that only the way that rows travel differs.
    """
    found = []
    blocks = in_blocks(TABLES), in_blocks(LAZY)
    cases = *product((0, 1), (TABLES, LAZY)), (0, blocks[0]), (1, blocks[0]), (1, blocks[1])
    for number, (size, tables) in enumerate(cases):
        out = folder / f"remote-{number}"
        options = {"mode": "ssp", "staleness_bound": 0, "servers": 2, "node_size": size}
        result = run(trainer(epochs=2), 3, out, tables=tables, **options)
        if WORLD.rank == 0:
            summary = done(result).summary
            assert (summary["bytes_sent"] > 0) == (size > 0)
            assert summary["tables"]["slots"]["rows"] == tables["slots"].rows
            assert summary["tables"]["slots"]["changed"] == N
            servers = summary["per_server"]
            assert sum(each["rows_changed"]["slots"] for each in servers) == N
            assert max(each["bytes"] for each in servers) < 1 << 17  # as if it had rows touched
            saved = check_counts(out)
            found.append([rows_of(saved, name) for name in TABLES])
    for other in found[1:]:
        for (numbers, columns), (others, theirs) in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(numbers, others)
            assert columns.keys() == theirs.keys()
            for name, column in columns.items():
                np.testing.assert_array_equal(column, theirs[name], strict=True)


def resized(out: Path, saved: tuple[np.ndarray, dict[str, np.ndarray]]) -> None:
    """A table may have more rows when a run goes on, and no other dim; all rows stay the same."""
    item, (newest, _) = TABLES["slots"], newest_whole(out)
    assert newest is not None
    before = find_rows(newest, "slots", PLACES)

    def train(worker: mpips.Worker) -> None:
        for _ in worker.batches(N, batch_size=7, epochs=EPOCHS + 4):
            rows = worker.pull_rows("slots", PLACES)
            np.testing.assert_array_equal(rows, before, strict=True)
            np.testing.assert_array_equal(rows[0, 0], saved[1]["params"][0], strict=True)
            assert 0 < abs(rows[[0, 1, 1], [1, 0, 2]]).max() <= 0.5, (
                "untouched rows are as they were made"
            )
            worker.grads["counts"][:] = 0
            worker.push(0.0)

    changes: tuple[tuple[dict[str, int], str], ...] = (
        ({"dim": 6}, "dim 6 on resume"),
        ({"rows": 999}, "at least 1,000"),
        ({"rows": 1500}, ""),
    )
    for change, told in changes:
        tables = TABLES | {"slots": dataclasses.replace(item, **change)}
        result = run(train, 3, out, servers=1, resume="yes", tables=tables)
        if WORLD.rank < 3 and told:
            assert told in str(result), result
        elif WORLD.rank < 3:
            assert done(result).summary["tables"]["slots"]["rows"] == 1500


def hashed(folder: Path) -> None:
    """Words and integers of 64 bits are ids, of the same rows on other servers, in other modes."""
    out, epochs = folder / "hashed", 0

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches(N, batch_size=7, epochs=epochs):
            words, keys = WORDS[batch.ids].tolist(), KEYS[batch.ids]
            worker.ask_rows("word", words)
            assert worker.pull_rows("word", words).shape == (len(words), 1)
            worker.pull_rows("word", WORDS.astype(object).reshape(10, -1))
            assert "of dtype float64, expected integers, or str" in told_by(
                lambda w: w.pull_rows("word", [1.5]), worker
            )
            assert "nan in the gradient of id word 7 of" in told_by(
                lambda w: w.push_rows("word", ["word 6", "word 7"], [[0], [np.nan]]), worker
            )
            worker.grads["counts"][:] = 0
            worker.push_rows("word", words, -np.ones((len(words), 1)))
            worker.push_rows("key", keys.astype("i8"), -np.ones((len(keys), 2)))
            worker.push(0.0)

    of_row = rows_of_ids(digests_of("word", WORDS), HASHED["word"].rows)
    _, place, words = np.unique(of_row, return_inverse=True, return_counts=True)
    counted = {"of": HASHED["word"].rows, "ids": len(words), "shared": int((words > 1).sum())}
    parts = (
        (3, {"mode": "async", "servers": 1}, HASHED),
        (4, {"mode": "ssp", "servers": 2, "node_size": 1}, in_blocks(HASHED)),
        (1, {"mode": "sync", "servers": 0}, HASHED),
    )
    for epochs, (ranks, options, tables) in enumerate(parts, 1):  # train reads it
        result = run(train, ranks, out, resume="auto", **{**options, "tables": tables})
        if WORLD.rank == 0:
            found = done(result).summary["tables"]
            assert found["word"]["hashed"] == counted
            assert found["key"]["hashed"]["of"] <= 1 << 20
            rows = done(result).rows("word", WORDS)[:, 0]
            np.testing.assert_array_equal(rows, epochs * words[place])
            np.testing.assert_array_equal(done(result).rows("key", KEYS), np.full((N, 2), epochs))
    for change, told in (
        ({"rows": 400}, "table 'word' of rows 400 on resume, expected 300"),
        ({"hashed": False}, "table 'word' of hashed False on resume, expected True"),
    ):
        tables = HASHED | {"word": dataclasses.replace(HASHED["word"], **change)}
        refused = run(train, 3, out, resume="yes", tables=tables)
        if WORLD.rank < 3:
            assert told in str(refused), refused


def torn(folder: Path) -> None:
    """Rows that are read while they are updated are counted."""
    table = {"long": mpips.Table(rows=2, dim=1 << 17, optimizer=mpips.SGD(1e-3))}

    def train(worker: mpips.Worker) -> None:
        ones = np.ones((2, 1 << 17))
        for _ in worker.batches(300, batch_size=1):
            for _ in range(4):
                worker.pull_rows("long", [0, 1, 0, 1])
            worker.grads["counts"][:] = 0
            worker.push_rows("long", [0, 1], ones)
            worker.push(0.0)

    for attempt in range(10):  # where ranks take turns on a core, reads may meet no update
        result = run(train, 4, folder / f"torn-{attempt}", tables=table, servers=1, epochs=1)
        if WORLD.rank < 4:
            long = done(result).summary["tables"]["long"]
            assert (long["changed"], long["pushed"], long["pulled"]) == (2, 600, 4800)
        if WORLD.bcast(WORLD.rank == 0 and long["again"] + long["torn"] > 0):
            return
    raise AssertionError("no read has met an update")


def empty(folder: Path) -> None:
    """Servers whose shard is empty take pushes, have clocks, and save their rows.

    Rows that are asked for come with the next step's clock, and hold all that this worker pushed.
    """
    out, options = folder / "empty", {"tables": {"one": TABLES["one"]}, "mode": "ssp"}
    every = np.arange(N)

    def train(worker: mpips.Worker) -> None:
        own = np.zeros(N)
        for batch in worker.batches(N, batch_size=7, epochs=2 + (worker.workers == 1)):
            assert (worker.pull_rows("one", every)[:, 0] >= own).all(), "own pushes are missing"
            worker.ask_rows("one", every)
            own[batch.ids] += 1
            worker.grads["counts"][:] = -len(batch)
            for part in batch.ids[:3], batch.ids[3:]:
                worker.push_rows("one", part, -np.ones((len(part), 1)))
            worker.push(0.0)

    for ranks, servers, epochs, size in ((5, 3, 2, 2), (3, 2, 3, 0)):
        named = {"servers": servers, "staleness_bound": 0, "params": {"counts": np.zeros(1)}}
        named |= {"node_size": size}
        result = run(train, ranks, out, resume="auto", **options, **named)
        if WORLD.rank == 0:
            assert done(result).summary["clock_distance_max"] == 0
            assert all(each["applied"] for each in done(result).summary["per_server"])
            rows = sum(each["rows_pushed"]["one"] for each in done(result).summary["per_server"])
            assert rows <= N * epochs, "what a push had before is not counted again"
            asked = done(result).summary["tables"]["one"]["ahead"]
            assert asked > 0 if size else asked == 0
            assert done(result).params["counts"] == N * epochs
            rows = done(result).rows("one", every)
            np.testing.assert_array_equal(rows, np.full((N, 1), epochs))
            assert done(result).rows("one", []).shape == (0, 1)
            assert done(result).rows("one", np.zeros((2, 0), "i8")).shape == (2, 0, 1)


def weighed(folder: Path) -> None:
    """A norm is bounded over parameters and rows; batches of a step weigh by their samples."""

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches(samples, batch_size=2, epochs=1):
            worker.grads["counts"][:] = 0
            worker.grads["counts"][0] = 12
            worker.push_rows("wide", [3], [[3.0, 4.0, 0.0]])
            worker.push_rows("one", batch.ids, np.ones((len(batch), 1)))
            worker.push(0.0)

    samples = 2
    result = run(train, 2, folder / "clip", clip=1.3)
    if WORLD.rank == 0:
        norm = np.sqrt(12**2 + 5**2 + 2)
        expected = np.array([-3.0, -4.0, 0.0]) * 1.3 / norm
        np.testing.assert_allclose(done(result).rows("wide", [3])[0], expected, rtol=1e-12)
        assert np.isclose(done(result).params["counts"][0], -12 * 1.3 / norm)
        lone = [[-1.3 / norm], [-1.3 / norm], [0.0]]
        np.testing.assert_allclose(done(result).rows("one", [0, 1, 2]), lone, rtol=1e-12)
    samples = 5
    result = run(train, 2, folder / "accumulate", accumulate=4)
    if WORLD.rank == 0:  # one step of batches of 2, 2 and 1 samples
        np.testing.assert_allclose(done(result).rows("wide", [3])[0], [-3.0, -4.0, 0.0], rtol=1e-12)
        weights = sorted(done(result).rows("one", np.arange(5))[:, 0])
        np.testing.assert_allclose(weights, [-0.4, -0.4, -0.4, -0.4, -0.2], rtol=1e-12)


BAD: dict[str, tuple[str, Callable[[mpips.Worker], object]]] = {
    "an id below": ("id -1 ", lambda w: w.pull_rows("wide", [0, -1])),
    "an id behind": ("id 17 ", lambda w: w.push_rows("wide", [17], np.ones((1, WIDE)))),
    "floats": ("dtype float64, expected an integer", lambda w: w.pull_rows("wide", [1.0])),
    "floats that equal what was read": (
        "dtype float64, expected an integer",
        lambda w: (w.pull_rows("wide", [1]), w.push_rows("wide", [1.0], np.ones((1, WIDE)))),
    ),
    "asks no table": ("did you mean 'wide'", lambda w: w.ask_rows("wid", [0])),
    "no table": ("did you mean 'wide'", lambda w: w.pull_rows("wid", [0])),
    "shape": (
        "of shape (2, 3), expected (1, 3)",
        lambda w: w.push_rows("wide", [0], np.ones((2, WIDE))),
    ),
    "nan": (
        "nan in the gradient of row 4 of table 'wide'",
        lambda w: w.push_rows("wide", [3, 4], [[1, 2, 3], [1, np.nan, 3]]),
    ),
    "a sum that overflows": (
        "inf in the sum of 2 gradients of row 4 of table 'wide'",
        lambda w: w.push_rows("wide", [4, 3, 4], np.full((3, 3), 1.7e308)),
    ),
    "one with what was pushed before": (
        "inf in the sum of 2 gradients of row 3 of table 'few'",
        lambda w: w.push_rows("few", [2, 3], [[1.0], [np.finfo("f8").max]]),
    ),
    "words": ("of dtype <U1", lambda w: w.push_rows("one", [0], [["a"]])),
    "too many": (
        "5 rows of table 'few' in one push, expected at most 2; give the table push_rows=5",
        lambda w: w.push_rows("few", [5, 7, 6, 7], np.ones((4, 1))),
    ),
}


def told_by(call: Callable[[mpips.Worker], object], worker: mpips.Worker) -> str:
    """Return the message of what is refused."""
    try:
        call(worker)
    except mpips.UserError as error:
        return str(error)
    return "nothing"


def bad(folder: Path) -> None:
    """What is refused in a step leaves the step as it was; what is read is what was pushed."""
    tables = TABLES | {"few": mpips.Table(rows=9, dim=1, push_rows=2, init=ZEROS)}
    outside: list[mpips.Worker] = []

    def train(worker: mpips.Worker) -> None:
        told = told_by(lambda w: w.pull_rows("one", [0]), worker)
        assert "before the loop" in told
        assert "rows are there from the first batch of worker.batches on" in told
        for _ in worker.batches(8, batch_size=1, epochs=1):
            worker.push_rows("few", [2, 2], np.ones((2, 1)))
            worker.push_rows("few", np.array([3], "u8"), [[1e300]])
            for name, (told, call) in BAD.items():
                found = told_by(call, worker)
                assert told in found, (name, found)
            worker.push_rows("wide", np.zeros((0, 2), int), np.zeros((0, 2, WIDE)))
            assert worker.pull_rows("wide", []).shape == (0, WIDE)
            assert worker.pull_rows("wide", [[1, 2]]).dtype == np.float64
            worker.grads["counts"][:] = 0
            worker.push(0.0)
        told = told_by(lambda w: w.pull_rows("one", [0]), worker)
        assert "after the loop over the batches, expected a call in it; result.rows(" in told
        outside.append(worker)

    out = folder / "bad"
    options = {"tables": tables, "servers": 2, "max_staleness": 1000}
    result = run(train, 4, out, **options)
    if WORLD.rank == 0:
        summary = done(result).summary
        found, _ = newest_whole(out)
        assert found is not None
        numbers, columns = rows_of(found, "few")
        np.testing.assert_array_equal(numbers, [2, 3])
        np.testing.assert_array_equal(columns["params"], [[-16.0], [-8e300]])  # the run's rule
        assert summary["tables"]["few"]["pushed"] == 24
        assert summary["tables"]["wide"]["changed"] == 0
        assert sum(server["rows_pushed"]["few"] for server in summary["per_server"]) == 16
        assert {len(server["rows_pulled"]) for server in summary["per_server"]} == {len(tables)}

    def without(worker: mpips.Worker) -> None:
        for _ in worker.batches(8, batch_size=4, epochs=1):
            assert "without tables" in told_by(lambda w: w.pull_rows("one", [0]), worker)
            worker.grads["counts"][:] = 0
            worker.push(0.0)

    assert not isinstance(run(without, 3, folder / "none", tables=None), str)


def slow(out: Path, servers: int = 1) -> None:
    """Train slowly, and save often."""
    mpips.run(
        trainer(pause_s=0.05), INIT, mpips.SGD(1.0), tables=LAZY, servers=servers,
        out=out, resume="auto", checkpoint_every="3steps", quiet=True,
        node_size=servers - 1, **CHAIN,
    )  # fmt: skip


def main(
    cases: Sequence[Callable[[Path], None]],
    kills: Callable[..., None],
    check: Callable[[Path], object],
) -> None:
    """Run what the command line asks for: all cases in one world, kills or check.

    An exception ends all ranks.
    """
    try:
        case, out, *servers = sys.argv[1:]
        if case == "kills":
            kills(Path(out), *map(int, servers))
        if case in ("kills", "check"):
            if WORLD.rank == 0:
                check(Path(out))
            return
        for each in cases:
            each(Path(out))
            if WORLD.rank == 0:
                print(f"{each.__name__} is done", flush=True)
    except BaseException as error:
        abort.abort(abort.raised(error), 1)


if __name__ == "__main__":
    main((exact, evicted, same, remote, hashed, torn, empty, weighed, bad), slow, check_counts)
