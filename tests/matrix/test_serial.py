"""Modes that give one result give that of a run without any MPI, written from the equations."""

from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, run
from references import TOLERANCE
from runs import Plan, summary

from mpips.kernels.vectors import addresses_of
from mpips.optim import make_rule
from mpips.rounds.averaging import SlowMomentum
from mpips.tables.rounds import COUNT, PLACES, SUMS, WORDS, merge_rows
from tests.matrix.jobs import ROWS_JOB, of_matrix
from tests.matrix.oracles import check

PROGRAM = str(ROOT / "tests" / "library" / "programs" / "tables.py")


def add_async_rows(plan: Plan) -> None:
    more = "--mode async --servers 1 --node-size 1 --optimizer adagrad --epochs 1"
    plan.add("async rows", 3, [*ROWS_JOB.split(), *more.split()])


MORE = {"test_workers_of_other_nodes_evaluate_the_end": add_async_rows}


@pytest.mark.launch
@pytest.mark.parametrize("name", of_matrix("rounds", "local", "elastic", "rows"))
def test_job(name: str, runs: Plan) -> None:
    check(runs, name)


@pytest.mark.launch
@pytest.mark.one_mpi
def test_workers_of_other_nodes_evaluate_the_end(runs: Plan) -> None:
    """By rows of servers that serve no more."""
    assert summary(runs.out("async rows"))["accuracy"] > 0.5


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
def test_rows_in_rounds_in_one_world(tmp_path: Path) -> None:
    found = run(5, [PROGRAM, "rounds", str(tmp_path)], tmp_path, 240).check()
    assert found.output.count(" is done") == 6, found.output


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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("given", [False, True])
def test_an_outer_step_is_that_of_nesterov_momentum(dtype: str, given: bool) -> None:
    """What a round has changed is a gradient to the rule; it is given that, or the mean."""
    rng = np.random.default_rng(0)
    w, mean, velocity = (rng.standard_normal(5000).astype(dtype) for _ in range(3))
    params, v, expected, outer = w.copy(), velocity.copy(), w.copy(), velocity.copy()
    rule = SlowMomentum(momentum=0.9, rate=0.7, nesterov=True, given=given)
    rule.apply(params, w - mean if given else mean, (v,), 1, 0.1)
    make_rule("nesterov", momentum=0.9).apply(expected, w - mean, (outer,), 1, 0.7)
    np.testing.assert_allclose(params, expected, rtol=0, atol=10 * TOLERANCE[dtype])
    np.testing.assert_array_equal(v, outer)
