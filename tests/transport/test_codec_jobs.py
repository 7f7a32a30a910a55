"""Whole jobs with packed messages: what they reach, and what they send."""

import re
from typing import Any

import pytest
from runs import HERE, Plan, names_asked, summary, thinned

from mpips.codecs import CODECS, make_codec
from mpips.config.jobfile import read_toml
from mpips.transport.push import HEADER_WORDS

pytestmark = pytest.mark.launch

# What is reached without a codec, less a margin: where cores are few, gradients are staler, and one
# of the held-out digits is 0.003.
ACCURACY = {"adam": 0.94, "sgd": 0.93}
PARAMETERS = 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
JOB = ["jobs/digits.toml", "--servers", "1", "--node-size", "1", "--checkpoint-every", "0"]
SGD = "--optimizer sgd --lr 0.3"  # error feedback goes with a linear rule
DGC = "--codec topk --topk-momentum 0.9 --topk-warmup 150 --optimizer sgd --lr 0.05"
PUSHES = {
    name: f"--codec {name} {SGD if name in ('topk', 'onebit') else ''}"
    for name in ("none", *CODECS)
}
PULLS = {f"pull {name}": f"--pull-codec {name}" for name in ("fp16", "bf16", "int8")}
CASES = {
    **PUSHES,
    **PULLS,
    "both ways": "--codec int8 --pull-codec int8 --prefetch --node-size 2",
    "dgc": DGC,
    "float64": "--codec int8 --dtype float64",
    "auto": "--codec auto --pull-codec auto",
    "aggregated": f"--codec onebit {SGD} --node-size 2 --node-aggregation",
}
SHORT = [*(PUSHES.keys() - {"topk"}), *PULLS, "float64", "auto"]  # 5 epochs
EPOCHS = "20"  # of the others
LEAST = 0.75  # of them
QUICK = {"int8", "both ways", "auto", "auto again", "nan int8"}


def thin(*names: str) -> list[Any]:
    """Leave most of them to the long tests."""
    return thinned(names, QUICK & set(names))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    made, asked = Plan(tmp_path_factory.mktemp("codecs")), names_asked(request)
    if "test_a_warm_up_sends_more_at_first" in asked:
        asked.add("topk")
    root = HERE.parent
    for name in filter(asked.__contains__, CASES):
        options = CASES[name]
        ranks = 6 if "--node-size 2" in options else 3
        job = [str(root / JOB[0]), *JOB[1:]]
        length = ["--epochs", "5" if name in SHORT else EPOCHS]
        made.add(name, ranks, [*job, *options.split(), *length])
    for name in filter(lambda name: f"nan {name}" in asked, CODECS):
        faulty = ["--problem", f"{root}/tests/problems/faulty.py:NanGradientOfMlp"]
        made.add(f"nan {name}", 3, [*JOB[1:], *faulty, "--codec", name], code=1)
    if "resumed" in asked:
        add_resumed(made)
    if "auto again" in asked:
        auto = [str(root / JOB[0]), *JOB[1:], "--codec", "auto", "--epochs", "1"]
        made.add("auto again", 3, auto)
        made.add("auto again", 3, ["--resume", "--epochs", "2"])
    if "test_a_codec_that_packs_nothing_is_not_named" in asked:
        small = [*JOB[1:], "--hidden", "8", "--codec", "int4", "--epochs", "1"]
        made.add("small", 3, small, quiet=False)
    made.run(timeout_s=400)
    return made


def add_resumed(plan: Plan) -> None:
    """Add a run that goes on elsewhere."""
    gentle = SGD.replace("0.3", "0.1")  # the schedule begins again, with a larger rate
    first = f"--codec topk {gentle} --pull-codec fp16 --epochs 6 --checkpoint-every 100steps"
    plan.add("resumed", 3, [str(HERE.parent / JOB[0]), *JOB[1:], *first.split()])
    plan.add("resumed", 4, ["--resume", "--epochs", "24"])


@pytest.mark.parametrize("name", thin(*CASES, "resumed"))
def test_digits_reaches_its_accuracy(name: str, plan: Plan) -> None:
    found = summary(plan.out(name))
    assert found["accuracy"] >= (LEAST if name in SHORT else ACCURACY[found["optimizer"]])


@pytest.mark.parametrize("name", thin(*PUSHES, "auto", "auto again"))
def test_the_summary_has_the_bytes_that_were_sent(name: str, plan: Plan) -> None:
    """Of the codec that was chosen; the job file leaves it open: a resume measures again."""
    found: dict[str, Any] = summary(plan.out(name))
    codec = make_codec(found["codec"])
    body = codec.wire_bytes(PARAMETERS, "f4") if codec else 4 * PARAMETERS
    assert found["parameters"] == PARAMETERS
    assert found["bytes_pushed"] == found["pushes_sent"] * 4 * PARAMETERS
    assert found["bytes_sent"] == found["pushes_sent"] * (body + 8 * HEADER_WORDS)
    if name not in PUSHES:
        assert {found["codec"], found["pull_codec"]} <= {"none", "fp16", "bf16", "int8"}
        assert read_toml(plan.out(name) / "config.toml")["codec"] == "auto"


def test_a_codec_that_packs_nothing_is_not_named(plan: Plan) -> None:
    (said,) = plan.outputs("small")
    assert "0 of 2 slices have the 64 KB" in said
    assert re.search(r"^workers sent .* to other nodes and had .* from them$", said, re.MULTILINE)


@pytest.mark.parametrize("name", thin(*(f"nan {name}" for name in CODECS)))
def test_a_gradient_that_is_not_finite_ends_the_run(name: str, plan: Plan) -> None:
    found = summary(plan.out(name))
    assert found["stop_reason"] == "diverged"
    assert found["global_step"] < 100
    assert not (plan.out(name) / "DONE").exists()


@pytest.mark.parametrize("name", thin(*PULLS))
def test_the_summary_has_the_bytes_that_were_read(name: str, plan: Plan) -> None:
    """At least a pull a step, and perhaps one more of each worker that it did not use."""
    found = summary(plan.out(name))
    codec = make_codec(name.removeprefix("pull "))
    assert codec is not None
    one, pushes = codec.wire_bytes(PARAMETERS, "f4"), found["pushes_sent"]
    assert pushes * one <= found["bytes_received"] <= (pushes + 2) * one
    assert found["bytes_pulled"] == found["bytes_received"] // one * 4 * PARAMETERS


@pytest.mark.parametrize("name", thin("dgc"))
def test_a_warm_up_sends_more_at_first(name: str, plan: Plan) -> None:
    dgc, plain = (summary(plan.out(n)) for n in (name, "topk"))
    assert 1.5 * plain["bytes_sent"] < dgc["bytes_sent"] < dgc["bytes_pushed"] / 10
