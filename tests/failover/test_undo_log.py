"""A server that dies anywhere in an update: who takes over its shard goes on to the same bits."""

import random
from dataclasses import replace
from typing import Any

import fate
import numpy as np
import pytest
from fate import BASE, RANKS, WORKERS, Death, apply_all, finder, killed, rest_of
from launch import ROOT

from mpips import optim
from mpips.config import Config
from mpips.failover import undo_log
from mpips.failover.undo_log import HALVES, keep_undo, recover, undo_log_fields, warm
from mpips.kernels import rule_loops
from mpips.kernels.atomics import observe
from mpips.kernels.rule_loops import dense
from mpips.layout import Shard
from mpips.optim import Change, Part, make_rule
from mpips.optim.staleness import Staleness
from mpips.ps import local_pushes, parts, shard
from mpips.ps.design import Design
from mpips.ps.shard import Server, server_fields
from mpips.tools.replay.worker_process import Memory
from mpips.transport.push import Push
from mpips.transport.remote_reads import BEGUN, COMMITTED

PUSHES = 3
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


def memory_of(name: str, size: int = N, dtype: str = "f8") -> Memory:
    """Return the memory of a server, which processes share and which outlasts a rank."""
    rule, stale = RULES[name]
    own = server_fields(size, rule.slots + stale.slots, dtype, WORKERS)
    return Memory({1: own + undo_log_fields(size, rule, stale, dtype)})


