"""Local SGD against a run without any MPI, written from the equations of `strategies.local_sgd`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from references import SLOTS, TOLERANCE, serial_local_sgd, serial_streaming
from runs import MODELS, Plan, assert_same_state, final, names_asked, newest, summary, thinned

from mpips.checkpoint import Checkpoint
from mpips.config import Config
from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import resolve
from mpips.optim import make_rule
from mpips.rounds.averaging import SlowMomentum

JOB = "--mode local_sgd --hidden 24 --eval-every 0 --checkpoint-every 0 --epochs 2"
CASES = {  # ranks, options; an epoch's last round is a partial one
    "sgd": (2, "--optimizer sgd --lr 0.1 --local-steps 4 --batch-size 16 --dtype float64"),
    "adam": (3, "--optimizer adam --local-steps 5 --batch-size 8 --dtype float64"),
    "single": (3, "--optimizer momentum --lr 0.02 --local-steps 3 --batch-size 32"),
    "alone": (1, "--optimizer adam --local-steps 7 --batch-size 16 --dtype float64"),
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
        "--outer-nesterov --outer-lr 0.7 --dtype float64",
    ),
    "packed": (
        3,
        "--optimizer adam --hidden 512 --local-steps 6 --batch-size 16 --local-slots keep "
        "--outer-momentum 0.9 --outer-nesterov --outer-lr 0.7 --codec fp16 --node-size 1 "
        "--dtype float64",
    ),
    "fragments": (
        3,
        "--optimizer adam --local-steps 6 --fragments 3 --batch-size 8 --local-slots keep "
        "--outer-momentum 0.4 --outer-nesterov --outer-lr 0.7 --dtype float64",
    ),
    "fragments, overlap": (
        4,
        "--optimizer adam --local-steps 8 --fragments 2 --overlap-steps 3 --mixing 0.6 "
        "--batch-size 8 --local-slots keep --outer-momentum 0.9 --outer-nesterov --outer-lr 0.7 "
        "--node-size 2 --schedule cosine --warmup-steps 2 --dtype float64",
    ),
    "fragments on nodes": (
        5,
        "--optimizer momentum --lr 0.02 --local-steps 6 --fragments 3 --overlap-steps 2 "
        "--batch-size 8 --local-slots keep --node-size 2 --servers 1 --outer-momentum 0.3 "
        "--clip 0.5",
    ),
    "fragments, packed": (
        2,
        "--optimizer adam --hidden 512 --local-steps 6 --fragments 2 --overlap-steps 1 "
        "--batch-size 16 --local-slots keep --outer-momentum 0.9 --outer-nesterov --outer-lr 0.7 "
        "--codec fp16 --node-size 1 --dtype float64",
    ),
    "tiny": (4, "--optimizer sgd --local-steps 3 --batch-size 100 --dtype float64"),
}
# Relative: what fp16 makes of the changes of each round, both ways; and vectors that a round sends.
PACKED = {"packed": 1e-2, "fragments, packed": 1e-2}
SENT = {"packed": 2, "fragments, packed": 1 / 2}
QUICK, QUICK_STOPPED = ("nodes", "kept", "fragments, overlap"), ("stopped kept fragments",)
STOPPED = {
    "stopped adam": (4, "--optimizer adam --local-steps 3 --outer-momentum 0.5"),
    "stopped kept": (4, "--optimizer adam --local-steps 3 --local-slots keep"),
    "stopped kept fragments": (
        4,
        "--optimizer adam --local-steps 6 --fragments 3 --overlap-steps 1 --local-slots keep "
        "--outer-momentum 0.5 --node-size 2",
    ),
    "stopped kept packed": (  # the owner's parameters, saved, are those of the other node too
        2,
        "--optimizer adam --hidden 1024 --local-steps 4 --fragments 2 --overlap-steps 1 "
        "--local-slots keep --codec int4 --node-size 1",
    ),
    "stopped kept stall": (
        4,
        "--optimizer momentum --local-steps 3 --local-slots keep --servers 1 --snapshot stall "
        "--checkpoint-every 2steps --outer-momentum 0.5",
    ),
    "stopped servers": (5, "--optimizer momentum --local-steps 4 --servers 2 --node-size 2"),
}


def rate_of(config: Config) -> Callable[[int, int], float]:
    """Return the rate of a local step, the warm-up's rounds cut into steps too."""
    lr, warm = config.learning_rate, config.warmup_steps * config.round_steps

    def rate(step: int, steps: int) -> float:
        risen = min(1.0, step / warm) if warm else 1.0
        if config.schedule == "constant":
            return lr * risen
        share = max(0.0, (step - 1 - warm) / (steps - warm))
        return lr * risen * 0.5 * (1 + np.cos(np.pi * share))

    return rate


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """All runs of this module."""
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    if "test_summary_counts_steps_and_rounds" in asked:
        asked.add("alone")
    for name in filter(asked.__contains__, CASES):
        ranks, options = CASES[name]
        plan.add(name, ranks, [*JOB.split(), *options.split()])
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
    local, keep = "--mode local_sgd --outer-momentum 0.5", "--local-slots keep"
    streaming = f"{local} {keep} --fragments 4 --overlap-steps 2"
    for k, (ranks, mode) in enumerate(
        [
            *((3, "--mode sync"), (4, local), (2, f"{local} --servers 1")),
            *((3, f"{local} {keep}"), (4, f"{local} {keep}"), (3, streaming), (4, streaming)),
            (3, f"{local} --fragments 1 --overlap-steps 0"),
            *((3, "--mode easgd"), (2, "--mode sync"), (3, "--mode async")),
        ]
    ):
        words = ["--hidden", "8", "--batch-size", "16", "--epochs", str(k + 1)]
        plan.add("modes", ranks, [*mode.split(), *words, *["--resume"] * (k > 0)])


