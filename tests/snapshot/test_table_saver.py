"""Which rows a server saves: all, or those changed since the last checkpoint that was committed."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpips.checkpoint import ShardRecord, TableRows, begin_step
from mpips.layout import Shard
from mpips.snapshot.saver import NOWHERE
from mpips.tables.saver import MOST_LINKS, NotFiniteError, TableSaver

ROWS = 1000


class Rows:
    """A table of whose rows some are marked."""

    def __init__(self) -> None:
        self.marked, self.touched, self.value = 0, ROWS, 1.0
        self.closed = list[bool]()
        self.table, self.shard, self.ages = SimpleNamespace(name="item"), self, None

    def begin_marking(self) -> None:
        self.marked = 0

    def snapshot(self, since: bool) -> Any:
        count, self.marked = self.marked if since else self.touched, 0
        rows = TableRows(np.arange(count), np.full((count, 1), self.value, "f4"), {})

        def pieces() -> Iterator[TableRows]:
            if not np.isfinite(self.value):
                raise NotFiniteError
            yield from rows.pieces()

        return SimpleNamespace(count=count, pieces=pieces, close=lambda: self.closed.append(True))


class Saves:
    """A server's saver, step by step."""

    def __init__(self, directory: Path) -> None:
        self.rows, self.directory, self.answers = Rows(), directory, list[Any]()
        cluster = SimpleNamespace(
            progress=lambda: None,
            roles=SimpleNamespace(coordinator=0),
            send=lambda rank, kind, said: self.answers.append(said[1]),
        )
        config = SimpleNamespace(snapshot="copy", checkpoint_rows="changed")
        job: Any = SimpleNamespace(cluster=cluster, shards=[Shard(0, 1)], slots=(), config=config)
        tables: Any = [self.rows]
        owned = SimpleNamespace(params=np.zeros(1, "f4"), slots=())
        self.saver = TableSaver(tables, job, owned, 0)

    def wait(self) -> None:
        while not self.answers:
            self.saver.poll()
            time.sleep(0.001)

    def save(self, step: int, marked: int = 0, commit: bool = True) -> ShardRecord:
        """Save a step, before which rows were changed."""
        self.rows.marked = marked
        self.saver.snapshot(step)
        self.saver.write_into(str(begin_step(self.directory, step)))
        self.wait()
        if commit:
            self.saver.committed(step)
        assert self.rows.closed.pop()
        record: ShardRecord = self.answers.pop()[1]
        return record


def test_rows_add_to_the_last_checkpoint_that_was_committed(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    assert saves.save(0).base is None, "the first of a run"
    first, second = saves.save(5, marked=10), saves.save(9, marked=20, commit=False)
    assert (first.base, first.size) == (0, 10)
    assert (second.base, second.size) == (5, 20)
    saves.saver.committed(5)  # as where the shard was taken over meanwhile
    after = saves.save(12, marked=1)
    assert (after.base, after.size) == (None, ROWS), "what was changed may be in none"
    assert saves.save(15, marked=3).base == 12
    assert saves.save(15, marked=3).base is None, "the one before makes way for it"


def test_a_chain_is_short(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    found = [saves.save(step, marked=1).base for step in range(MOST_LINKS + 3)]
    assert found == [None, *range(MOST_LINKS), None, MOST_LINKS + 1]


def test_a_chain_has_fewer_rows_than_the_table_twice(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    sizes = [saves.save(step, marked=400).size for step in range(6)]
    assert sizes == [ROWS, 400, 400, ROWS, 400, 400]
    saves.rows.touched = 0
    assert saves.save(9).base == 5


@pytest.mark.parametrize("why", ["not finite", "no folder", "no space"])
def test_rows_that_are_not_saved_are_let_go(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, folder = Saves(tmp_path), NOWHERE if why == "no folder" else str(begin_step(tmp_path, 3))
    if why == "not finite":
        saves.rows.value = np.inf
    elif why == "no space":
        monkeypatch.setattr("mpips.checkpoint.shards.create_h5", no_space)
    saves.saver.snapshot(3)
    saves.saver.write_into(folder)
    saves.wait()
    (answer,) = saves.answers
    assert answer is None if why == "not finite" else why.replace("no s", "No s") in answer
    assert saves.rows.closed == [True]
    assert not list(tmp_path.rglob("rows-*"))


def no_space(path: Path) -> Any:
    raise OSError(errno.ENOSPC, "")
