"""Tables in rounds: equal to a run without MPI, exact through stops and kills, on any nodes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, run
from references import TOLERANCE
from runs import Plan, final, kill_each, newest, summary

from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import resolve
from mpips.datasets import open_dataset
from mpips.datasets.ledger import SampleAllocator
from mpips.datasets.order import Order
from mpips.kernels.vectors import addresses_of
from mpips.problems.sparse import ROWS
from mpips.tables.rounds import COUNT, PLACES, SUMS, WORDS, merge_rows
from mpips.tables.saved_rows import find_rows

CLICKS = str(ROOT / "jobs" / "clicks.svm")
PROGRAM = str(ROOT / "tests" / "library" / "programs" / "tables.py")
JOB = f"--problem logistic_sparse --dataset {CLICKS} --mode sync --batch-size 23 --epochs 2"
# Ranks, servers, and options; a last batch of an epoch is smaller than the others.
CASES = {
    "one rank": (1, 0, "--dtype float64 --optimizer adagrad --lr 0.1"),
    "one node": (4, 0, "--dtype float64 --optimizer adagrad --lr 0.1 --clip 0.05"),
    "servers": (4, 2, "--dtype float32 --optimizer sgd --lr 0.5 --eval-every 1"),
    "nodes of one": (3, 0, "--dtype float64 --optimizer adagrad --lr 0.1 --node-size 1"),
    "nodes of two": (4, 1, "--dtype float64 --optimizer sgd --lr 0.5 --node-size 2 --clip 0.05"),
    "a codec": (4, 0, "--dtype float32 --optimizer sgd --lr 0.5 --node-size 2 --codec fp16"),
}
ASYNC = "--mode async --servers 1 --node-size 1 --optimizer adagrad --epochs 1"


def serial(options: Sequence[str], workers: int) -> np.ndarray:
    """Return bias and weights of logistic regression after large batches, in NumPy."""
    c = resolve(parse_command_line(options).options)
    data = open_dataset(c)
    block = data.train.block(c.batch_size)
    order = Order(data.train.n, 1 if block else c.batch_size, block, c.seed)
    allocator = SampleAllocator(data.train.n, c.step_size * workers, workers=1, epochs=c.epochs)
    x, labels = data.train.load(0, data.train.n, np.dtype("f8"))
    inputs = np.zeros((data.train.n, data.info.x_shape[0]))
    inputs[x.samples, x.indices] = x.values
    w, total = np.zeros((2, 1 + data.info.x_shape[0]))  # the bias comes first
    while (batch := allocator.next(0)) is not None:
        ids = order.sample_ids(*batch)
        samples, features = np.nonzero(inputs[ids])
        values = inputs[ids][samples, features]
        z = np.bincount(samples, values * w[1:][features], len(ids)) + w[0]
        delta = (1 / (1 + np.exp(-z)) - labels[ids]) / len(ids)
        sums = np.bincount(features, delta[samples] * values, len(w) - 1)
        g = np.concatenate([[delta.sum()], sums])
        norm = np.linalg.norm(g)
        if c.clip:
            assert norm > c.clip, "it is clipped"
            g *= c.clip / norm
        total += g * g
        w -= c.learning_rate * (g if c.optimizer == "sgd" else g / (np.sqrt(total) + c.eps))
    return np.asarray(w)


@pytest.mark.launch
def test_tables_in_rounds_equal_a_serial_run(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    for name, (ranks, servers, more) in CASES.items():
        plan.add(name, ranks, f"{JOB} {more} --servers {servers}".split())
    # Workers of other nodes evaluate the end by rows of servers that serve no more.
    plan.add("async", 3, [*JOB.split(), *ASYNC.split()])
    plan.run(240, tmp_path)
    for name, (ranks, servers, more) in CASES.items():
        expected, found = serial(f"{JOB} {more}".split(), ranks - servers), final(plan.out(name))
        features = len(expected) - 1
        rows = find_rows(found, ROWS, np.arange(features))[:, 0]
        ours = np.concatenate([found.read_params(), rows])
        error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
        assert error <= TOLERANCE[rows.dtype.name], (name, error)
        told = summary(plan.out(name))["tables"][ROWS]
        assert (told["changed"], told["again"], told["torn"]) == (features, 0, 0), told
    assert summary(plan.out("async"))["accuracy"] > 0.5


@pytest.mark.launch
def test_rows_in_rounds_in_one_world(tmp_path: Path) -> None:
    found = run(5, [PROGRAM, "rounds", str(tmp_path)], tmp_path, 240).check()
    assert found.output.count(" is done") == 7, found.output


@pytest.mark.launch
@pytest.mark.long
def test_rows_in_rounds_are_exact_through_kills(tmp_path: Path) -> None:
    out = tmp_path / "rounds"
    kill_each(PROGRAM, out, (2, 0), 0.2)
    killed = newest(out).state["samples"]
    run(4, [PROGRAM, "kills", str(out), "0"], tmp_path).check()
    assert newest(out).state["samples"] > killed
    assert newest(out).read_params().tolist() == [3.0] * 232


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_lists_of_workers_are_merged(dtype: str) -> None:
    """Whoever has a row; one list is empty."""
    rng, dim, most = np.random.default_rng(0), 3, 40
    for workers in (1, 2, 5):
        places = [np.flatnonzero(rng.random(most) < p) for p in (0.5, 0, 0.2, 1, 0.7)[:workers]]
        sums = [rng.normal(size=(len(p), dim)).astype(dtype) for p in places]
        weights = rng.random(workers)
        lists = np.zeros((WORDS, workers), np.int64)
        lists[[PLACES, SUMS]] = addresses_of(places), addresses_of(sums)
        lists[COUNT] = [len(place) for place in places]
        local, out = np.empty(workers * most, np.int64), np.empty((workers * most, dim), dtype)
        n = merge_rows(lists, weights, local, out)
        expected = np.zeros((most, dim), dtype)
        for place, gradients, weight in zip(places, sums, weights, strict=True):
            expected[place] += out.dtype.type(weight) * gradients
        np.testing.assert_array_equal(local[:n], np.unique(np.concatenate(places)))
        np.testing.assert_array_equal(out[:n], expected[local[:n]])
