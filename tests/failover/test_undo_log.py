"""A server that dies anywhere in an update: who takes over its shard goes on to the same bits."""

from dataclasses import replace
from typing import Any

import fate
import numpy as np
import pytest
from fate import BASE, RANKS, WORKERS, Case
from launch import ROOT

from mpips import optim
from mpips.config import Config
from mpips.failover import undo_log
from mpips.failover.undo_log import HALVES, recover, undo_log_fields, warm
from mpips.kernels import rule_loops
from mpips.kernels.atomics import observe
from mpips.kernels.rule_loops import dense
from mpips.layout import Shard
from mpips.optim import Change, Part, make_rule
from mpips.optim.staleness import Staleness
from mpips.ps import local_pushes, parts
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


def case_of(name: str, size: int = N, rounds: int = PUSHES, dtype: str = "f8") -> Case:
    """Return a server of a rule; the versions that workers have read are older and older."""
    rule, stale = RULES[name]
    own = server_fields(size, rule.slots + stale.slots, dtype, WORKERS)
    own += undo_log_fields(size, rule, stale, dtype)
    design = Design([Shard(0, size)] * 2, dtype, rule, lambda step: 0.1 / step, stale)
    pushes, rng = [], np.random.default_rng(0)
    for k in range(rounds * WORKERS):
        grad = rng.normal(size=size).astype(dtype)
        origin = rng.normal(size=size).astype(dtype) if stale.origins else None
        batch, read = (0, k, k + 1), BASE + k // 2
        pushes.append(Push(k % WORKERS, k // WORKERS + 1, batch, 1, 0.0, read, grad, origin, k))

    def make(memory: Memory) -> Server:
        return Server(RANKS, memory, 1, design)

    def state(server: Server) -> list[np.ndarray]:
        return [server.params, *server.slots]

    return Case(lambda: Memory({1: own}), make, pushes, state)


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

    def patch(self, patch: pytest.MonkeyPatch, server: Server) -> None:
        """Have a server die in whatever it does to its shard."""
        super().patch(patch, server)
        patch.setattr(rule_loops, "publish", self.publish)
        patch.setattr(undo_log.np, "copyto", self.copyto)
        for rule in {type(rule) for rule, _ in RULES.values()}:
            patch.setattr(rule, "loop", property(lambda own: self.loop(dense(own.kernel))))


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
    case, moment, continued = case_of(name), 0, 0
    while True:
        memory = case.memory()
        assert case.dies(case.begin(memory), Fate(first), monkeypatch)
        if not case.dies(case.make(memory), Fate(moment), monkeypatch, takes_over=True):
            break
        again = case.make(memory)
        continued += recover(again, case.find)
        case.end(again, f"deaths at {first} and {moment}")
        moment += 1
    assert continued > moment / 4 > WORKERS


@pytest.mark.parametrize(
    ("name", "by_loop"), [("adam", False), ("adam", True), ("compensated", False)]
)
def test_processes_that_are_killed(name: str, by_loop: bool) -> None:
    """By the kernel, in compiled loops too; who takes over the shard is killed next."""
    warm(RULES[name][0], "f4")
    local_pushes.warm(RULES[name][0], "f4")
    case_of(name, (1 << 18) + 77, 20, "f4").kill_until(3, 3e-3, by_loop)
