"""A run that was stopped or killed and resumed ends as if nothing had happened."""

import importlib.util

import numpy as np
import pytest
from runs import (
    Plan,
    assert_same_state,
    counting,
    final,
    is_whole,
    newest,
    samples_file,
    summary,
)

from mpips.checkpoint import list_checkpoints, open_checkpoint
from mpips.tables.saved_rows import find_rows
from tests.chaos.exact import expected_counts, own
from tests.matrix.jobs import CLICKS, of_matrix, parts
from tests.matrix.oracles import check

pytestmark = pytest.mark.launch

KEPT = "--mode local_sgd --outer-momentum 0.5 --local-slots keep"
MODES = parts(f"""3 --mode sync | 4 --mode local_sgd --outer-momentum 0.5 |
  2 --mode local_sgd --outer-momentum 0.5 --servers 1 | 3 {KEPT} | 4 {KEPT} |
  3 {KEPT} --fragments 4 --overlap-steps 2 | 4 {KEPT} --fragments 4 --overlap-steps 2 |
  3 --mode local_sgd --outer-momentum 0.5 --fragments 1 --overlap-steps 0 |
  3 --mode easgd | 2 --mode sync | 3 --mode async""")
DIVIDED = parts(
    "4 --server-ranks 3 | 3 --servers 0 --server-ranks= | 5 --servers 2 --server-ranks 0,4"
)
ONE_WORKER = ("--batch-size", "50", "--epochs", "2", "--checkpoint-every", "7steps")
SAMPLES, BATCH, WORKERS, STEPS = 256, 8, 4, 12
WORLDS = (  # ranks, options
    (4, "--node-size 2 --codec topk --topk-ratio 0.1"),
    (4, "--node-size 2 --codec onebit --topk-ratio 0.01"),
    (4, "--node-size 1 --codec topk --topk-ratio 0.1"),
    (5, "--servers 1 --node-size 2"),
)


def add_modes(plan: Plan) -> None:
    """Add a run that begins in rounds of gradients, goes on locally, and then asynchronously."""
    for k, (ranks, mode) in enumerate(MODES):
        words = ["--hidden", "8", "--batch-size", "16", "--epochs", str(k + 1)]
        plan.add("modes", ranks, [*mode.split(), *words, *["--resume"] * (k > 0)])


def add_worlds(plan: Plan) -> None:
    """Add a run that counts its samples in one world after another."""
    words = [*counting(samples_file(plan.folder, SAMPLES), kind="MeanCounting"), "--mode", "sync"]
    words += ["--hidden", "40000", "--batch-size", str(BATCH), "--lr", str(BATCH * WORKERS)]
    words += ["--checkpoint-every", "3steps", "--keep", "100"]
    for k, (ranks, more) in enumerate(WORLDS):
        resume = ["--resume"] * (k > 0)
        plan.add("worlds", ranks, [*words, *more.split(), "--epochs", str(k + 1), *resume])


def add_one_worker(plan: Plan) -> None:
    """Add a run of mode sync, and the same of mode hybrid; rows and parameters by Adam."""
    words = f"--problem factorization_machine --dataset {CLICKS} --optimizer adam --lr 0.01"
    for mode in ("sync", "hybrid --staleness-bound 0", "hybrid --node-size 1 --staleness-bound 0"):
        name = f"one worker {mode}"
        plan.add(name, 2, [*words.split(), "--servers", "1", "--mode", *mode.split(), *ONE_WORKER])


def add_resumed_hybrid(plan: Plan) -> None:
    """Add a run of one worker beside a remote server, and the same in two jobs, of two codecs."""
    if importlib.util.find_spec("torch") is None:  # which the problem is made of
        return
    words = f"--problem wide_deep --dataset {CLICKS} --hidden 256,128 --mode hybrid --servers 1"
    words += " --node-size 1 --staleness-bound 0 --checkpoint-every 7steps --steps"
    for codec in ("topk", "int8"):
        for name, steps in (("whole", (20,)), ("resumed", (9, 20))):
            for k, count in enumerate(steps):
                more = ["--codec", codec, *["--resume"] * k]
                plan.add(f"{name} hybrid {codec}", 2, [*words.split(), str(count), *more])


