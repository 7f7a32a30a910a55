"""Synchronous rounds with codecs: what they reach, how they end, and what a resumed run keeps."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launch import ROOT
from runs import (
    Plan,
    assert_same_state,
    counting,
    final,
    is_whole,
    names_asked,
    samples_file,
    shared_out,
    summary,
    thinned,
)

from mpips.checkpoint import list_checkpoints, open_checkpoint
from mpips.codecs import CODECS
from mpips.codecs.powersgd import Factors
from mpips.config import Config
from mpips.config.jobfile import to_toml
from mpips.layout import Layout, Shard
from mpips.layout.roles import assign
from mpips.snapshot import worker_state
from tests.chaos.exact import expected_counts, own

pytestmark = pytest.mark.launch

N, BATCH, WORKERS, STEPS = 256, 8, 4, 12
JOB = [str(ROOT / "jobs/digits-sync.toml"), "--hidden", "320,160", "--schedule", "constant"]
SGD = "--optimizer sgd --lr 0.3 --node-size 2"
BITWISE = {  # ranks, options, what is kept
    "topk": (4, f"{SGD} --codec topk", {"residual"}),
    "dgc": (
        4,
        f"{SGD} --codec topk --topk-momentum 0.9 --topk-warmup 30 --snapshot stall",
        {"residual", "velocity"},
    ),
    "onebit": (5, f"{SGD} --codec onebit --servers 1", {"residual"}),
    "powersgd": (4, "--codec powersgd --node-size 2", {"error", "basis"}),
    "uneven": (5, "--codec powersgd --servers 1 --node-size 2 --clip 1", {"error", "basis"}),
    "nothing": (4, f"{SGD} --codec int8 --pull-codec int8", set[str]()),
}
TRAIN = "--node-size 2 --hidden 400,200 --checkpoint-every 0 --epochs 4"
LONGER = "--optimizer sgd --lr 0.3 --epochs 6"
WIDE = "--hidden 256,256 --epochs 8"
REACHED = {  # ranks, options, least accuracy: what is reached without a codec, less a margin
    "auto": (4, "--codec auto --pull-codec auto", 0.96),
    "signs": (4, f"--codec onebit {LONGER}", 0.95),
    "wide": (4, WIDE, 0.96),
    "low rank": (4, f"{WIDE} --codec powersgd", 0.96),
    "low rank, servers": (5, f"{WIDE} --codec powersgd --servers 1 --clip 1", 0.96),
    "backup": (4, "--codec int8 --pull-codec fp16 --servers 1 --backup-workers 1", 0.93),
    "low rank, resumed": (6, f"{WIDE} --codec powersgd", 0.96),  # on three nodes in place of two
}
REPORT_BYTES = 64  # a cache line
NAN = [f"nan {codec}" for codec in (*CODECS, "powersgd")]
FAULTY = f"--problem {ROOT}/tests/problems/faulty.py:NanGradientOfMlp"
WORLDS = (  # ranks, options
    (4, "--node-size 2 --codec topk --topk-ratio 0.1"),
    (4, "--node-size 2 --codec onebit --topk-ratio 0.01"),
    (4, "--node-size 1 --codec topk --topk-ratio 0.1"),
    (5, "--servers 1 --node-size 2"),
)
RESUMED = (  # ranks, options, what is said
    (4, "--codec topk", ""),
    (4, "--codec topk", "each rank goes on with its own residual"),
    (2, "--codec topk --node-size 1", "the sum of the ranks' residual goes to those who pack now"),
    (4, "--codec powersgd", "error, basis begins anew: none that fits was saved"),
    (4, "--codec powersgd --powersgd-rank 2", "ranks' basis begins anew"),
    (4, "--codec none --powersgd-rank 4", "error, basis is left out: this run has none"),
    (5, "--codec topk --servers 1 --backup-workers 1", ""),
    (
        5,
        "--codec topk --servers 1 --backup-workers 0",
        "residual begins at zero: that of mode sync with backup workers is left out",
    ),
    (4, "--codec onebit", "the sum of the ranks' residual goes to those who pack now"),
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    made, asked = Plan(tmp_path_factory.mktemp("kept")), names_asked(request)
    for name in filter(asked.__contains__, BITWISE):
        ranks, options, _ = BITWISE[name]
        words = [*JOB, *options.split(), "--checkpoint-every", "15steps"]
        made.add(f"{name} whole", ranks, [*words, "--steps", "55"])
        made.add(f"{name} parts", ranks, [*words, "--steps", "20"])
        made.add(f"{name} parts", ranks, ["--resume", "--steps", "55"])
    if "test_the_summary_has_the_bytes_between_nodes" in asked:
        asked |= {"wide", "low rank"}
    train = [JOB[0], *TRAIN.split()]
    for name in filter(asked.__contains__, REACHED):
        ranks, options, _ = REACHED[name]
        if name == "low rank, resumed":
            made.add(name, 4, [*train, *options.split(), "--epochs", "3"])
            made.add(name, ranks, ["--resume", "--epochs", "8"])
        else:
            made.add(name, ranks, [*train, *options.split()])
    for name in filter(asked.__contains__, NAN):
        codec = name.partition(" ")[2]
        made.add(name, 4, [*train, *FAULTY.split(), "--codec", codec], code=1)
    if "test_parameters_and_residuals_are_all_gradients" in asked:
        add_worlds(made)
    if "test_a_resumed_run_says_what_becomes_of_it" in asked:
        words = [*JOB, "--optimizer", "sgd", "--node-size", "2", "--keep", "100", "--steps"]
        for k, (ranks, more, _) in enumerate(RESUMED):
            steps = [str(STEPS * (k + 1)), *more.split(), *["--resume"] * (k > 0)]
            made.add("said", ranks, [*words, *steps], quiet=False)
    made.run(timeout_s=300)
    return made


def add_worlds(plan: Plan) -> None:
    """Add a run that counts its samples in one world after another."""
    data = samples_file(plan.folder, N)
    words = [*counting(data, kind="MeanCounting"), "--mode", "sync"]
    words += ["--hidden", "40000", "--batch-size", str(BATCH), "--lr", str(BATCH * WORKERS)]
    words += ["--checkpoint-every", "3steps", "--keep", "100"]
    for k, (ranks, more) in enumerate(WORLDS):
        resume = ["--resume"] * (k > 0)
        plan.add("worlds", ranks, [*words, *more.split(), "--epochs", str(k + 1), *resume])


@pytest.mark.parametrize("name", thinned(REACHED, ["auto"]))
def test_digits_reaches_its_accuracy(name: str, plan: Plan) -> None:
    found = summary(plan.out(name))
    assert found["accuracy"] >= REACHED[name][2]
    if name == "low rank, resumed":
        assert len(found["nodes"]) == 3
    if name == "auto":
        assert {found["codec"], found["pull_codec"]} <= {"none", "fp16", "bf16", "int8"}


@pytest.mark.parametrize("name", thinned(NAN, ["nan int8"]))
def test_a_gradient_that_is_not_finite_ends_the_run(name: str, plan: Plan) -> None:
    out = plan.out(name)
    assert summary(out)["stop_reason"] == "diverged"
    assert summary(out)["global_step"] < 20
    assert not (out / "DONE").exists()


@pytest.mark.long
@pytest.mark.one_mpi
def test_the_summary_has_the_bytes_between_nodes(plan: Plan) -> None:
    """Of each sum half crosses from either of the two nodes: of gradients, factors, a report."""
    found = {n: summary(plan.out(n)) for n in ("low rank", "wide")}
    shapes = {"w": (64, 256), "x": (256, 256), "y": (256, 10), "b": (256 + 256 + 10,)}
    layout = Layout.of(shapes)
    sent = {"low rank": Factors.of(layout, "float32", 4).sent, "wide": layout.size}
    for name, of_run in found.items():
        assert of_run["bytes_sent"] == of_run["global_step"] * (4 * sent[name] + REPORT_BYTES)
    assert found["low rank"]["accuracy"] >= found["wide"]["accuracy"] - 0.005


@pytest.mark.parametrize("name", shared_out(BITWISE, ["dgc", "uneven"]))
def test_a_resumed_run_ends_bitwise_equal(name: str, plan: Plan) -> None:
    whole, parts = (final(plan.out(f"{name} {kind}")) for kind in ("whole", "parts"))
    assert_same_state(whole, parts)
    assert set(whole.worker_names) == BITWISE[name][2]
    for key in whole.worker_names:
        a, b = own(whole, key), own(parts, key)
        assert len(a) == BITWISE[name][0]
        assert np.any(a), key
        np.testing.assert_array_equal(a.view("u1"), b.view("u1"))


def test_parameters_and_residuals_are_all_gradients(plan: Plan) -> None:
    """At each checkpoint of the worlds: shares of thirds are not exact, the rest is."""
    paths = list_checkpoints(plan.out("worlds"))
    found = [open_checkpoint(path) for path in paths if is_whole(path)]
    kept = 0
    for checkpoint in found:
        residual = own(checkpoint, "residual").sum(axis=0)
        params = checkpoint.read_params() - BATCH * WORKERS * residual
        counts = checkpoint.layout.views(params)["counts"]
        np.testing.assert_allclose(counts, expected_counts(checkpoint, N), rtol=0, atol=1e-9)
        kept += bool(residual.any())
    assert kept > len(WORLDS)
    assert {len(checkpoint.workers) for checkpoint in found} == {4, 5}
    assert expected_counts(found[-1], N).tolist() == [len(WORLDS)] * N


@pytest.mark.parametrize(("before", "now"), [("async", "sync"), ("sync", "ssp")])
def test_what_another_mode_kept_is_said_to_be_left_out(before: str, now: str) -> None:
    def config(mode: str) -> Config:
        return Config(mode=mode, codec="topk", servers=1, node_size=2)

    node_of, shards = [0, 0, 1, 1], [Shard(0, 80_000)]
    roles = assign(now, ["host"] * 4, node_of, 1)
    world = {"servers": [0], "node_of": node_of}
    state = {"world": world, **({} if config(before).in_rounds else {"own": [{}] * 3})}
    saved = SimpleNamespace(config=to_toml(config(before)), worker_names=("residual",), state=state)
    job: Any = SimpleNamespace(
        checkpoint=saved, base_step=9, worker_id=0, shards=shards, config=config(now),
        cluster=SimpleNamespace(roles=roles, node_of=node_of, nodes=2),
    )  # fmt: skip
    (line,) = worker_state.resume_notes(job)
    assert line.endswith(f": that of mode {before} is left out")
    assert worker_state.read_names(job) == ()


@pytest.mark.long
@pytest.mark.one_mpi
def test_a_resumed_run_says_what_becomes_of_it(plan: Plan) -> None:
    saved = {
        c.state["allocator"]["clocks"][0]: c
        for c in map(open_checkpoint, list_checkpoints(plan.out("said")))
    }
    for k, ((_, more, line), said) in enumerate(zip(RESUMED, plan.outputs("said"), strict=True)):
        assert line in said
        packed = ", packed by" if "--codec none" not in more else "$"
        assert re.search(rf"^workers sent \S+ .?B to .* had \S+ .?B from them{packed}", said, re.M)
        assert bool(saved[STEPS * (k + 1)].worker_names) == ("--codec none" not in more)