@pytest.mark.launch
@pytest.mark.parametrize("name", thinned(CASES, QUICK))
def test_run_equals_a_serial_one(name: str, runs: Plan) -> None:
    ranks, options = CASES[name]
    config = resolve(parse_command_line([*JOB.split(), *options.split()]).options)
    workers, checkpoint = ranks - (config.servers or 0), final(runs.out(name))
    if config.streaming:
        owners = config.servers or ranks
        expected, slots, velocity = serial_streaming(config, workers, owners, rate_of(config))
    else:
        (expected, slots), velocity = serial_local_sgd(config, workers, rate_of(config)), None
    found = checkpoint.layout.views(checkpoint.read_params())
    norm = np.linalg.norm
    # Adam divides by roots that may be tiny, which enlarges what was rounded.
    tolerance = TOLERANCE[config.dtype] * (10 if config.optimizer == "adam" else 1)
    tolerance = PACKED.get(name, tolerance)
    for key, array in expected.items():
        assert norm(found[key] - array) <= tolerance * norm(array), key
    if config.local_slots == "keep" or config.streaming:
        pairs = own_slots(checkpoint, slots)
    else:
        names = checkpoint.slot_names[: len(slots)]
        pairs = [(checkpoint.read_slot(k), s) for k, s in zip(names, slots, strict=True)]
    if velocity is not None:
        pairs.append((checkpoint.read_slot("outer_velocity"), velocity))
    for slot, its in pairs:
        assert norm(slot - its) <= 10 * tolerance * norm(its)
    assert len(pairs) >= SLOTS[config.optimizer]
    assert ("outer_velocity" in checkpoint.slot_names) == bool(config.outer_step)


@pytest.mark.launch
@pytest.mark.parametrize("name", thinned(PACKED, ()))
def test_what_a_round_changes_is_packed(name: str, runs: Plan) -> None:
    found = summary(runs.out(name))
    plain = found["global_step"] * SENT[name] * found["parameters"] * 8
    assert found["bytes_sent"] == pytest.approx(plain / 4, rel=0.05)
    start = (CASES[name][0] - 1) * found["parameters"] * 8
    assert found["bytes_received"] == pytest.approx(plain / 4 + start, rel=0.05)


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
@pytest.mark.parametrize("name", thinned(STOPPED, QUICK_STOPPED))
def test_stopped_run_ends_bitwise_equal(name: str, runs: Plan) -> None:
    """With what each worker keeps, which differs between them."""
    whole, parts = (final(runs.out(f"{name} {kind}")) for kind in ("whole", "parts"))
    assert_same_state(whole, parts)
    workers = summary(runs.out(f"{name} whole"))["workers"]
    assert len(whole.workers) == ("kept" in name) * workers
    for key in whole.worker_names:
        a, b = np.empty((2, workers, whole.layout.size), whole.dtype)
        for worker in range(workers):
            whole.read_worker(key, worker, a[worker])
            parts.read_worker(key, worker, b[worker])
        np.testing.assert_array_equal(a, b)
        assert np.ptp(a, axis=0).any()


@pytest.mark.launch
def test_a_run_may_go_on_in_another_mode(runs: Plan) -> None:
    """No sample is lost or repeated; slots that the mode before had not begin at zero."""
    checkpoint = newest(runs.out("modes"))
    assert checkpoint.state["allocator"]["cursor"] == [11, 0]
    assert checkpoint.state["samples"] == 11 * 1438
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
