"""Whole jobs with packed messages: what they reach, how they end, and what they send."""

import re

import pytest
from runs import Plan, summary

from mpips.codecs.powersgd import Factors
from mpips.layout import Layout
from tests.matrix.jobs import DIGITS, SUMMED, SUMMED_DIGITS, of_matrix
from tests.matrix.oracles import ACCURACY, CHOSEN, check

pytestmark = pytest.mark.launch

REPORT_BYTES = 64  # a cache line


def add_resumed(plan: Plan) -> None:
    """Add a run that goes on elsewhere, with a rate that begins again."""
    first = "--optimizer sgd --lr 0.1 --codec topk --pull-codec fp16 --checkpoint-every 100steps"
    plan.add("resumed", 3, [*DIGITS.split(), *first.split(), "--epochs", "6"])
    plan.add("resumed", 4, ["--resume", "--epochs", "24"])


def add_auto(plan: Plan) -> None:
    plan.add("auto again", 3, [*DIGITS.split(), "--codec", "auto", "--epochs", "1"])
    plan.add("auto again", 3, ["--resume", "--epochs", "2"])


def add_small(plan: Plan) -> None:
    words = [*DIGITS.split()[1:], "--hidden", "8", "--codec", "int4", "--epochs", "1"]
    plan.add("small", 3, words, quiet=False)


def add_three_nodes(plan: Plan) -> None:
    words = [*SUMMED_DIGITS.split(), *SUMMED["low rank"][1].split(), "--epochs", "3"]
    plan.add("three nodes", 4, words)
    plan.add("three nodes", 6, ["--resume", "--epochs", "8"])


MORE = {
    "test_a_run_goes_on_elsewhere": add_resumed,
    "test_a_resumed_run_chooses_anew": add_auto,
    "test_a_codec_that_packs_nothing_is_not_named": add_small,
    "test_factors_go_on_on_other_nodes": add_three_nodes,
}
NEEDS = {"test_the_summary_has_the_bytes_between_nodes": {"summed, low rank", "summed, wide"}}


@pytest.mark.parametrize("name", of_matrix("codec", "summed", "nan"))
def test_job(name: str, runs: Plan) -> None:
    check(runs, name)


@pytest.mark.long
@pytest.mark.one_mpi
def test_a_run_goes_on_elsewhere(runs: Plan) -> None:
    assert summary(runs.out("resumed"))["accuracy"] >= ACCURACY["sgd"]


@pytest.mark.one_mpi
def test_a_resumed_run_chooses_anew(runs: Plan) -> None:
    """The job file leaves the codec open: a resume measures again."""
    found = summary(runs.out("auto again"))
    assert {found["codec"], found["pull_codec"]} <= CHOSEN


@pytest.mark.one_mpi
def test_a_codec_that_packs_nothing_is_not_named(runs: Plan) -> None:
    (said,) = runs.outputs("small")
    assert "0 of 2 slices have the 64 KB" in said
    assert re.search(r"^workers sent .* to other nodes and had .* from them$", said, re.MULTILINE)


@pytest.mark.long
@pytest.mark.other_mpi
def test_factors_go_on_on_other_nodes(runs: Plan) -> None:
    found = summary(runs.out("three nodes"))
    assert found["accuracy"] >= 0.96
    assert len(found["nodes"]) == 3


@pytest.mark.long
@pytest.mark.one_mpi
def test_the_summary_has_the_bytes_between_nodes(runs: Plan) -> None:
    """Of each sum half crosses from either of the two nodes: of gradients, factors, a report."""
    found = {job: summary(runs.out(f"summed, {job}")) for job in ("low rank", "wide")}
    shapes = {"w": (64, 256), "x": (256, 256), "y": (256, 10), "b": (256 + 256 + 10,)}
    layout = Layout.of(shapes)
    sent = {"low rank": Factors.of(layout, "float32", 4).sent, "wide": layout.size}
    for name, of_run in found.items():
        assert of_run["bytes_sent"] == of_run["global_step"] * (4 * sent[name] + REPORT_BYTES)
    assert found["low rank"]["accuracy"] >= found["wide"]["accuracy"] - 0.005
