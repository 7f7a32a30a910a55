"""An owner that dies anywhere in an update of its slice: who completes it gets the same bits."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launch import ROOT

from mpips import optim
from mpips.config import Config
from mpips.failover.undo_log import HALVES
from mpips.kernels.atomics import publish
from mpips.kernels.exchange import NUMBER_BITS, PIECE
from mpips.kernels.vectors import addresses_of
from mpips.layout import Shard
from mpips.optim import Change, Part, Rule, make_rule
from mpips.rounds.averaging import Average, SlowMomentum
from mpips.rounds.survivable import SliceUpdate

SIZE = 64  # elements of a piece
BEGIN, N, STEP = 7, 3 * SIZE + 5, 4
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
