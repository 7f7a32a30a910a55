"""A server that dies anywhere in an update: who takes over its shard goes on to the same bits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fate import BASE, RANKS, WORKERS, Case, Death, Fate, state
from launch import ROOT

from mpips import optim
from mpips.config import Config
from mpips.failover import undo_log
from mpips.failover.undo_log import (
    HALVES,
    recover,
    row_undo_fields,
    undo_log_fields,
    warm,
    warm_rows,
)
from mpips.kernels.atomics import observe
from mpips.layout import Shard
from mpips.layout.tables import Normal, Table, Uniform
from mpips.library.optimizers import SGD, Adagrad, Adam
from mpips.optim import Change, Part, make_rule
from mpips.optim.row_rules import make_row_rule
from mpips.optim.staleness import Staleness
from mpips.planning.tables import JobTable
from mpips.ps import local_pushes, parts
from mpips.ps.design import Design
from mpips.ps.shard import Server, server_fields
from mpips.tables import slot_index
from mpips.tables.server import OwnedRows, table_fields
from mpips.tools.replay.worker_process import Memory
from mpips.transport.push import Push
from mpips.transport.remote_reads import BEGUN, COMMITTED
from mpips.transport.rows import Section
from mpips.transport.wire import Packing

SERVER, PUSHES = 1, 3
BLOCK = 64  # elements of a piece
N = 4 * BLOCK - 5
ADAM = make_rule("adam")
MIXED = Part(0, 100, ADAM, 1.0), Part(100, 150, Change(), 1.0), Part(150, N, ADAM, 0.5)
MEAN = optim.rule_of(Config(optimizer="momentum", ema=0.9))
MIXED_MEAN = (
    *(Part(0, 100, MEAN, 1.0), Part(100, 150, Change(averaged=True), 1.0)),
    Part(150, N, MEAN, 0.5),
)
RULES = {
    **{name: (make_rule(name, weight_decay=0.01), Staleness()) for name in optim.RULES},
    "of a user": (make_rule(f"{ROOT}/jobs/lion_rule.py:Lion"), Staleness()),
    "average": (MEAN, Staleness()),
    "average of statistics": (replace(MEAN, ranges=MIXED_MEAN), Staleness()),
    "statistics": (replace(ADAM, ranges=MIXED), Staleness()),
    "delayed": (make_rule("momentum"), Staleness(compensation=0.5)),
    "compensated": (
        make_rule("momentum"),
        Staleness(compensation=0.5, adaptive=True, lower_rate=True),
    ),
    "dropping": (make_rule("momentum"), Staleness(limit=1)),
}


def job_table(name: str, table: Table, optimizer: Any) -> JobTable:
    return JobTable(name, table, make_row_rule(optimizer), 5, table.rows, lambda step: 0.1 / step)


def tables(scale: int) -> list[JobTable]:
    """Return one that is whole, and one that is lazy, whose index grows a few times."""
    return [
        job_table("whole", Table(400 * scale, 3, Uniform(0.5), capacity="full"), Adagrad()),
        job_table("lazy", Table(90_000 * scale, 2, Normal(0.5), capacity="lazy"), Adam()),
        job_table("small", Table(40, 5, Normal(0.5)), SGD()),
    ]


def case_of(
    name: str, size: int = N, count: int = PUSHES * WORKERS, dtype: str = "f8",
    some: tuple[JobTable, ...] | list[JobTable] = (), most: int = 0,
) -> Case:  # fmt: skip
    """Return a server of a rule, and pushes of both workers in turn, with up to `most` rows.

    The versions that workers have read are older and older.
    """
    rule, stale = RULES[name]
    own = server_fields(size, rule.slots + stale.slots, dtype, WORKERS)
    own += undo_log_fields(size, rule, stale, dtype) + row_undo_fields(some, dtype)
    for table in some:
        own += table_fields(table, 2, SERVER, dtype)
    design = Design([Shard(0, size)] * 2, dtype, rule, lambda step: 0.1 / step, stale)
    pushes, rng = [], np.random.default_rng(0)
    for k in range(count):
        grad = rng.normal(size=size).astype(dtype)
        origin = rng.normal(size=size).astype(dtype) if stale.origins else None
        batch, read = (0, k, k + 1), BASE + k // 2
        push = Push(k % WORKERS, k // WORKERS + 1, batch, 1, 0.0, read, grad, origin, k)
        push.rows = tuple(section(table, most, rng) for table in some)
        pushes.append(push)

    def make(memory: Memory) -> Server:
        place = RANKS, memory, SERVER
        server = Server(*place, design)
        if some:
            server.own(OwnedRows(server, place, some, Packing()))
        return server

    return Case(lambda: Memory({SERVER: own}), make, pushes)


def section(table: JobTable, most: int, rng: np.random.Generator) -> Section:
    owned = table.owned_by(2).count(SERVER)
    size = int(rng.integers(0, min(most, owned)))
    places = np.sort(rng.choice(owned, size, replace=False)).astype(np.int64)
    return Section(places, rng.normal(size=(size, table.dim)))


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of several pieces, in blocks that have more than one, and some pieces a table."""
    monkeypatch.setattr(undo_log, "PIECE_BYTES", BLOCK * 8)
    monkeypatch.setattr(undo_log, "UNDO_BYTES", BLOCK * 8)
    monkeypatch.setattr(undo_log, "ROW_UNDO_BYTES", 1 << 11)
    for module in (undo_log, parts):
        monkeypatch.setattr(module, "BLOCK_BYTES", 3 * BLOCK * 8)
    assert N > HALVES * BLOCK


