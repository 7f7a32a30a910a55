"""Serial run of rounds whose workers die: what the parameters and counts are to be."""

import json
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpips.checkpoint import need_whole
from mpips.config import Config
from mpips.config.jobfile import from_toml
from mpips.datasets import Batch, open_dataset
from mpips.datasets.ledger import Range, SampleAllocator, leave, resize, split
from mpips.datasets.order import Order
from mpips.layout.roles import assign
from mpips.optim import Slots, rule_of
from mpips.problems import load_problem
from mpips.problems.base import initial_vector
from mpips.rounds.loop import AHEAD
from tests.chaos.exact import wrong_rows


def told(out: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the lines of some kinds in the metrics of a run."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] in kinds]


class Samples:
    """The training samples of a job, its first parameters `w`, and gradients of some samples."""

    def __init__(self, config: Config, block: int = 0) -> None:
        self.data = open_dataset(config)
        self._problem = load_problem(config.problem, self.data.info, config)
        self.views = self._problem.layout.views
        self.order = Order(self.data.train.n, block, config.seed)
        self.w = initial_vector(self._problem, config.seed, np.dtype(config.dtype))

    def gradient(self, w: np.ndarray, samples: Range) -> np.ndarray:
        ids, g = self.order.sample_ids(*samples), np.zeros_like(w)
        batch = Batch(*self.data.train.convert(*self.data.train.read(ids), w.dtype), ids)
        self._problem.loss_and_grad(self.views(w), batch, self.views(g))
        return g


class Serial(Samples):
    """A run in rounds in one process, from what its folder tells of its starts and deaths.

    `rows` is by how much each sample counts in rows of mode hybrid: by its share of all assigned.
    """

    def __init__(self, out: Path, ranks: int) -> None:
        checkpoint, _ = need_whole(out)
        self.config = c = from_toml(checkpoint.config)
        nodes = json.loads((out / "summary.json").read_text())["nodes"]
        places = {rank: number for number, node in enumerate(nodes) for rank in node["ranks"]}
        node_of = [places[rank] for rank in range(ranks)]
        roles = assign(c.mode, ["here"] * ranks, node_of, c.servers, c.server_ranks)
        super().__init__(c, checkpoint.state["block"])
        self._workers = roles.workers
        self.counts = np.zeros(self.data.train.n, int)
        self.rows = np.zeros(self.data.train.n)
        self._rule = rule_of(c)
        self._slots = tuple(np.zeros_like(self.w) for _ in self._rule.slots)
        self._rule.init(self.w, self._slots)
        self._velocity = np.zeros_like(self.w)
        self._batches, self.steps = self._allocator(), 0
        attempts: list[list[dict[str, Any]]] = []
        for row in told(out, "start", "lost"):
            if row["kind"] == "start":
                attempts.append([])
            attempts[-1].append(row)
        ends = [attempt[0]["step"] for attempt in attempts[1:]]
        for (_, *lost), end in zip(attempts, [*ends, None], strict=True):
            self._run(lost, end)

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    def _allocator(self) -> SampleAllocator:
        c = self.config
        return SampleAllocator(self.data.train.n, c.unit_size * len(self._workers), 1, c.epochs)

    def _run(self, lost: Sequence[dict[str, Any]], end: int | None) -> None:
        """Make the rounds of a start, up to those that the next one has made again."""
        batches, ahead, living = self._allocator(), deque[Range](), list(self._workers)
        unit = self.config.step_size
        batches.restore(self._batches.state())
        while end is None or self.steps < end:
            while len(ahead) < AHEAD and (batch := batches.next(0)) is not None:
                ahead.append(batch)
            if not ahead:
                break
            batch, self.steps = ahead.popleft(), self.steps + 1
            batches.applied(0, batch)
            begin = self._lr(living)
            parts = dict(zip(living, split(batch, len(living)), strict=True))
            news = {each["rank"]: each["first"] for each in lost if each["step"] == self.steps}
            again = [parts.pop(rank) for rank in sorted(news) if news[rank] == self.steps]
            mine = [part for part in parts.values() if part[2] > part[1]]
            for part in mine:
                share = begin / (batch[2] - batch[1])
                self.rows[self.order.sample_ids(*part)] += share
            if mine and self.config.mode == "local_sgd":
                count = -(-(batch[2] - batch[1]) // (unit * len(living)))
                self._average(mine, count, begin)
            elif mine:
                self._step(self.w, self._slots, mine, self.steps, self._lr(parts))
            if news:
                living = [rank for rank in living if rank not in news]
                leave(batches, batch, [each for each in again if each[2] > each[1]])
                resize(batches, self.config.unit_size * len(living))
                ahead.clear()
        self._batches = batches

    def _lr(self, present: Collection[int]) -> float:
        """Return the learning rate of a round in which these workers are."""
        c = self.config
        share = len(present) / len(self._workers) if c.scale_lr else 1.0
        return c.learning_rate * share

    def _average(self, parts: Sequence[Range], count: int, lr: float) -> None:
        """Make a round of local steps, and what is done with the mean of the replicas."""
        c, n = self.config, sum(end - begin for _, begin, end in parts)
        mean, slots = np.zeros_like(self.w), [np.zeros_like(each) for each in self._slots]
        for part in parts:
            own, *own_slots = (each.copy() for each in (self.w, *self._slots))
            steps = [step for step in split(part, count) if step[2] > step[1]]
            for number, step in enumerate(steps, (self.steps - 1) * c.round_steps + 1):
                self._step(own, tuple(own_slots), [step], number, lr)
            for total, each in zip((mean, *slots), (own, *own_slots), strict=True):
                total += each * ((part[2] - part[1]) / n)
        for slot, total in zip(self._slots, slots, strict=True):
            slot[:] = total
        change = self.w - mean
        self._velocity = c.outer_momentum * self._velocity + change
        ahead = change + c.outer_momentum * self._velocity
        self.w -= c.outer_lr * (ahead if c.outer_nesterov else self._velocity)

    def _step(
        self, params: np.ndarray, slots: Slots, parts: Sequence[Range], number: int, lr: float
    ) -> None:
        """Make an update by the mean gradient of the samples of some parts, and count these."""
        total, n = np.zeros_like(params), sum(end - begin for _, begin, end in parts)
        for part in parts:
            total += self.gradient(params, part) * ((part[2] - part[1]) / n)
            self.counts[self.order.sample_ids(*part)] += 1
        self._rule.apply(params, total, slots, number, lr)


def check_serial(out: Path, ranks: int, within: float = 1e-6) -> list[str]:
    """Return what is wrong with the end of a run: its counts, steps and parameters."""
    checkpoint, _ = need_whole(out)
    serial, wrong = Serial(out, ranks), list[str]()
    epochs = serial.config.epochs
    if (serial.counts != epochs).any():
        most, least = serial.counts.max(), serial.counts.min()
        wrong.append(f"samples count {least} to {most} times, expected {epochs}")
    if checkpoint.step != serial.steps:
        wrong.append(f"ended at step {checkpoint.step}, expected {serial.steps}")
    if checkpoint.state["samples"] != serial.samples:
        wrong.append(f"{checkpoint.state['samples']} samples, expected {serial.samples}")
    away = np.abs(checkpoint.read_params() - serial.w).max()
    if not away < within:
        wrong.append(f"parameters are off by {away:g}")
    return [*wrong, *wrong_rows(checkpoint, serial.rows)]
