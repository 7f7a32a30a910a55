"""A node's round as one loop: waits for late ranks, and the bits of an update by calls."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launch import ROOT, python

import mpips
from mpips.errors import UserError
from mpips.health import status_board
from mpips.kernels import cache
from mpips.kernels.atomics import publish
from mpips.kernels.vectors import addresses_of
from mpips.layout import Shard
from mpips.optim import Part, Rule, make_rule
from mpips.rounds.averaging import Average
from mpips.rounds.base import Report, ShardUpdate
from mpips.rounds.node import TURN, NodeBarrier

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