SIZES = [("adam", 1), ("momentum", BLOCK), ("adam", BLOCK + 1), ("sgd", 3 * BLOCK)]


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(
    ("name", "size", "by_loop"),
    [
        *((name, N, False) for name in RULES),
        *((name, N, True) for name in (*optim.RULES, "average")),
        *((*known, by_loop) for by_loop in (False, True) for known in SIZES),
    ],
)
def test_a_death_at_any_moment(
    name: str, size: int, by_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor goes on with what is not in the ledger, and each push counts once."""
    case, moment, continued = case_of(name, size), 0, 0
    while True:
        memory = case.memory()
        if not case.dies(case.begin(memory), Fate(moment), monkeypatch, by_loop=by_loop):
            break
        taken_over = case.make(memory)
        if moment % 2:  # of a remote worker, which sends its push once more
            under_way = recover(taken_over, lambda worker, seq: None)
            assert (taken_over.resumes is not None) == under_way
        else:
            under_way = recover(taken_over, case.find)
        continued += under_way
        header = memory.view(1, "header")
        assert observe(header, COMMITTED) == taken_over.version
        assert observe(header, BEGUN) == taken_over.version + (taken_over.resumes is not None)
        case.end(taken_over, f"death at moment {moment}")
        assert taken_over.resumes is None
        moment += 1
    pieces = -(-size // BLOCK)
    assert moment > PUSHES * WORKERS * (3 if name == "dropping" else 4 * pieces)
    assert continued > moment / 4


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("name", ["adam", "compensated", "tables"])
def test_who_has_taken_over_a_shard_dies_as_well(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them, a few moments later: as it undoes what is half done, or in an update."""
    case = case_of("adam", 100, 4, some=tables(1), most=600) if name == "tables" else case_of(name)
    moment, continued = 0, 0
    while True:
        memory = case.memory()
        if not case.dies(case.begin(memory), Fate(moment), monkeypatch):
            break
        for later in (moment % 17, moment % 5):
            case.dies(case.make(memory), Fate(later), monkeypatch, takes_over=True)
        server = case.make(memory)
        continued += recover(server, case.find)
        case.end(server, f"death at moment {moment}")
        moment += 1
    assert moment > (200 if name == "tables" else 60)
    assert continued > moment / 4


def test_a_death_among_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one the rows are taken over as they are; in the midst of one nobody goes on."""
    some = [job_table("lazy", Table(90_000, 2, Normal(0.5), evict_after=1), Adam())]
    case = case_of("adam", 100, 4, some=some, most=600)
    memory = case.memory()
    server = case.begin(memory)
    assert server.rows is not None
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
    taken_over: Any = case.make(memory)
    assert taken_over.rows.whole
    recover(taken_over, case.find)
    for got, wanted in zip(state(taken_over), state(server), strict=True):
        np.testing.assert_array_equal(got, wanted, "behind an eviction")

    def death(*args: Any) -> None:
        raise Death

    monkeypatch.setattr(slot_index.row_eviction, "free_lines", death)
    with pytest.raises(Death):
        taken_over.rows.epochs_over(3, [2, 2])
    again: Any = case.make(memory)
    assert not again.rows.whole


@pytest.mark.parametrize(
    ("name", "by_loop"), [("adam", False), ("adam", True), ("compensated", False)]
)
def test_processes_that_are_killed(name: str, by_loop: bool) -> None:
    """By the kernel, in compiled loops too; who takes over the shard is killed next."""
    warm(RULES[name][0], "f4")
    local_pushes.warm(RULES[name][0], "f4")
    case_of(name, (1 << 18) + 77, 40, "f4").kill_until(3, 3e-3, by_loop)


def test_processes_with_tables_that_are_killed() -> None:
    some = tables(40)
    for table in some:
        warm_rows(table.table, table.rule, "f8")
    case_of("adam", 100, 60, some=some, most=12_000).kill_until(10, 6e-3)
