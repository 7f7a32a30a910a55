"""A server that dies anywhere in an update: who adopts its shard goes on to the same bits."""

from types import SimpleNamespace
from typing import Any

import fate
import numpy as np
import pytest
from fate import Death

from mpips.kernels.atomics import observe
from mpips.layout import Shard
from mpips.layout.roles import Roles
from mpips.optim import make_rule
from mpips.optim.staleness import Staleness
from mpips.ps import journal, shard
from mpips.ps.client import reader_fields
from mpips.ps.journal import HALVES, Adopted, Journaled, journal_fields
from mpips.ps.shard import Server, server_fields
from mpips.transport.far import BEGUN, COMMITTED
from mpips.transport.push import Push

WORKERS, PUSHES = 2, 3
BLOCK, BLOCKS = 64, 4  # elements, and blocks of a shard: more than halves
N = BLOCK * BLOCKS - 5
BASE = 7  # version that the shard begins with
RULES = {
    "sgd": (make_rule("sgd"), Staleness()),
    "adam": (make_rule("adam"), Staleness()),
    "compensated": (
        make_rule("momentum"),
        Staleness(compensation=0.5, adaptive=True, lower_rate=True),
    ),
    "dropping": (make_rule("momentum"), Staleness(limit=1)),
}


class Memory:
    """The memory of a node, which outlasts a rank."""

    def __init__(self, slots: tuple[str, ...]) -> None:
        fields = server_fields(N, slots, "f8", WORKERS) + journal_fields(N, len(slots), "f8")
        own = {f.name: np.zeros(f.shape, f.dtype) for f in fields}
        self._fields = {1: own}
        for rank in (2, 3):
            self._fields[rank] = {f.name: np.zeros(f.shape, f.dtype) for f in reader_fields(2)}

    def view(self, rank: int, name: str) -> np.ndarray:
        return self._fields[rank][name]


