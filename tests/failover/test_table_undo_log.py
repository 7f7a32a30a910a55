"""A server with tables that is killed anywhere.

Who takes over its rows goes on to the same bits.
"""

from types import SimpleNamespace
from typing import Any

import fate
import numpy as np
import pytest
from fate import BASE, RANKS, WORKERS, Case, Death

from mpips.failover import undo_log
from mpips.failover.undo_log import recover, row_undo_fields, undo_log_fields, warm_rows
from mpips.kernels import rows
from mpips.layout import Shard
from mpips.layout.tables import Normal, Table, Uniform
from mpips.library.optimizers import SGD, Adagrad, Adam
from mpips.optim import make_rule
from mpips.optim.row_rules import make_row_rule
from mpips.planning.tables import JobTable
from mpips.ps.design import Design
from mpips.ps.shard import FRESH, Server, server_fields
from mpips.tables import slot_index
from mpips.tables.server import OwnedRows, table_fields
from mpips.tools.replay.worker_process import Memory
from mpips.transport.push import Push
from mpips.transport.rows import Section
from mpips.transport.wire import Packing

SERVER, N = 1, 100
RULE = make_rule("adam")


def job_table(name: str, table: Table, optimizer: Any) -> JobTable:
    return JobTable(name, table, make_row_rule(optimizer), 5, table.rows, lambda step: 0.1 / step)


def tables(scale: int) -> list[JobTable]:
    """Return one that is whole, and one that is lazy, whose index grows a few times."""
    return [
        job_table("whole", Table(400 * scale, 3, Uniform(0.5), capacity="full"), Adagrad()),
        job_table("lazy", Table(90_000 * scale, 2, Normal(0.5), capacity="lazy"), Adam()),
        job_table("small", Table(40, 5, Normal(0.5)), SGD()),
    ]


def case_of(some: list[JobTable], count: int, most: int) -> Case:
    """Return a server with tables, and pushes of up to so many rows."""
    own = server_fields(N, RULE.slots, "f8", WORKERS) + undo_log_fields(N, RULE, FRESH, "f8")
    for table in some:
        own += table_fields(table, 2, SERVER, "f8")
    own += row_undo_fields(some, "f8")

    def make(memory: Memory) -> Server:
        place = RANKS, memory, SERVER
        design = Design([Shard(0, N)] * (SERVER + 1), "f8", RULE, lambda step: 0.1 / step)
        server = Server(*place, design)
        server.own(OwnedRows(server, place, some, Packing()))
        return server

    return Case(lambda: Memory({1: own}), make, pushes(some, count, most), state)


def pushes(some: list[JobTable], count: int, most: int) -> list[Push]:
    """Return those of both workers in turn."""
    found, rng = [], np.random.default_rng(0)
    for k in range(count):
        sections = []
        for table in some:
            rows_here = table.owned_by(2).count(SERVER)
            size = int(rng.integers(0, min(most, rows_here)))
            places = np.sort(rng.choice(rows_here, size, replace=False)).astype(np.int64)
            sections.append(Section(places, rng.normal(size=(size, table.dim))))
        worker, seq = k % WORKERS, k // WORKERS + 1
        push = Push(worker, seq, (0, k, k + 1), 1, 0.0, BASE + k, rng.normal(size=N), None, k)
        push.rows = tuple(sections)
        found.append(push)
    return found


def state(server: Any) -> list[np.ndarray]:
    """Return all that a server owns, in the order of rows, of which each has one line."""
    found = [server.params.copy(), *(slot.copy() for slot in server.slots)]
    for served in server.rows.tables:
        saved, touched = served.changed_rows(), served.shard.touched
        assert touched == len(saved.rows) == len(set(saved.rows.tolist()))
        if served.table.table.lazy:
            header, index, _ = served.shard._memory[rows.HEADER :]
            size = 1 << int(header[rows.BITS])
            assert np.count_nonzero(index[size : 2 * size]) == touched
        order = np.argsort(saved.rows)
        found += [array[order] for array in saved.arrays.values()]
    return found


