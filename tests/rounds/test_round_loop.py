"""A node's round as one loop: late ranks, the bits of an update by calls, and sums of reports."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import ROOT, python

import mpips
from mpips import optim
from mpips.config import Config
from mpips.errors import UserError
from mpips.failover.undo_log import HALVES
from mpips.health import status_board
from mpips.kernels import cache
from mpips.kernels.atomics import publish
from mpips.kernels.exchange import NUMBER_BITS, PIECE
from mpips.kernels.vectors import addresses_of
from mpips.layout import Shard, cut, fragment_shards
from mpips.optim import Change, Part, Rule, make_rule
from mpips.rounds.averaging import Average, SlowMomentum
from mpips.rounds.base import DIGIT, SIGNALS, Report, ShardUpdate, first_reported, report_one
from mpips.rounds.node import TURN, NodeBarrier
from mpips.rounds.survivable import SliceUpdate

BEGIN, END, STEP, FACTOR = 7, 3001, 4, 0.5
ADAM = replace(make_rule("adam", weight_decay=0.01), before=3)
WEIGHTS = np.array([0.25, 0.75])
MINE, OTHER = Report(1.5, signals=1.0), Report(2.0, checkpoint=1.0)


class Node:
    """Memory of a node of two ranks, and rank 0; rank 1 arrives as rank 0 begins to wait.

    Args:
        rule: The rule of the shard that rank 0 owns.
        arrived: Number of barriers that rank 1 has reached before.
        arrives: Number of barriers that it reaches at each wait.
    """

    def __init__(self, rule: Rule, arrived: int = 2, arrives: int = 1) -> None:
        rng = np.random.default_rng(1)
        self.live = rng.random((1 + len(rule.slots), END - BEGIN)).astype("f4")
        self.grads, self.gradient = rng.normal(size=(2, 2, END)).astype("f4")
        self.headers, self.reports = np.zeros((2, 8), np.int64), np.zeros((2, 8))
        self.waits, self._arrives = list[int](), arrives
        cluster: Any = SimpleNamespace(
            rank=0, my_node=(0, 1), nodes=1, ranks_per_core=1, wait=self._wait
        )
        job: Any = SimpleNamespace(cluster=cluster, rate=lambda: lambda step: 0.1 / step)
        self.transfers: Any = SimpleNamespace(waited_s=0.0, busy_s=0.0)
        fields: dict[str, Any] = {"header": self.headers, "report": self.reports}
        window: Any = SimpleNamespace(view=lambda rank, name: fields[name][rank])
        self.barrier = NodeBarrier(cluster, window, self.transfers)
        params, *slots = self.live
        args = rule, params, tuple(slots), np.zeros(700, "f4"), self.transfers
        self.update = ShardUpdate(job, Shard(BEGIN, END), *args)
        self.rows = addresses_of([*self.grads])
        self.grads[1] = np.nan
        if arrived:
            self._arrive(arrived)

    def _arrive(self, turn: int) -> None:
        self.grads[1], self.reports[1] = self.gradient[1], OTHER
        publish(self.headers[1], TURN, turn)

    def _wait(self, ready: Callable[[], bool], what: int) -> float:
        assert not ready()
        self.waits.append(what)
        self._arrive(int(self.headers[1, TURN]) + self._arrives)
        assert ready()
        return 100.0

    def by_calls(self) -> np.ndarray:
        """Return parameters and slots after the update, by calls of `ShardUpdate`."""
        before = self.live.copy()
        self.grads[1] = self.gradient[1]
        self.update.apply(STEP, FACTOR, (self.rows, WEIGHTS))
        found = self.live.copy()
        self.live[:] = before
        return found

    def by_loop(self) -> Report:
        """Make the round by one loop."""
        args: Any = self.update.arguments(self.rows)
        made = self.barrier.round_of(*args)
        return made(MINE, WEIGHTS, self.update.rates(STEP, FACTOR))


@pytest.mark.parametrize(
    ("arrived", "arrives", "waits"), [(2, 1, 0), (1, 1, 1), (0, 2, 1), (0, 1, 2)]
)
def test_a_round_waits_for_a_late_rank_at_either_barrier(
    arrived: int, arrives: int, waits: int
) -> None:
    node, expected = Node(ADAM, arrived, arrives), Node(ADAM).by_calls()
    assert node.by_loop() == Report(3.5, checkpoint=1.0, signals=1.0)
    assert node.live.tobytes() == expected.tobytes()
    assert node.waits == [status_board.ROUND] * waits
    assert node.barrier.turn == node.headers[0, TURN] == 2
    assert 100 * waits < node.transfers.waited_s < 100 * waits + 60
    assert node.transfers.busy_s > 0


@pytest.mark.parametrize(
    ("begin", "end", "scale"), [(0, END, 1.0), (0, END, 0.5), (0, 2000, 1.0), (100, END, 2.0)]
)
def test_a_loop_updates_what_the_calls_update(begin: int, end: int, scale: float) -> None:
    """Of a range that begins or ends within the shard, with the rate of its group."""
    node = Node(replace(ADAM, ranges=(Part(begin, end, ADAM, scale),)))
    expected, before = node.by_calls(), node.live.copy()
    node.by_loop()
    assert node.live.tobytes() == expected.tobytes()
    changed = np.flatnonzero((node.live != before).all(axis=0)) + BEGIN
    assert (changed[0], changed[-1]) == (max(begin, BEGIN), end - 1)


@pytest.mark.parametrize(
    "rule",
    [
        Average(),
        replace(ADAM, ranges=(Part(0, 50, ADAM, 1.0), Part(60, END, ADAM, 1.0))),
        replace(ADAM, ranges=(Part(0, BEGIN, ADAM, 1.0),)),
        make_rule(f"{ROOT}/jobs/muon.py:Muon"),
    ],
    ids=["no loop", "two ranges", "nothing", "whole arrays"],
)
def test_other_updates_are_not_one_loop(rule: Rule) -> None:
    assert Node(rule).update.arguments(np.zeros(0, np.int64)) is None


class Raises(mpips.UpdateRule):
    lr: float = 0.1

    @staticmethod
    def step(w: float, g: float, /, lr: float) -> tuple[float]:
        if g > 100:
            raise ValueError("too large")
        return (w - lr * g,)


def test_a_rule_that_may_raise_is_refused() -> None:
    """A round is not half made."""
    with pytest.raises(UserError, match=r"step of .*, which may raise, expected numbers for any"):
        make_rule(Raises().options()["optimizer"])


def test_the_loop_of_an_outer_step_is_loaded_before_training(tmp_path: Path) -> None:
    """Not in the first round, in which the others wait for the rank that compiles it."""
    place = cache.folder()
    assert place is not None
    folder = tmp_path / "mpips" / place.name
    folder.mkdir(parents=True)
    for file in place.glob("*.o"):
        if not file.name.startswith("bundle-"):
            (folder / file.name).symlink_to(file)
    words = "--mode local_sgd --local-steps 2 --outer-momentum 0.5 --optimizer sgd --steps 2"
    args = [*words.split(), "--eval-every", "0", "--out", "out"]
    python("-m", "mpips.train", *args, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    (bundle,) = folder.glob("bundle-*")
    assert b'"slow_momentum_round-' in bundle.read_bytes()


@given(size=st.integers(0, 5000), owners=st.integers(1, 5), fragments=st.integers(1, 6))
def test_fragments_are_equal_parts_of_every_shard(size: int, owners: int, fragments: int) -> None:
    shards = cut(size, owners)
    found = fragment_shards(shards, fragments, 4)
    assert len(found) == fragments
    for owner, shard in enumerate(shards):
        parts = [fragment[owner] for fragment in found]
        ends = [shard.begin, *(part.end for part in parts)]
        assert [part.begin for part in parts] == ends[:-1]
        assert ends[-1] == shard.end
        sizes = [part.size for part in parts]
        assert max(sizes) - min(sizes) <= 32  # lines of 16, the last one perhaps a part of one


@pytest.mark.parametrize("ranks", [1, 2, DIGIT - 1])
def test_the_first_signal_that_came_is_read_off_the_sum(ranks: int) -> None:
    for k, name in enumerate(SIGNALS):
        later = sum(ranks * report_one(SIGNALS, other) for other in SIGNALS[k:])
        assert float(int(later)) == later
        assert first_reported(SIGNALS, later) == name
        assert first_reported(SIGNALS, ranks * report_one(SIGNALS, name)) == name
    assert first_reported(SIGNALS, 0.0) == ""


# Slices: an owner dies anywhere in an update, and who completes it gets the same bits ------------

SIZE = 64  # elements of a piece
N = 3 * SIZE + 5
MEAN = optim.rule_of(Config(optimizer="adam", ema=0.9))
WHOLE = make_rule(f"{ROOT}/jobs/muon.py:Muon")
RULES = {
    "sgd": make_rule("sgd"),
    "adam": make_rule("adam", weight_decay=0.01),
    "mean": MEAN,
    "statistics": replace(
        MEAN,
        ranges=(
            Part(0, 100, MEAN, 1.0),
            Part(100, 180, Change(averaged=True), 1.0),
            Part(180, BEGIN + N, MEAN, 0.5),
        ),
    ),
    "average": Average(),
    "outer": SlowMomentum(nesterov=True),
    "whole": replace(
        WHOLE,
        ranges=(
            Part(BEGIN, BEGIN + 120, WHOLE.of_array("a", (12, 10)), 1.0),
            Part(BEGIN + 120, BEGIN + N, WHOLE.of_array("b", (N - 120, 1)), 1.0),
        ),
    ),
}


class Memory:
    """What the ranks of a node share of a slice, and two gradients."""

    def __init__(self, rule: Rule) -> None:
        rng = np.random.default_rng(1)
        self.rule, size = rule, N if rule.whole else SIZE
        self.live = rng.random((1 + len(rule.slots), N))
        self.old, self.words = np.zeros((HALVES, len(self.live), size)), np.zeros(8, np.int64)
        self.grads = rng.normal(size=(2, BEGIN + N))

    def update(self, nodes: int = 1) -> None:
        """Make update `STEP`, as any rank may."""
        cluster = SimpleNamespace(nodes=nodes, progress=lambda: None)
        job: Any = SimpleNamespace(cluster=cluster, rate=lambda: lambda step: 0.1 / step)
        params, *slots = self.live
        transfers: Any = SimpleNamespace(busy_s=0.0)
        args = self.rule, params, tuple(slots), np.zeros(self.old.shape[2]), transfers
        update = SliceUpdate(self.old, self.words, job, Shard(BEGIN, BEGIN + N), *args)
        update.apply(STEP, 1.0, (addresses_of([*self.grads]), np.array([0.25, 0.75])))

    def pieces(self) -> list[tuple[int, int]]:
        """Return where they begin and end."""
        found = [0]
        for part in self.rule.parts(BEGIN, BEGIN + N):
            size = part.end - part.begin if self.rule.whole else SIZE
            found += range(part.begin - BEGIN + size, part.end - BEGIN, size)
            found.append(part.end - BEGIN)
        return [*pairwise(found)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("nodes", [1, 2])
def test_an_update_is_completed_from_any_piece(name: str, nodes: int) -> None:
    whole = Memory(RULES[name])
    before = whole.live.copy()
    whole.update(nodes)
    assert not np.array_equal(whole.live[0], before[0])
    assert len(whole.pieces()) > 1
    for number, (begin, end) in enumerate(whole.pieces()):
        for noted in (True, False):  # and half changed, or about to be
            left = Memory(RULES[name])
            left.live[:, :begin] = whole.live[:, :begin]
            kept = left.old[number % HALVES]
            kept[:] = np.nan
            if noted:
                kept[:, : end - begin] = before[:, begin:end]
                left.live[:, begin : begin + (end - begin) // 2] = np.nan
                left.old[(number + 1) % HALVES] = np.nan
            elif number:
                last = whole.pieces()[number - 1]
                left.old[(number - 1) % HALVES, :, : last[1] - last[0]] = before[:, slice(*last)]
            last_noted = (STEP << NUMBER_BITS) + number - (not noted)
            publish(left.words, PIECE, last_noted if noted or number else STEP - 1 << NUMBER_BITS)
            left.update(nodes)
            np.testing.assert_array_equal(left.live, whole.live, f"piece {number}, {noted=}")
            left.update(nodes)  # once more, as who completes it may die too
            np.testing.assert_array_equal(left.live, whole.live)


@pytest.mark.parametrize("name", RULES)
def test_it_is_what_an_update_is_that_keeps_nothing(name: str) -> None:
    kept, plain = Memory(RULES[name]), Memory(RULES[name])
    kept.update()
    params, *slots = plain.live
    grad = np.array([0.25, 0.75]) @ plain.grads
    for begin, end, rule, scale in plain.rule.parts(BEGIN, BEGIN + N):
        part = slice(begin - BEGIN, end - BEGIN)
        views = params[part], grad[begin:end], tuple(slot[part] for slot in slots)
        rule.apply(*views, STEP, 0.1 / STEP * scale)
    np.testing.assert_allclose(kept.live, plain.live, rtol=1e-12)