class Fate(fate.Fate):
    """Of a server without tables."""

    def copyto(self, out: np.ndarray, values: np.ndarray) -> None:
        """Die before it, or in the middle of it."""
        for part in (slice(0, out.size // 2), slice(out.size // 2, None)):
            self.passes()
            out[part] = values[part]

    def rule(self, rule: Any) -> Any:
        """Return a rule that may die in the middle of a block."""

        def apply(params: np.ndarray, grad: np.ndarray, slots: Any, step: int, lr: float) -> None:
            half = params.size // 2
            for p in (slice(0, half), slice(half, None)):
                self.passes()
                rule.apply(params[p], grad[p], [slot[p] for slot in slots], step, lr)

        return SimpleNamespace(apply=apply)


def cluster(rank: int) -> Any:
    lost = SimpleNamespace(lost=frozenset())
    roles = Roles((0, 1), (2, 3))
    return SimpleNamespace(
        rank=rank, roles=roles, nodes=1, near=lambda rank: True, failures=lost, wait=_wait
    )


def _wait(ready: Any, what: int) -> None:
    assert ready(), "nobody reads"


def pushes(name: str) -> list[Push]:
    """Return those of both workers in turn; the versions read are older and older."""
    found, rng = [], np.random.default_rng(0)
    for k in range(PUSHES * WORKERS):
        worker, seq = k % WORKERS, k // WORKERS + 1
        grad = rng.normal(size=N)
        origin = rng.normal(size=N) if RULES[name][1].origins else None
        found.append(Push(worker, seq, (0, k, k + 1), 1, 0.0, BASE + k // 2, grad, origin, k))
    return found


def make(kind: type[Server], rank: int, memory: Memory, name: str) -> Any:
    rule, stale = RULES[name]
    args = 1, Shard(0, N), rule, lambda step: 0.1 / step, None, stale
    return kind(cluster(rank), memory, *args)  # type: ignore[arg-type]


def expected(name: str) -> tuple[list[np.ndarray], int]:
    """Return parameters and slots of a server that lives, and its version."""
    memory = Memory(RULES[name][0].slots + RULES[name][1].slots)
    server = make(Server, 1, memory, name)
    server.start_from(BASE)
    for push in pushes(name):
        server.apply(push)
    return [server.params, *server.slots], server.version


def dies(
    fate: Fate,
    memory: Memory,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    hurried: bool = False,
) -> bool:
    """Apply all pushes; returns whether the server has died in one of them."""
    server = make(Journaled, 1, memory, name)
    server.start_from(BASE)
    return dies_in(server, pushes(name), fate, monkeypatch, hurried)


def dies_in(
    server: Any,
    some: list[Push],
    fate: Fate,
    monkeypatch: pytest.MonkeyPatch,
    hurried: bool = False,
) -> bool:
    """Apply some pushes; returns whether the server has died in one of them."""
    with monkeypatch.context() as patch:
        for module in (journal, shard):
            patch.setattr(module, "publish", fate.publish)
        patch.setattr(journal.np, "copyto", fate.copyto)
        kept, server.hurried = server._kept, hurried
        server._kept = [(b._replace(rule=fate.rule(b.rule)), values) for b, values in kept]
        server._blocks = [b._replace(rule=fate.rule(b.rule)) for b in server._blocks]
        try:
            for push in some:
                server.apply(push)
        except Death:
            return True
    return False


@pytest.mark.parametrize("name", [*RULES, "hurried"])
def test_a_death_at_any_moment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adopter goes on with what is not in the ledger, and each push counts once.

    Also where pushes wait, if the shard is one block.
    """
    name, hurried = ("adam", True) if name == "hurried" else (name, False)
    blocks = 1 if hurried else BLOCKS
    monkeypatch.setattr(journal, "UNDO_BYTES", BLOCK * 8 * (BLOCKS // blocks))
    live, version = expected(name)
    all_pushes, moment, continued = pushes(name), 0, 0
    while True:
        memory = Memory(RULES[name][0].slots + RULES[name][1].slots)
        if not dies(Fate(moment), memory, name, monkeypatch, hurried):
            break
        adopted = make(Adopted, 0, memory, name)
        assert adopted.recover(lambda worker, seq: all_pushes[(seq - 1) * WORKERS + worker])
        continued += adopted.continued
        header = memory.view(1, "header")
        assert observe(header, BEGUN) == observe(header, COMMITTED) == adopted.version
        ledger = [observe(adopted.applied, w) for w in range(WORKERS)]
        assert sum(ledger) == adopted.version - BASE
        for push in all_pushes[sum(ledger) :]:
            adopted.apply(push)
        assert adopted.version == version
        for got, wanted in zip((adopted.params, *adopted.slots), live, strict=True):
            np.testing.assert_array_equal(got, wanted, f"death at moment {moment}")
        moment += 1
    assert moment > PUSHES * WORKERS * (3 if name == "dropping" else 4 * blocks)
    assert continued > moment / 4
    assert BLOCKS > HALVES


def rest_of(adopted: Any, all_pushes: list[Push]) -> list[Push]:
    """Return the pushes that are not in the ledger."""
    return all_pushes[sum(observe(adopted.applied, w) for w in range(WORKERS)) :]


@pytest.mark.parametrize("first", range(0, 60, 7))
def test_who_has_adopted_a_shard_dies_as_well(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anywhere in an update of its own; the next one goes on to the same bits."""
    monkeypatch.setattr(journal, "UNDO_BYTES", BLOCK * 8)
    live, version = expected("adam")
    all_pushes, moment, continued = pushes("adam"), 0, 0
    find = lambda worker, seq: all_pushes[(seq - 1) * WORKERS + worker]  # noqa: E731
    while True:
        memory = Memory(RULES["adam"][0].slots)
        assert dies(Fate(first), memory, "adam", monkeypatch)
        adopted = make(Adopted, 0, memory, "adam")
        assert adopted.recover(find)
        fate = Fate(moment)
        if not dies_in(adopted, rest_of(adopted, all_pushes), fate, monkeypatch):
            break
        again = make(Adopted, 0, memory, "adam")
        assert again.recover(find)
        continued += again.continued
        for push in rest_of(again, all_pushes):
            again.apply(push)
        assert again.version == version
        for got, wanted in zip((again.params, *again.slots), live, strict=True):
            np.testing.assert_array_equal(got, wanted, f"deaths at {first} and {moment}")
        moment += 1
    assert continued > moment / 4 > WORKERS


def test_a_death_of_a_server_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no old values: nobody goes on from the middle of an update, else as ever."""
    monkeypatch.setattr(journal, "UNDO_BYTES", BLOCK * 8)
    live, version = expected("adam")
    all_pushes, moment, ends = pushes("adam"), 0, 0
    while True:
        memory = Memory(RULES["adam"][0].slots)
        if not dies(Fate(moment), memory, "adam", monkeypatch, hurried=True):
            break
        moment += 1
        adopted = make(Adopted, 0, memory, "adam")
        header = memory.view(1, "header")
        in_work = observe(header, BEGUN) > observe(header, COMMITTED)
        ends += in_work
        assert adopted.recover(lambda *what: None) is not in_work
        if not in_work:
            for push in all_pushes[sum(observe(adopted.applied, w) for w in range(WORKERS)) :]:
                adopted.apply(push)
            assert adopted.version == version
            for got, wanted in zip((adopted.params, *adopted.slots), live, strict=True):
                np.testing.assert_array_equal(got, wanted)
    assert ends >= 3 * len(all_pushes)
    assert moment - ends >= 2 * len(all_pushes)
