"""Jobs beside a run without any MPI, written from the equations, or beside one without a codec."""

import re
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, run
from runs import Plan, summary

from mpips.codecs.powersgd import Factors
from mpips.kernels.vectors import addresses_of
from mpips.layout import Layout
from mpips.tables.rounds import COUNT, PLACES, SUMS, WORDS, merge_rows
from tests.matrix.jobs import FIRST, of_matrix
from tests.matrix.oracles import check

KINDS = ("rounds", "local", "elastic", "rows", "codec", "summed", "nan")
PROGRAM = str(ROOT / "tests" / "library" / "programs" / "tables.py")


def add_async_rows(plan: Plan) -> None:
    more = "--mode async --servers 1 --node-size 1 --optimizer adagrad --epochs 1"
    plan.add("async rows", 3, [*FIRST["rows"].split(), *more.split()], quiet=False)


REPORT_BYTES = 64  # a cache line
NEEDS = {"test_the_summary_has_the_bytes_between_nodes": {"summed, low rank", "summed, wide"}}
MORE = {"test_workers_of_other_nodes_evaluate_the_end": add_async_rows}


@pytest.mark.launch
@pytest.mark.parametrize("name", of_matrix(*KINDS))
def test_job(name: str, runs: Plan) -> None:
    check(runs, name)


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_the_summary_has_the_bytes_between_nodes(runs: Plan) -> None:
    """Of each sum half crosses from either of the two nodes: of gradients, factors, a report."""
    found = {job: summary(runs.out(f"summed, {job}")) for job in ("low rank", "wide")}
    layout = Layout.of({"w": (64, 256), "x": (256, 256), "y": (256, 10), "b": (256 + 256 + 10,)})
    sent = {"low rank": Factors.of(layout, "float32", 4).sent, "wide": layout.size}
    for name, of_run in found.items():
        assert of_run["bytes_sent"] == of_run["global_step"] * (4 * sent[name] + REPORT_BYTES)
    assert found["low rank"]["accuracy"] >= found["wide"]["accuracy"] - 0.005


@pytest.mark.launch
@pytest.mark.one_mpi
def test_workers_of_other_nodes_evaluate_the_end(runs: Plan) -> None:
    """By rows of servers that serve no more."""
    assert summary(runs.out("async rows"))["accuracy"] > 0.5
    (said,) = runs.outputs("async rows")
    assert re.search(r"^workers sent \S+ .?B to other nodes and had \S+ .?B from them$", said, re.M)


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
