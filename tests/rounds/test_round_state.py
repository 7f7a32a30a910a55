"""What codecs keep between synchronous rounds is in checkpoints, and in a resumed run."""

import re
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, train
from runs import (
    Plan,
    assert_same_state,
    counting,
    expected_counts,
    final,
    is_whole,
    newest,
    own,
    samples_file,
)

from mpips.checkpoint import list_checkpoints, open_checkpoint

pytestmark = pytest.mark.launch

N, BATCH, WORKERS = 256, 8, 4
JOB = [str(ROOT / "jobs/digits-sync.toml"), "--hidden", "400,200", "--schedule", "constant"]
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
}
TOPK = "--codec topk --topk-ratio 0.1"
WORLDS = ((4, "--node-size 2"), (4, "--node-size 1"), (5, "--servers 1 --node-size 2"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    made = Plan(tmp_path_factory.mktemp("kept"))
    for name, (ranks, options, _) in BITWISE.items():
        words = [*JOB, *options.split(), "--checkpoint-every", "10steps"]
        made.add(f"{name} whole", ranks, [*words, "--epochs", "5"])
        made.add(f"{name} parts", ranks, [*words, "--epochs", "2"])
        made.add(f"{name} parts", ranks, ["--resume", "--epochs", "5"])
    data = samples_file(made.folder, N)
    words = [*counting(data, kind="MeanCounting"), "--mode", "sync", *TOPK.split()]
    words += ["--hidden", "40000", "--batch-size", str(BATCH), "--lr", str(BATCH * WORKERS)]
    words += ["--checkpoint-every", "3steps", "--keep", "100"]
    for k, (ranks, more) in enumerate(WORLDS):
        resume = ["--resume"] * (k > 0)
        made.add("worlds", ranks, [*words, *more.split(), "--epochs", str(k + 1), *resume])
    made.run(timeout_s=300)
    return made


@pytest.mark.parametrize("name", BITWISE)
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
    """At each checkpoint of three worlds: shares of thirds are not exact, the rest is."""
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
    assert {len(checkpoint.contents.workers) for checkpoint in found} == {4, 5}
    assert expected_counts(found[-1], N).tolist() == [len(WORLDS)] * N


RESUMED = (  # ranks, options, what is said
    (4, "--codec topk", ""),
    (4, "--codec topk", "each rank goes on with its own residual"),
    (2, "--codec topk --node-size 1", "the sum of the ranks' residual is shared out"),
    (4, "--codec powersgd", "error, basis begins anew: none that fits was saved"),
    (4, "--codec powersgd --powersgd-rank 2", "basis begins anew"),
    (4, "--codec none --powersgd-rank 4", "error, basis is left out: this run has none"),
    (5, "--codec topk --servers 1 --backup-workers 1", ""),
    (5, "--codec topk --servers 1 --backup-workers 0", "residual begins anew"),
)


def test_a_resumed_run_says_what_becomes_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [*JOB, "--optimizer", "sgd", "--node-size", "2", "--out", str(out)]
    for k, (ranks, more, line) in enumerate(RESUMED):
        options = [*more.split(), "--epochs", str(k + 1), *["--resume"] * (k > 0)]
        said = train(ranks, *words, *options, cwd=tmp_path).check().output
        assert line in said
        packed = ", packed by" if "--codec none" not in more else "$"
        assert re.search(rf"^workers sent \S+ .?B to .* had \S+ .?B from them{packed}", said, re.M)
        assert bool(newest(out).worker_names) == ("--codec none" not in more)
