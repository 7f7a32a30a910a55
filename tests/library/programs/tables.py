"""Tables of rows, on one node and between nodes: ``tables.py CASES OUT`` runs them in one world.

CASES are ``served`` or ``rounds``. ``exact`` is the counting problem by rows: each sample adds 1 to
its rows and to its parameter, in two tables of different length, beside a third with another rule.
In mode sync the gradient is as many times as large as there are workers, which have equally many
samples. Some runs have lazy tables, one of them of 200 M rows, and some tables whose servers own
blocks of rows: what they hold is the same to the bit.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpips
from mpips.checkpoint import Checkpoint, list_checkpoints, need_whole, open_checkpoint, verify
from mpips.layout.tables import digests_of
from mpips.layout.tables import rows_of as rows_of_ids
from mpips.mpi import abort
from mpips.tables.saved_rows import find_rows
from tests.jobs.several import wait_for_all

WORLD = MPI.COMM_WORLD
N, EPOCHS, WIDE = 232, 3, 3
BATCH, PART = 7, 4  # samples of a push, and in rounds of a worker's part
EVERY = np.arange(N)
SEVERAL = 17  # rows of the table that each push has many samples of one row of
ZEROS = mpips.Zeros()
TABLES = {
    "one": mpips.Table(rows=N, dim=1, init=ZEROS, optimizer=mpips.SGD(1.0)),
    "wide": mpips.Table(rows=SEVERAL, dim=WIDE, init=ZEROS, optimizer=mpips.SGD(1.0)),
    "slots": mpips.Table(rows=1000, dim=5, init=mpips.Uniform(0.5), optimizer=mpips.Adagrad(0.1)),
}
LAZY = {name: dataclasses.replace(table, capacity="lazy") for name, table in TABLES.items()}
LAZY["slots"] = dataclasses.replace(LAZY["slots"], rows=200_000_000)
MIXED = TABLES | {"wide": LAZY["wide"]}
WORDS = np.array([f"word {k}" for k in range(N)])
KEYS = np.arange(N, dtype="u8") * np.uint64(0x9E3779B97F4A7C15)
HASHED = {
    "word": mpips.Table(rows=300, dim=1, init=ZEROS, hashed=True),
    "key": mpips.Table(rows=200_000_000, dim=2, init=ZEROS, hashed=True),
}
INIT = {"counts": np.zeros(N)}
CHAIN: dict[str, Any] = {"checkpoint_rows": "changed"}
SYNC: dict[str, Any] = {"mode": "sync", "tables": MIXED}
Train = Callable[[mpips.Worker], None]


def in_blocks(tables: dict[str, mpips.Table]) -> dict[str, mpips.Table]:
    """Return tables like these of whose rows each server owns a block."""
    return {k: dataclasses.replace(table, ownership="blocks") for k, table in tables.items()}


def trainer(stop: int = -1, epochs: int = EPOCHS, sync: bool = False) -> Train:
    """Return a training function whose worker 0 stops the run when it has pushed so many."""

    def train(worker: mpips.Worker) -> None:
        size = float(worker.workers) if sync else 1.0
        batches = worker.batches(N, batch_size=PART if sync else BATCH, epochs=epochs)
        for pushed, batch in enumerate(batches, 1):
            assert sync or stop < 0 or worker.id or pushed <= stop, "a batch behind its stop"
            ids = batch.ids
            if sync:
                counts = worker.pull()["counts"]
                np.testing.assert_array_equal(worker.pull_rows("one", EVERY)[:, 0], counts)
                worker.ask_rows("one", EVERY)  # too early for the next round
            elif pushed % 2:
                worker.ask_rows("slots", ids)
                worker.ask_rows("wide", [pushed % SEVERAL])  # which nobody pulls
            rows = worker.pull_rows("slots", ids)
            assert rows.shape == (len(ids), 5)
            worker.grads["counts"][:] = -size * np.bincount(ids, minlength=N)
            worker.push_rows("one", ids, np.full((len(ids), 1), -size))
            half = len(ids) // 2
            for part in (ids[:half], ids[half:]):
                worker.push_rows("wide", part % SEVERAL, np.full((len(part), WIDE), -size))
            worker.push_rows("slots", 4 * ids, rows - 1)
            worker.push(0.0)
            if pushed == stop and worker.id == 0:
                worker.stop()

    return train


Rows = tuple[np.ndarray, dict[str, np.ndarray]]


def assert_same(rows: Rows, others: Rows) -> None:
    """Assert that rows are the same to the bit, and so is all that goes with them."""
    np.testing.assert_array_equal(rows[0], others[0])
    assert rows[1].keys() == others[1].keys()
    for name, column in rows[1].items():
        np.testing.assert_array_equal(column, others[1][name], strict=True)


def rows_of(found: Checkpoint, table: str) -> Rows:
    """Return all rows that are saved, in the order of their numbers, with what goes with each."""
    pieces = list(found.read_table(table))
    numbers = np.concatenate([piece.rows for piece in pieces])
    order = np.argsort(numbers)
    assert len(set(numbers.tolist())) == len(numbers), "a row in two files"
    columns = {name: np.concatenate([p.arrays[name] for p in pieces]) for name in pieces[0].arrays}
    return numbers[order], {k: c[order] for k, c in columns.items() if k != "rows"}


def check_counts(out: Path, whole: bool = True) -> Checkpoint:
    """Check the newest checkpoint against its own parameters; a `whole` run counts all samples."""
    found, _ = need_whole(out)
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
    wait_for_all(WORLD)
    return result


def done(result: mpips.Result | str | None) -> mpips.Result:
    """Return what a run of this rank's has left."""
    assert isinstance(result, mpips.Result), result
    return result