class Fate(fate.Fate):
    """Of a server without tables."""

    def copyto(self, out: np.ndarray, values: np.ndarray) -> None:
        """Die before it, or in the middle of it."""
        for part in (slice(0, out.size // 2), slice(out.size // 2, None)):
            self.passes()
            out[part] = values[part]

    def copy(self, values: np.ndarray, kept: np.ndarray) -> None:
        self.copyto(kept[: values.size], values)

    def calls(self, step: Any) -> dict[str, Any]:
        """See `fate.Fate.calls`; it may die in a copy and in the update of a piece, too."""
        return {**super().calls(step), "copy": self.copy, "apply": self.loop(dense(step))}

    def loop(self, loop: Any) -> Any:
        """Return a rule's loop that may die in the middle of a piece."""

        def apply(*args: Any) -> None:
            for part in (slice(0, args[0].size // 2), slice(args[0].size // 2, None)):
                self.passes()
                loop(*(arg[part] if isinstance(arg, np.ndarray) else arg for arg in args))

        return apply

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Have a server die in whatever it does to its shard."""
        for module in (undo_log, shard, rule_loops):
            patch.setattr(module, "publish", self.publish)
        patch.setattr(undo_log.np, "copyto", self.copyto)
        self.patch_pieces(patch)
        for rule in {type(rule) for rule, _ in RULES.values()}:
            patch.setattr(rule, "loop", property(lambda own: self.loop(dense(own.kernel))))


def pushes(name: str, size: int = N, rounds: int = PUSHES, dtype: str = "f8") -> list[Push]:
    """Return those of both workers in turn; the versions read are older and older."""
    found, rng = [], np.random.default_rng(0)
    for k in range(rounds * WORKERS):
        worker, seq = k % WORKERS, k // WORKERS + 1
        grad = rng.normal(size=size).astype(dtype)
        origin = rng.normal(size=size).astype(dtype) if RULES[name][1].origins else None
        found.append(Push(worker, seq, (0, k, k + 1), 1, 0.0, BASE + k // 2, grad, origin, k))
    return found


def make(memory: Memory, name: str, undo: bool = True) -> Server:
    """Return what serves a shard, and by default keeps what another server needs to go on."""
    (rule, stale), shard = RULES[name], Shard(0, memory.view(1, "params").size)
    design = Design(
        [shard] * 2, memory.view(1, "params").dtype.name, rule, lambda step: 0.1 / step, stale
    )
    server = Server(RANKS, memory, 1, design)
    if undo:
        keep_undo(server, memory, 1)
    return server


def begin(memory: Memory, name: str, undo: bool = True) -> Server:
    """Return a server that begins with a shard."""
    server = make(memory, name, undo)
    server.start_from(BASE)
    return server


def vectors(server: Any) -> list[np.ndarray]:
    """Return all that a server owns."""
    return [server.params, *server.slots]


def expected(name: str, memory: Memory, some: list[Push]) -> tuple[list[np.ndarray], int]:
    """Return what a server has that lives, and keeps nothing, and its version."""
    server = begin(memory, name, undo=False)
    for push in some:
        server.apply(push)
    return vectors(server), server.version


def same(server: Any, wanted: tuple[list[np.ndarray], int], why: str) -> None:
    assert server.version == wanted[1], why
    for got, live in zip(vectors(server), wanted[0], strict=True):
        np.testing.assert_array_equal(got, live, why)


def dies(
    server: Any,
    some: list[Push],
    fate: Fate,
    monkeypatch: pytest.MonkeyPatch,
    takes_over: bool = False,
    by_loop: bool = False,
) -> bool:
    """Apply what is not in the ledger, taking over if asked; returns whether it has died."""
    with monkeypatch.context() as patch:
        fate.patch(patch)
        try:
            if takes_over:
                recover(server, finder(some))
            apply_all(server, rest_of(server, some), by_loop)
        except Death:
            return True
    return False


SIZES = [("adam", 1), ("momentum", BLOCK), ("adam", BLOCK + 1), ("sgd", 3 * BLOCK)]


@pytest.mark.parametrize(
    ("name", "size", "by_loop"),
    [
        *((name, N, False) for name in RULES),
        *((name, N, True) for name in (*optim.RULES, "average")),
        *((*known, False) for known in SIZES),
        *((*known, True) for known in SIZES),
    ],
)
def test_a_death_at_any_moment(
    name: str, size: int, by_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor goes on with what is not in the ledger, and each push counts once."""
    cut(monkeypatch)
    all_pushes, moment, continued = pushes(name, size), 0, 0
    live = expected(name, memory_of(name, size), all_pushes)
    while True:
        memory = memory_of(name, size)
        server = begin(memory, name)
        if not dies(server, all_pushes, Fate(moment), monkeypatch, by_loop=by_loop):
            break
        taken_over = make(memory, name)
        if moment % 2:  # of a remote worker, which sends its push once more
            under_way = recover(taken_over, lambda worker, seq: None)
            assert (taken_over.resumes is not None) == under_way
        else:
            under_way = recover(taken_over, finder(all_pushes))
        continued += under_way
        header = memory.view(1, "header")
        assert observe(header, COMMITTED) == taken_over.version
        assert observe(header, BEGUN) == taken_over.version + (taken_over.resumes is not None)
        rest = rest_of(taken_over, all_pushes)
        for push in rest:
            taken_over.apply(push)
        assert taken_over.resumes is None
        same(taken_over, live, f"death at moment {moment}")
        moment += 1
    pieces = -(-size // BLOCK)
    assert moment > PUSHES * WORKERS * (3 if name == "dropping" else 4 * pieces)
    assert continued > moment / 4


def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have shards of several pieces, in blocks that have more than one."""
    monkeypatch.setattr(undo_log, "PIECE_BYTES", BLOCK * 8)
    monkeypatch.setattr(undo_log, "UNDO_BYTES", BLOCK * 8)
    for module in (undo_log, parts):
        monkeypatch.setattr(module, "BLOCK_BYTES", 3 * BLOCK * 8)
    assert N > HALVES * BLOCK


@pytest.mark.parametrize("first", range(0, 60, 13))
@pytest.mark.parametrize("name", ["adam", "compensated"])
def test_who_has_taken_over_a_shard_dies_as_well(
    name: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it undoes what is half done, or in an update; the next one goes on to the same bits."""
    cut(monkeypatch)
    all_pushes, moment, continued = pushes(name), 0, 0
    live = expected(name, memory_of(name), all_pushes)
    while True:
        memory = memory_of(name)
        assert dies(begin(memory, name), all_pushes, Fate(first), monkeypatch)
        taken_over = make(memory, name)
        if not dies(taken_over, all_pushes, Fate(moment), monkeypatch, takes_over=True):
            break
        again = make(memory, name)
        continued += recover(again, finder(all_pushes))
        for push in rest_of(again, all_pushes):
            again.apply(push)
        same(again, live, f"deaths at {first} and {moment}")
        moment += 1
    assert continued > moment / 4 > WORKERS


@pytest.mark.parametrize(
    ("name", "by_loop"), [("adam", False), ("adam", True), ("compensated", False)]
)
def test_processes_that_are_killed(name: str, by_loop: bool) -> None:
    """By the kernel, in compiled loops too; who takes over the shard is killed next."""
    size, chance, deaths, continued, most_s = (1 << 18) + 77, random.Random(3), 0, 0, 3e-3
    all_pushes = pushes(name, size, 20, "f4")
    live = expected(name, memory_of(name, size, "f4"), all_pushes)
    while continued <= 3:
        memory = memory_of(name, size, "f4")
        server = begin(memory, name)
        warm(server.dense.rule, "f4")
        local_pushes.warm(server.dense.rule, "f4")
        while rest := rest_of(server, all_pushes):
            deaths += killed(server, rest, chance, most_s, by_loop)
            server = make(memory, name)
            continued += recover(server, finder(all_pushes))
            most_s = 3e-3 if len(rest_of(server, all_pushes)) < len(rest) else 1.5 * most_s
        same(server, live, "after all deaths")
        assert deaths < 1000, "and hardly any of them in an update"
    assert deaths >= continued