class Fate(fate.Fate):
    """Of a server with tables."""

    def keep(self, slot: Any, lines: Any, stripes: Any, kept: Any, touched: Any) -> None:
        """Die before it, or in the middle of it."""
        self.passes()
        half = len(slot) // 2
        rows.keep(slot[:half], lines, stripes, kept[:half], touched[:half])
        self.passes()
        rows.keep(slot, lines, stripes, kept, touched)

    def loop(self, loop: Any) -> Any:
        """Return one that may die before it, between two rows, and in the middle of a row."""

        def apply(slot: Any, local: Any, grads: Any, lines: Any, stripes: Any, *rest: Any) -> None:
            half = len(slot) // 2
            self.passes()
            loop(slot[:half], local[:half], grads[:half], lines, stripes, *rest)
            self.passes()
            if half < len(slot):
                before, at = lines[slot[half]].copy(), slot[half] // rows.STRIPE
                word = stripes[at]
                stripes[at] |= rows.WRITING
                lines[slot[half], ::2] = np.nan
                self.passes()
                lines[slot[half]], stripes[at] = before, word
            loop(slot[half:], local[half:], grads[half:], lines, stripes, *rest)

        return apply

    def take_lines(
        self, local: Any, first: int, header: Any, index: Any, keys: Any, slot: Any
    ) -> int:
        """Die in the middle of it, a line given that the index does not have yet."""
        self.passes()
        count = int(header[rows.COUNT])
        half = max(first, len(local) // 2)
        done = rows.take_lines(local[:half], first, header, index, keys, slot[:half])
        if header[rows.COUNT] > count:
            size = 1 << int(header[rows.BITS])
            lines = index[size : 2 * size] & ((1 << int(header[rows.LINE_BITS])) - 1)
            (at,) = np.flatnonzero(lines == header[rows.COUNT])
            entry = index[size + at]
            index[size + at] = 0
            self.passes()
            index[size + at] = entry
        if done < half:
            return int(done)
        return int(rows.take_lines(local, done, header, index, keys, slot))

    def fill_index(self, bits: int, header: Any, index: Any, keys: Any) -> None:
        """Die in the middle of it."""
        count, size = int(header[rows.COUNT]), 1 << bits
        self.passes()
        index[size : size + 50] = np.arange(1, 51)
        self.passes()
        index[size : size + 50] = 0
        rows.fill_index(bits, header, index, keys)
        assert count == header[rows.COUNT]
        self.passes()

    def patch(self, patch: pytest.MonkeyPatch, server: Server) -> None:
        """Have a server die in whatever it does to its rows, too."""
        super().patch(patch, server)
        own = {"take_lines": self.take_lines, "fill_index": self.fill_index}
        keeping = SimpleNamespace(keep=self.keep, put_back=rows.put_back)
        patch.setattr(undo_log, "rows", keeping)
        patch.setattr(slot_index, "rows", SimpleNamespace(**vars(rows) | own))
        for served in server.rows.tables:
            rule = served.shard.rule
            patch.setitem(rule.__dict__, "loop", self.loop(rule.loop))


def test_a_death_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each push counts once; and who takes over it dies as well, a few moments later."""
    monkeypatch.setattr(undo_log, "ROW_UNDO_BYTES", 1 << 11)  # some pieces a table
    monkeypatch.setattr(undo_log, "PIECE_BYTES", 1 << 9)  # two pieces
    case, moment, continued = case_of(tables(1), 4, 600), 0, 0
    while True:
        memory = case.memory()
        if not case.dies(case.begin(memory), Fate(moment), monkeypatch):
            break
        for later in (moment % 17, moment % 5):
            server = case.make(memory)
            continued += recover(server, case.find)
            if not case.dies(server, Fate(later), monkeypatch):
                break
        else:
            server = case.make(memory)
            recover(server, case.find)
        case.end(server, f"death at moment {moment}")
        moment += 1
    assert moment > 200
    assert continued > moment


def test_a_death_among_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one the rows are taken over as they are; in the midst of one nobody goes on."""
    some = [job_table("lazy", Table(90_000, 2, Normal(0.5), evict_after=1), Adam())]
    case = case_of(some, 4, 600)
    memory = case.memory()
    server = case.begin(memory)
    for push, epoch in zip(case.pushes, (0, 0, 1, 1), strict=True):
        push.batch = (epoch, 0, 1)
        server.rows.epochs_over(epoch, [epoch, epoch])
        server.apply(push)
    before = server.rows.changed["lazy"]
    server.rows.epochs_over(2, [2, 3])  # a push is still to come
    assert server.rows.changed["lazy"] == before
    server.rows.epochs_over(2, [2, 2])
    pushed = {row for push in case.pushes[2:] for row in push.rows[0].places.tolist()}
    assert server.rows.changed["lazy"] == len(pushed) < before
    taken_over = case.make(memory)
    assert taken_over.rows.whole
    recover(taken_over, case.find)
    for got, wanted in zip(state(taken_over), state(server), strict=True):
        np.testing.assert_array_equal(got, wanted, "behind an eviction")

    def death(*args: Any) -> None:
        raise Death

    monkeypatch.setattr(slot_index.row_eviction, "free_lines", death)
    with pytest.raises(Death):
        taken_over.rows.epochs_over(3, [2, 2])
    assert not case.make(memory).rows.whole


def test_processes_that_are_killed() -> None:
    """By the kernel, in compiled loops too; who takes over the rows is killed next."""
    some = tables(40)
    for table in some:
        warm_rows(table.table, table.rule, "f8")
    case_of(some, 60, 12_000).kill_until(10, 6e-3)