# Ranks, after how many pushes of worker 0 it stops, and options.
Parts = tuple[tuple[int, int, dict[str, Any]], ...]
HALF = {"servers": 2, "snapshot": "stall", "checkpoint_every": "3steps", **CHAIN}
SERVED: dict[str, tuple[int, ...]] = {"async": (1, 2, 0, 1), "ssp": (0, 1, 2, 2)}  # sizes of nodes
SERVED_PARTS: Parts = (
    (3, 5, {"servers": 1}),
    (5, 4, {"servers": 3}),
    (4, 5, HALF),
    (5, -1, {"servers": 2, "checkpoint_every": "10steps", **CHAIN}),
)
ROUND_PARTS: Parts = (
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


def ended_part(out: Path, result: mpips.Result, stop: int, options: dict[str, Any]) -> Checkpoint:
    """Check on rank 0 what a part of a history has left; returns its newest checkpoint."""
    summary, whole = result.summary, options.get("whole", True)
    assert (summary["bytes_received"] > 0) == (len(summary["nodes"]) > 1)
    assert result.reason == ("epochs" if stop < 0 else "stopped"), result.reason
    found = check_counts(out, whole)
    assert found.step == summary["global_step"]
    if "checkpoint_rows" in options:  # the last one, if no other, adds to one before
        saved = list_checkpoints(out)
        assert any(open_checkpoint(path).base for path in saved)
        assert not [text for path in saved for text in verify(path)]
    return found


def exact(folder: Path) -> None:
    """Stops, resumes on other servers, nodes, rows, memory and owners; the end counts are whole."""
    for mode, sizes in SERVED.items():
        out = folder / mode
        for part, (ranks, stop, options) in enumerate(SERVED_PARTS):
            size = sizes[part]
            named = {"node_size": size, "prefetch": mode == "async" and size == 2, **options}
            named["tables"] = (TABLES, LAZY, in_blocks(LAZY), LAZY)[part]
            result = run(trainer(stop), ranks, out, resume="auto", mode=mode, **named)
            if WORLD.rank == 0:
                found = ended_part(out, done(result), stop, options)
        if WORLD.rank == 0:
            np.testing.assert_array_equal(found.read_params(), EPOCHS)
            rows = done(result).rows("one", EVERY)
            np.testing.assert_array_equal(rows, np.full((N, 1), EPOCHS))


def exact_rounds(folder: Path) -> None:
    """Stops, resumes on other workers, owners and nodes; in the end all counts are whole.

    Unless fewer workers make the rest of a round: its gradients weigh less, and rows are as the
    parameters are.
    """
    out = folder / "exact"
    for number, (ranks, stop, options) in enumerate(ROUND_PARTS):
        train = trainer(stop, epochs=EPOCHS + (number > 5), sync=True)
        named = {**SYNC, "tables": in_blocks(MIXED) if number % 2 else MIXED, **options}
        result = run(train, ranks, out, resume="auto", **named)
        if WORLD.rank == 0:
            found = ended_part(out, done(result), stop, {**options, "whole": number < 7})
            assert number != 5 or found.read_params().tolist() == [EPOCHS] * N
    if WORLD.rank == 0:
        rows = done(result).rows("one", EVERY)[:, 0]
        np.testing.assert_array_equal(rows, found.read_params())
        told = done(result).summary["tables"]["one"]
        assert told["pushed"] > 0
        assert told["torn"] + told["again"] == 0


def remote(folder: Path) -> None:
    """One worker, which sees its own pushes in mode ssp: rows of other nodes have the same bits."""
    found = []
    cases = (0, TABLES), (1, LAZY), (0, in_blocks(LAZY)), (1, in_blocks(TABLES))
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
        for rows, theirs in zip(found[0], other, strict=True):
            assert_same(rows, theirs)


def hashed(folder: Path) -> None:
    """Words and integers of 64 bits are ids, of the same rows on other servers, in other modes."""
    out, epochs = folder / "hashed", 0

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches(N, batch_size=7, epochs=epochs):
            words, keys = WORDS[batch.ids].tolist(), KEYS[batch.ids]
            worker.ask_rows("word", words)
            assert worker.pull_rows("word", words).shape == (len(words), 1)
            worker.pull_rows("word", WORDS.astype(object).reshape(8, -1))
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
    tables = HASHED | {"word": dataclasses.replace(HASHED["word"], rows=400)}
    refused = run(train, 3, out, resume="yes", tables=tables)
    assert WORLD.rank >= 3 or "table 'word' of rows 400 on resume, expected 300" in str(refused)


def empty(folder: Path) -> None:
    """Servers with an empty shard take pushes, have clocks, save rows; reads have own pushes."""
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


BAD: dict[str, Callable[[mpips.Worker], object]] = {  # by what is said
    "id -1 ": lambda w: w.pull_rows("wide", [0, -1]),
    "id 17 ": lambda w: w.push_rows("wide", [17], np.ones((1, WIDE))),
    "dtype float64, expected an integer": lambda w: w.pull_rows("wide", [1.0]),
    "of dtype float64, expected an integer": lambda w: (  # which equals what was read
        w.pull_rows("wide", [1]), w.push_rows("wide", [1.0], np.ones((1, WIDE))),
    ),
    "did you mean 'wide'": lambda w: w.ask_rows("wid", [0]),
    "; did you mean 'wide'": lambda w: w.pull_rows("wid", [0]),
    "of shape (2, 3), expected (1, 3)": lambda w: w.push_rows("wide", [0], np.ones((2, WIDE))),
    "nan in the gradient of row 4 of table 'wide'": (
        lambda w: w.push_rows("wide", [3, 4], [[1, 2, 3], [1, np.nan, 3]])
    ),
    "inf in the sum of 2 gradients of row 4 of table 'wide'": (
        lambda w: w.push_rows("wide", [4, 3, 4], np.full((3, 3), 1.7e308))
    ),
    "inf in the sum of 2 gradients of row 3 of table 'few'": (  # with what was pushed before
        lambda w: w.push_rows("few", [2, 3], [[1.0], [np.finfo("f8").max]])
    ),
    "of dtype <U1": lambda w: w.push_rows("one", [0], [["a"]]),
    "5 rows of table 'few' in one push, expected at most 2; give the table push_rows=5": (
        lambda w: w.push_rows("few", [5, 7, 6, 7], np.ones((4, 1)))
    ),
}  # fmt: skip


def told_by(call: Callable[[mpips.Worker], object], worker: mpips.Worker) -> str:
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
            for told, call in BAD.items():
                assert told in told_by(call, worker), (told, told_by(call, worker))
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
        found, _ = need_whole(out)
        numbers, columns = rows_of(found, "few")
        np.testing.assert_array_equal(numbers, [2, 3])
        np.testing.assert_array_equal(columns["params"], [[-16.0], [-8e300]])  # the run's rule
        assert summary["tables"]["few"]["pushed"] == 24
        assert summary["tables"]["wide"]["changed"] == 0
        assert sum(server["rows_pushed"]["few"] for server in summary["per_server"]) == 16
        assert {len(server["rows_pulled"]) for server in summary["per_server"]} == {len(tables)}


def placed(folder: Path) -> None:
    """How ranks lie on nodes, or who owns a row, changes no bit; a norm's order is the owners'."""
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
            found.append(rows_of(need_whole(out)[0], "slots"))
    for k, rows in enumerate(found):
        assert_same(rows, found[k // 3 * 3])


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


COME, LAST, GLOBAL = 120, 7, 12  # rows that come and go, epochs, and samples of a round
TARGETS = np.stack([np.arange(COME), 1 - np.arange(COME)], 1)
RULE = mpips.Adagrad(0.1)
HYBRID, SSP = {"mode": "hybrid"}, {"mode": "ssp", "shuffle": False}
COMING = {"pair": mpips.Table(rows=COME, dim=2, init=ZEROS, optimizer=RULE, evict_after=2)}


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


def passing(stop: int, rounds: bool) -> Train:
    """Return a training function that looks at all rows in each step, and pushes some."""
    before, behind, *_ = serial()

    def train(worker: mpips.Worker) -> None:
        every, size = np.arange(COME), GLOBAL // (worker.workers if rounds else 1)
        for pushed, batch in enumerate(worker.batches(COME, batch_size=size, epochs=LAST), 1):
            rows, epoch = worker.pull_rows("pair", every), batch.epoch
            states = [before[epoch], behind[epoch]] if rounds else [*before, *behind]
            known = np.any([np.isclose(rows, each) for each in states], axis=0)
            assert known.all(), (epoch, np.flatnonzero(~known.all(1)))
            some = batch.ids[comes(batch.ids, epoch)]
            worker.push_rows("pair", some, (rows[some] - TARGETS[some]) / size)
            worker.push(0.0)
            if pushed == stop and worker.id == 0:
                worker.stop()

    return train


def come_and_go(folder: Path) -> None:
    """Old rows go with an epoch's last round, as in a serial run: on all owners, through stops.

    So it is in modes hybrid and ssp, where a row is pushed once an epoch: its rows are whole at the
    end. In mode ssp a job may evict rows after its last checkpoint, and the next one again.
    """
    _, behind, seen, count = serial()
    often: dict[str, Any] = {"checkpoint_every": "1steps", **CHAIN}
    whole: dict[str, Any] = {**SYNC, "params": {}, "tables": COMING, "dtype": "float64"}
    plain = {"pair": dataclasses.replace(COMING["pair"], evict_after=None)}
    by_option: dict[str, Any] = {"tables": plain, "evict_after": 2}
    cases: dict[str, list[tuple[int, int, dict[str, Any]]]] = {
        "servers": [(4, -1, {"servers": 2, **often})],
        "stops": [
            (4, 20, {"node_size": 1}),
            (5, 25, {"servers": 1, **often}),
            (4, -1, {"node_size": 2, "servers": 0, **often}),
        ],
        "hybrid": [
            (5, 20, {**HYBRID, "servers": 2, "node_size": 2, **often}),
            (4, 25, {**HYBRID, "servers": 1, "staleness_bound": 4}),
            (5, -1, {**HYBRID, "servers": 2, "node_size": 1, **often}),
        ],
        "ssp": [
            (3, 12, {**SSP, "servers": 1, "node_size": 1}),
            (5, 12, {**SSP, "servers": 3, **often}),
            (4, -1, {**SSP, "servers": 2, "node_size": 2, **often, **by_option}),
        ],
    }
    for name, parts in cases.items():
        out, total = folder / f"come-{name}", 0
        for ranks, stop, options in parts:
            train = passing(stop, name != "ssp")
            result = run(train, ranks, out, resume="auto", **{**whole, **options})
            if WORLD.rank == 0:
                total += done(result).summary["tables"]["pair"]["evicted"]
        if WORLD.rank == 0:
            found, _ = need_whole(out)
            assert not verify(found.path)
            numbers, columns = rows_of(found, "pair")
            np.testing.assert_array_equal(numbers, np.flatnonzero(seen >= 0))
            np.testing.assert_array_equal(columns["slots/seen"], seen[numbers])
            np.testing.assert_allclose(columns["params"], behind[-1][numbers], rtol=1e-12)
            assert done(result).summary["tables"]["pair"]["changed"] == len(numbers)
            assert total == count > COME // 4 or (name == "ssp" and total > count)


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
    """Rows that are not finite end the run: none of them is saved."""

    def train(worker: mpips.Worker) -> None:
        for step, _ in enumerate(worker.batches(N, batch_size=PART, epochs=1)):
            worker.grads["counts"][:] = 0
            gradient = 1.7e308 if step >= 4 and worker.id == 1 else 1.0
            worker.push_rows("one", [0, 1], [[gradient], [gradient]])
            worker.push(0.0)

    out, fast = folder / "overflow", dataclasses.replace(TABLES["one"], optimizer=mpips.SGD(1e3))
    options = {"node_size": 1, "checkpoint_every": "1steps", "tables": {"one": fast}}
    result = run(train, 3, out, **{**SYNC, **options})
    if WORLD.rank == 0:
        assert (done(result).reason, done(result).code) == ("diverged", 1)
        saved, _ = need_whole(out)
        assert saved.step <= 4, saved.step
        assert np.isfinite(find_rows(saved, "one", np.zeros(1, "i8"))).all()


CASES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "served": (exact, remote, hashed, empty, bad),
    "rounds": (exact_rounds, placed, packed, come_and_go, evaluated, diverged),
}


if __name__ == "__main__":
    try:
        for each in CASES[sys.argv[1]]:
            each(Path(sys.argv[2]))
            if WORLD.rank == 0:
                print(f"{each.__name__} is done", flush=True)
    except BaseException as error:  # ends all ranks
        abort.abort(abort.raised(error), 1)
