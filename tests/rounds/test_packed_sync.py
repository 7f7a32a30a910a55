"""Whole synchronous jobs that pack what crosses nodes: what they reach, and how they end."""

from pathlib import Path

import pytest
from launch import ROOT
from runs import Plan, assert_same_state, final, names_asked, summary, thinned

from mpips.codecs import CODECS
from mpips.codecs.powersgd import Factors
from mpips.layout import Layout

pytestmark = pytest.mark.launch

JOB = "jobs/digits-sync.toml --node-size 2 --hidden 400,200 --checkpoint-every 0 --epochs 4"
SGD = "--optimizer sgd --lr 0.3 --epochs 6"
WIDE = "--hidden 256,256 --epochs 8"
CASES = {  # ranks, options, least accuracy: what is reached without a codec, less a margin
    "int8": (4, "--codec int8 --pull-codec int8", 0.96),
    "auto": (4, "--codec auto --pull-codec auto", 0.96),
    "fp16": (4, "--pull-codec fp16 --node-size 1", 0.96),
    "onebit": (4, f"--codec onebit {SGD}", 0.95),
    "topk": (4, f"--codec topk {SGD}", 0.95),
    "wide": (4, WIDE, 0.96),
    "powersgd": (4, f"{WIDE} --codec powersgd", 0.96),
    "powersgd, servers": (5, f"{WIDE} --codec powersgd --servers 1 --clip 1", 0.96),
    "powersgd, private": (2, f"{WIDE} --codec powersgd --window private", 0.96),
    "backup": (4, "--codec int8 --pull-codec fp16 --servers 1 --backup-workers 1", 0.93),
}
QUICK = ("auto",)
REPORT_BYTES = 64  # a cache line
NAN = (*CODECS, "powersgd")
FAULTY = f"--problem {ROOT}/tests/problems/faulty.py:NanGradientOfMlp"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    made, asked = Plan(tmp_path_factory.mktemp("packed")), names_asked(request)
    if "test_the_summary_has_the_codecs_that_were_chosen" in asked:
        asked.add("auto")
    if "powersgd" in asked:
        asked |= {"wide"}
    job = [str(ROOT / JOB.split()[0]), *JOB.split()[1:]]
    for name in filter(asked.__contains__, CASES):
        ranks, options, _ = CASES[name]
        made.add(name, ranks, [*job, *options.split()])
    for name in filter(lambda name: f"nan {name}" in asked, NAN):
        made.add(f"nan {name}", 4, [*job, *FAULTY.split(), "--codec", name], code=1)
    if "test_a_resumed_run_without_feedback_ends_bitwise_equal" in asked:
        both = [*job, *CASES["int8"][1].split(), "--schedule", "constant"]
        made.add("resumed", 4, [*both, "--epochs", "1"])
        made.add("resumed", 4, ["--resume", "--epochs", "2"])
        made.add("whole", 4, [*both, "--epochs", "2"])
    if "low rank, resumed" in asked:
        low = [*job, *CASES["powersgd"][1].split()]
        made.add("low rank, resumed", 4, [*low, "--epochs", "3"])
        made.add("low rank, resumed", 6, ["--resume", "--epochs", "8"])
    made.run(timeout_s=300)
    return made


@pytest.mark.parametrize("name", thinned(CASES, QUICK))
def test_digits_reaches_its_accuracy(name: str, plan: Plan) -> None:
    assert summary(plan.out(name))["accuracy"] >= CASES[name][2]


def test_the_summary_has_the_codecs_that_were_chosen(plan: Plan) -> None:
    found = summary(plan.out("auto"))
    assert {found["codec"], found["pull_codec"]} <= {"none", "fp16", "bf16", "int8"}


@pytest.mark.parametrize("name", thinned((f"nan {name}" for name in NAN), ["nan int8"]))
def test_a_gradient_that_is_not_finite_ends_the_run(name: str, plan: Plan) -> None:
    out: Path = plan.out(name)
    assert summary(out)["stop_reason"] == "diverged"
    assert summary(out)["global_step"] < 20
    assert not (out / "DONE").exists()


def test_a_resumed_run_without_feedback_ends_bitwise_equal(plan: Plan) -> None:
    assert_same_state(final(plan.out("resumed")), final(plan.out("whole")))


@pytest.mark.parametrize("name", thinned(["powersgd"], ()))
def test_powersgd_costs_less_than_half_a_point(name: str, plan: Plan) -> None:
    packed, plain = (summary(plan.out(n))["accuracy"] for n in (name, "wide"))
    assert packed >= plain - 0.005


@pytest.mark.parametrize("name", thinned(["powersgd"], ()))
def test_the_summary_has_the_bytes_between_nodes(name: str, plan: Plan) -> None:
    """Of each sum half crosses from either of the two nodes: of gradients, factors, a report."""
    found = {n: summary(plan.out(n)) for n in (name, "wide")}
    shapes = {"w": (64, 256), "x": (256, 256), "y": (256, 10), "b": (256 + 256 + 10,)}
    layout = Layout.of(shapes)
    given = 4 * Factors.of(layout, "float32", 4).sent + REPORT_BYTES
    assert found["powersgd"]["bytes_sent"] == found["powersgd"]["global_step"] * given
    whole = 4 * layout.size + REPORT_BYTES
    assert found["wide"]["bytes_sent"] == found["wide"]["global_step"] * whole


@pytest.mark.parametrize("name", thinned(["low rank, resumed"], ()))
def test_a_run_by_powersgd_goes_on_elsewhere(name: str, plan: Plan) -> None:
    """On three nodes instead of two, with errors of its own."""
    found = summary(plan.out(name))
    assert len(found["nodes"]) == 3
    assert found["accuracy"] >= 0.96