def add_divided(plan: Plan) -> None:
    """Add a run of three nodes of workers, and the same with others' help, now and then."""
    words = ["--mode", "sync", "--hidden", "320,160", "--node-size", "1", "--epochs"]
    plan.add("undivided", 3, [*words, str(len(DIVIDED))])
    for k, (ranks, more) in enumerate(DIVIDED):
        plan.add("divided", ranks, [*words, str(k + 1), *more.split(), *["--resume"] * (k > 0)])


MORE = {
    "test_nodes_without_workers_change_no_bit": add_divided,
    "test_a_resumed_worker_of_hybrid_goes_on_with_its_bits": add_resumed_hybrid,
    "test_one_worker_of_hybrid_is_one_of_sync": add_one_worker,
    "test_a_run_may_go_on_in_another_mode": add_modes,
    "test_parameters_and_residuals_are_all_gradients": add_worlds,
}


@pytest.mark.parametrize("name", of_matrix("twins", "schedules"))
def test_job(name: str, runs: Plan) -> None:
    check(runs, name)


def test_nodes_without_workers_change_no_bit(runs: Plan) -> None:
    """Who owns what of a round, and of a checkpoint, is no matter where a node has one worker."""
    whole, divided = final(runs.out("undivided")), final(runs.out("divided"))
    assert_same_state(whole, divided)
    assert [len(each.shards) for each in map(open_checkpoint, [whole.path, divided.path])] == [3, 5]


def test_one_worker_of_hybrid_is_one_of_sync(runs: Plan) -> None:
    """Of one worker without a staleness bound nothing is asynchronous: the bits are equal."""
    sync, *others = (final(runs.out(name)) for name in runs.names("one worker"))
    (table,) = sync.tables
    expected = find_rows(sync, table, np.arange(60))
    assert len(others) == 2
    assert np.ptp(expected) > 0
    for other in others:
        assert_same_state(sync, other)
        np.testing.assert_array_equal(find_rows(other, table, np.arange(60)), expected)


@pytest.mark.parametrize("codec", ["topk", "int8"])
def test_a_resumed_worker_of_hybrid_goes_on_with_its_bits(codec: str, runs: Plan) -> None:
    """Residuals of rounds are resumed, and rows are packed as without the stop."""
    pytest.importorskip("torch")
    whole, resumed = (final(runs.out(f"{name} hybrid {codec}")) for name in ("whole", "resumed"))
    assert_same_state(whole, resumed)
    (table,) = whole.tables
    rows = (find_rows(each, table, np.arange(60)) for each in (whole, resumed))
    np.testing.assert_array_equal(*rows)


@pytest.mark.long
@pytest.mark.other_mpi
def test_a_run_may_go_on_in_another_mode(runs: Plan) -> None:
    """No sample is lost or repeated; slots that the mode before had not begin at zero."""
    checkpoint = newest(runs.out("modes"))
    assert checkpoint.state["allocator"]["cursor"] == [11, 0]
    assert checkpoint.state["samples"] == 11 * 1438
    assert checkpoint.slot_names == ("m", "v")
    assert summary(runs.out("modes"))["mode"] == "async"
    assert np.isfinite(checkpoint.read_params()).all()


def test_parameters_and_residuals_are_all_gradients(runs: Plan) -> None:
    """At each checkpoint of the worlds: shares of thirds are not exact, the rest is."""
    paths, kept = list_checkpoints(runs.out("worlds")), 0
    found = [open_checkpoint(path) for path in paths if is_whole(path)]
    for checkpoint in found:
        residual = own(checkpoint, "residual").sum(axis=0)
        params = checkpoint.read_params() - BATCH * WORKERS * residual
        counts, expected = checkpoint.layout.views(params)["counts"], expected_counts
        np.testing.assert_allclose(counts, expected(checkpoint, SAMPLES), rtol=0, atol=1e-9)
        kept += bool(residual.any())
    assert kept > len(WORLDS)
    assert {len(checkpoint.workers) for checkpoint in found} == {4, 5}
    assert expected_counts(found[-1], SAMPLES).tolist() == [len(WORLDS)] * SAMPLES
