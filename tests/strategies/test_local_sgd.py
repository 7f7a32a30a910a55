"""Local SGD against a run without any MPI, written from the equations of `strategies.local_sgd`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from references import SLOTS, TOLERANCE, serial_local_sgd
from runs import MODELS, Plan, assert_same_state, final, names_asked, newest, summary, thinned

from mpips.checkpoint import Checkpoint
from mpips.config import Config
from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import resolve
from mpips.rounds.averaging import Average, SlowMomentum

JOB = "--mode local_sgd --hidden 24 --eval-every 0 --checkpoint-every 0 --epochs 2"
CASES = {  # ranks, options; an epoch's last round is a partial one
    "sgd": (2, "--optimizer sgd --lr 0.1 --local-steps 4 --batch-size 16 --dtype float64"),
    "adam": (3, "--optimizer adam --local-steps 5 --batch-size 8 --dtype float64"),
    "single": (3, "--optimizer momentum --lr 0.02 --local-steps 3 --batch-size 32"),
    "alone": (1, "--optimizer adam --local-steps 7 --batch-size 16 --dtype float64"),
    "outer": (
        3,
        "--optimizer adam --local-steps 6 --batch-size 8 --outer-momentum 0.5 --dtype float64",
    ),
    "nodes": (
        5,
        "--optimizer momentum --lr 0.02 --local-steps 4 --batch-size 8 --node-size 2 --servers 1 "
        "--outer-momentum 0.3 --clip 0.5 --dtype float64",
    ),
    "allreduce": (
        3,
        "--optimizer adam --local-steps 6 --batch-size 8 --outer-momentum 0.5 --reduce allreduce "
        "--accumulate 2 --schedule cosine --dtype float64",
    ),
    "kept": (
        3,
        "--optimizer adam --local-steps 6 --batch-size 8 --local-slots keep --outer-momentum 0.4 "
        "--dtype float64",
    ),
    "kept on nodes": (
        5,
        "--optimizer momentum --lr 0.02 --local-steps 5 --batch-size 8 --local-slots keep "
        "--node-size 2 --servers 2 --dtype float64",
    ),
    "tiny": (4, "--optimizer sgd --local-steps 3 --batch-size 100 --dtype float64"),
}
QUICK, QUICK_STOPPED = ("nodes", "kept"), ("stopped kept",)
SAME = ("--optimizer", "sgd", "--epochs", "2", "--hidden", "16", "--dtype", "float64")
STOPPED = {
    "stopped adam": (4, "--optimizer adam --local-steps 3 --outer-momentum 0.5"),
    "stopped kept": (4, "--optimizer adam --local-steps 3 --local-slots keep"),
    "stopped kept stall": (
        4,
        "--optimizer momentum --local-steps 3 --local-slots keep --servers 1 --snapshot stall "
        "--checkpoint-every 2steps --outer-momentum 0.5",
    ),
    "stopped servers": (5, "--optimizer momentum --local-steps 4 --servers 2 --node-size 2"),
}


def rate_of(config: Config) -> Callable[[int, int], float]:
    lr = config.learning_rate
    if config.schedule == "constant":
        return lambda r, rounds: lr
    return lambda r, rounds: lr * 0.5 * (1 + np.cos(np.pi * (r - 1) / rounds))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """All runs of this module."""
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    if "test_summary_counts_steps_and_rounds" in asked:
        asked.add("alone")
    for name in filter(asked.__contains__, CASES):
        ranks, options = CASES[name]
        plan.add(name, ranks, [*JOB.split(), *options.split()])
    if "test_one_local_step_of_sgd_is_a_synchronous_round" in asked:
        plan.add("sync", 3, ["--mode", "sync", *SAME])
        plan.add("one step", 3, ["--mode", "local_sgd", "--local-steps", "1", *SAME])
    for name in filter(asked.__contains__, STOPPED):
        ranks, options = STOPPED[name]
        words = ["--problem", f"{MODELS}:StoppingMLP", "--mode", "local_sgd", "--hidden", "8"]
        words += ["--batch-size", "8", *options.split(), "--epochs"]
        plan.add(f"{name} whole", ranks, [*words, "2"])
        for k in range(2):
            more = ["1000000", *["--resume"] * k]
            plan.add(f"{name} parts", ranks, [*words, *more], code=85)
        plan.add(f"{name} parts", ranks, [*words, "2", "--resume"])
    if "test_a_run_may_go_on_in_another_mode" in asked:
        add_changes_of_mode(plan)
    plan.run(250)
    return plan


def add_changes_of_mode(plan: Plan) -> None:
    """Add a run that begins in rounds of gradients, goes on locally, and then asynchronously."""
    words = ("--hidden", "8", "--batch-size", "16", "--epochs")
    plan.add("modes", 3, ["--mode", "sync", *words, "1"])
    local = ["--mode", "local_sgd", "--outer-momentum", "0.5"]
    plan.add("modes", 4, [*local, *words, "2", "--resume"])
    plan.add("modes", 2, [*local, *words, "3", "--servers", "1", "--resume"])
    plan.add("modes", 3, [*local, "--local-slots", "keep", *words, "4", "--resume"])
    plan.add("modes", 4, [*local, "--local-slots", "keep", *words, "5", "--resume"])
    plan.add("modes", 3, ["--mode", "async", *words, "6", "--resume"])


@pytest.mark.launch
@pytest.mark.parametrize("name", thinned(CASES, QUICK))
def test_run_equals_a_serial_one(name: str, runs: Plan) -> None:
    ranks, options = CASES[name]
    config = resolve(parse_command_line([*JOB.split(), *options.split()]).options)
    expected, slots = serial_local_sgd(config, ranks - (config.servers or 0), rate_of(config))
    checkpoint = final(runs.out(name))
    found = checkpoint.layout.views(checkpoint.read_params())
    norm = np.linalg.norm
    # Adam divides by roots that may be tiny, which enlarges what was rounded.
    tolerance = TOLERANCE[config.dtype] * (10 if config.optimizer == "adam" else 1)
    for key, array in expected.items():
        assert norm(found[key] - array) <= tolerance * norm(array), key
    if config.local_slots == "keep":
        pairs = own_slots(checkpoint, slots)
    else:
        names = checkpoint.slot_names[: len(slots)]
        pairs = [(checkpoint.read_slot(k), s) for k, s in zip(names, slots, strict=True)]
    for slot, its in pairs:
        assert norm(slot - its) <= 10 * tolerance * norm(its)
    assert len(pairs) >= SLOTS[config.optimizer]
    assert ("outer_velocity" in checkpoint.slot_names) == bool(config.outer_momentum)


def own_slots(checkpoint: Checkpoint, expected: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each worker's own slots as they were saved, and as they should be."""
    pairs = []
    for worker, slots in enumerate(expected):
        for name, slot in zip(checkpoint.worker_names, slots, strict=True):
            found = np.empty_like(slot)
            checkpoint.read_worker(name, worker, found)
            pairs.append((found, slot))
    return pairs


