"""Rounds whose workers are killed at each of their points, against a serial recomputation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import train
from runs import final, starts_of, summary
from supervised import Supervised

from mpips.config.jobfile import from_toml
from mpips.datasets import Batch, open_dataset
from mpips.datasets.ledger import SampleAllocator, leave, resize, split
from mpips.datasets.order import Order
from mpips.launch import mpirun
from mpips.optim import rule_of
from mpips.problems import load_problem
from mpips.problems.base import initial_vector

WORKERS, PROGRAM = 4, Path(__file__).with_name("dying.py")
JOB = "--mode sync --on-death shrink --batch-size 16 --epochs 2 --dtype float64 --hidden 16"
SAVED = "--checkpoint-every 5steps --eval-every 1 --resume auto --seed 3 --out out"
WORDS = [*JOB.split(), *SAVED.split()]

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not mpirun.survivors_launcher(), reason="this MPI ends jobs whose ranks die"
    ),
]


def run(folder: Path, plan: str, *more: str) -> str:
    """Run the job with its deaths, and return what it says."""
    words = [str(PROGRAM), plan, *WORDS, *more]
    with Supervised(folder, WORKERS, words, "--ft", "--timeout", "60") as job:
        return job.wait(0)


def deaths(out: Path) -> list[dict[str, Any]]:
    """Return what a run has noted of the ranks that have died."""
    events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["kind"] == "lost"]


class Serial:
    """The run in one process: its parameters, and how often each sample was in an update."""

    def __init__(self, out: Path, lost: Sequence[dict[str, Any]]) -> None:
        self.config = c = from_toml(final(out).config)
        self.data = open_dataset(c)
        self.problem = load_problem(c.problem, self.data.info, c)
        self.order = Order(self.data.train.n, c.batch_size, 0, c.seed)
        self.params = initial_vector(self.problem, c.seed, np.dtype(c.dtype))
        self.counts = np.zeros(self.data.train.n, int)
        rule, living = rule_of(c), list(range(WORKERS))
        slots = tuple(np.zeros_like(self.params) for _ in rule.slots)
        rule.init(self.params, slots)
        batches = SampleAllocator(self.data.train.n, c.batch_size * WORKERS, 1, c.epochs)
        step = 0
        while (batch := batches.next(0)) is not None:
            step += 1
            batches.applied(0, batch)
            parts = dict(zip(living, split(batch, len(living)), strict=True))
            news = {each["rank"]: each["first"] for each in lost if each["step"] == step}
            again = [parts.pop(rank) for rank in sorted(news) if news[rank] == step]
            if any(end > begin for _, begin, end in parts.values()):
                grad = self.gradient(list(parts.values()))
                rule.apply(self.params, grad, slots, step, c.learning_rate)
            if news:
                living = [rank for rank in living if rank not in news]
                leave(batches, batch, [each for each in again if each[2] > each[1]])
                resize(batches, c.batch_size * len(living))
        self.steps = step

    def gradient(self, parts: list[tuple[int, int, int]]) -> np.ndarray:
        """Return the mean gradient of the samples of some parts, and count these."""
        total, n = np.zeros_like(self.params), sum(end - begin for _, begin, end in parts)
        views = self.problem.layout.views
        for part in parts:
            if part[2] > part[1]:
                ids, grad = self.order.sample_ids(*part), np.zeros_like(total)
                x, y = self.data.train.convert(*self.data.train.read(ids), total.dtype)
                self.problem.loss_and_grad(views(self.params), Batch(x, y, ids), views(grad))
                total += grad * (len(ids) / n)
                self.counts[ids] += 1
        return total


@pytest.mark.parametrize(
    ("plan", "first"),
    [
        ("half:2:3,partly:1:11", {2: 3, 1: 12}),
        ("entered:3:7,copying:2:12", {3: 8, 2: 13}),
        ("applied:1:6,after:2:9", {1: 7, 2: 10}),
        # Two in one round, of which one has brought its gradient in.
        ("half:1:8,partly:3:8", {1: 8, 3: 9}),
    ],
)
def test_the_round_of_a_death_is_made_by_the_others(
    plan: str, first: dict[int, int], tmp_path: Path
) -> None:
    """Every sample counts once an epoch, and the parameters are those of a serial run."""
    told, out = run(tmp_path, plan), tmp_path / "out"
    assert told.count("has died; its") == len(first)
    assert "starting again" not in told
    assert starts_of(out) == 1
    lost, end = deaths(out), final(out)
    assert {each["rank"]: each["first"] for each in lost} == first
    serial = Serial(out, lost)
    assert (serial.counts == serial.config.epochs).all()
    assert end.step == serial.steps
    assert end.state["samples"] == serial.counts.sum()
    np.testing.assert_allclose(end.read_params(), serial.params, rtol=0, atol=1e-9)
    assert summary(out)["lost"] == sorted(first)


def test_after_a_death_the_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Each sample counts once an epoch: the number of samples says so."""
    run(tmp_path, "entered:2:5")
    out = tmp_path / "out"
    n = final(out).state["samples"] // 2
    words = "--resume yes --out out --epochs 3 --on-death restart"
    train(3, *words.split(), cwd=tmp_path).check()
    assert final(out).state["samples"] == 3 * n
    assert summary(out)["lost"] == []


def test_the_death_of_the_coordinator_starts_the_job_again(tmp_path: Path) -> None:
    told, out = run(tmp_path, "partly:0:12"), tmp_path / "out"
    assert "rank 0 has died, expected all" in told
    assert told.count("starting again") == 1
    assert starts_of(out) == 2
    serial = Serial(out, [])
    assert final(out).state["samples"] == serial.counts.sum()
    np.testing.assert_allclose(final(out).read_params(), serial.params, rtol=0, atol=1e-9)
