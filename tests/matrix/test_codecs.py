"""Whole jobs with packed messages: what they reach, how they end, and what they send."""

import pytest
from runs import Plan, summary

from mpips.codecs.powersgd import Factors
from mpips.layout import Layout
from tests.matrix.jobs import SUMMED, SUMMED_DIGITS, of_matrix
from tests.matrix.oracles import check

pytestmark = pytest.mark.launch

REPORT_BYTES = 64  # a cache line


def add_three_nodes(plan: Plan) -> None:
    words = [*SUMMED_DIGITS.split(), *SUMMED["low rank"][1].split(), "--epochs", "3"]
    plan.add("three nodes", 4, words)
    plan.add("three nodes", 6, ["--resume", "--epochs", "8"])


MORE = {"test_factors_go_on_on_other_nodes": add_three_nodes}
NEEDS = {"test_the_summary_has_the_bytes_between_nodes": {"summed, low rank", "summed, wide"}}


@pytest.mark.parametrize("name", of_matrix("codec", "summed", "nan"))
def test_job(name: str, runs: Plan) -> None:
    check(runs, name)


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