@pytest.mark.launch
@pytest.mark.parametrize("name", thinned([n for n in STOPPED if "kept" in n], QUICK_STOPPED))
def test_stopped_run_keeps_each_worker_s_slots(name: str, runs: Plan) -> None:
    whole, parts = (final(runs.out(f"{name} {kind}")) for kind in ("whole", "parts"))
    workers = len(whole.contents.workers)
    assert workers == summary(runs.out(f"{name} whole"))["workers"] > 1
    for key in whole.worker_names:
        a, b = np.empty((2, workers, whole.layout.size), whole.dtype)
        for worker in range(workers):
            whole.read_worker(key, worker, a[worker])
            parts.read_worker(key, worker, b[worker])
        np.testing.assert_array_equal(a, b)
        assert np.ptp(a, axis=0).any()  # they differ between workers


@pytest.mark.launch
def test_one_local_step_of_sgd_is_a_synchronous_round(runs: Plan) -> None:
    a, b = (final(runs.out(name)) for name in ("sync", "one step"))
    assert a.step == b.step
    np.testing.assert_allclose(a.read_params(), b.read_params(), rtol=1e-11, atol=1e-14)


@pytest.mark.launch
@pytest.mark.parametrize("name", thinned(STOPPED, QUICK_STOPPED))
def test_stopped_run_ends_bitwise_equal(name: str, runs: Plan) -> None:
    assert_same_state(final(runs.out(f"{name} whole")), final(runs.out(f"{name} parts")))


@pytest.mark.launch
def test_a_run_may_go_on_in_another_mode(runs: Plan) -> None:
    """No sample is lost or repeated; slots that the mode before had not begin at zero."""
    checkpoint = newest(runs.out("modes"))
    assert checkpoint.state["handout"]["cursor"] == [6, 0]
    assert checkpoint.state["samples"] == 6 * 1438
    assert checkpoint.slot_names == ("m", "v")
    assert summary(runs.out("modes"))["mode"] == "async"
    assert np.isfinite(checkpoint.read_params()).all()


@pytest.mark.launch
def test_summary_counts_steps_and_rounds(runs: Plan) -> None:
    """1438 samples, 48 a round: 30 rounds an epoch, the last of them of 46 samples, 3 steps."""
    found, moved = summary(runs.out("alone")), 2 * -(-1438 // (7 * 16))
    assert found["global_step"] == found["pushes_sent"] == moved
    assert found["per_worker"][0]["steps"] == 2 * -(-1438 // 16)
    assert found["samples"] == 2 * 1438
    assert found["staleness"]["max"] == 0
    assert found["bytes_pushed"] == 3 * moved * found["parameters"] * 8


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rules_of_averaging(dtype: str) -> None:
    rng = np.random.default_rng(0)
    w, mean, velocity = (rng.standard_normal(5000).astype(dtype) for _ in range(3))
    params = w.copy()
    Average().apply(params, mean, (), 1, 0.1)
    np.testing.assert_array_equal(params, mean)
    params, v = w.copy(), velocity.copy()
    SlowMomentum(momentum=0.5).apply(params, mean, (v,), 1, 0.1)
    np.testing.assert_array_equal(v, w.dtype.type(0.5) * velocity + (w - mean))
    np.testing.assert_array_equal(params, w - v)
    with pytest.raises(ValueError, match="one length"):
        SlowMomentum().apply(params, mean[1:], (v,), 1, 0.1)
