"""What must hold of a job that is over: exact counts, accounts, a bitwise twin, a serial run."""

import itertools
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import references
from references import SLOTS, TOLERANCE
from runs import Plan, assert_counts, assert_same_state, final, is_whole, starts_of, summary

from mpips.checkpoint import Checkpoint, list_checkpoints, open_checkpoint
from mpips.codecs import make_codec
from mpips.config import Config
from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import read_toml, resolve
from mpips.datasets import open_dataset
from mpips.datasets.ledger import SampleAllocator
from mpips.datasets.order import Order
from mpips.health.status_board import APPLYING
from mpips.problems.sparse import ROWS as WEIGHTS
from mpips.tables.saved_rows import find_rows
from mpips.tools.trace import read_run
from mpips.transport.push import HEADER_WORDS
from tests.chaos.exact import expected_counts, own, with_replicas, wrong_counts, wrong_growth
from tests.matrix.jobs import (
    CLOCK_BATCHES,
    FACTOR,
    JOBS,
    ORIGIN_STEPS,
    PAUSE_S,
    STEPS,
    N,
    epochs_of,
    samples_of,
    text_of,
    words_of,
)


def each(out: Path) -> list[Checkpoint]:
    """Return all whole checkpoints of a run but that of step 0."""
    found = [open_checkpoint(path) for path in list_checkpoints(out) if is_whole(path)]
    return [checkpoint for checkpoint in found if checkpoint.step]


def option(text: str, name: str, default: int) -> int:
    """Return the number behind an option."""
    found = re.search(rf"--{name} (\d+)", text)
    return int(found[1]) if found else default


def check_counts(plan: Plan, name: str) -> None:
    """Every batch is applied exactly once, at every checkpoint, and the accounts say so."""
    out, text, n = plan.out(name), text_of(name), samples_of(name)
    workers = summary(out)["workers"]
    assert_counts(final(out), n, None if "--steps" in text else epochs_of(name))
    for folder in list_checkpoints(out):
        assert_counts(open_checkpoint(folder), n)
    pushes = epochs_of(name) * -(-n // option(text, "batch-size", 32))
    if "--steps" in text:
        pushes = STEPS * workers
        assert summary(out)["steps"] == [STEPS] * workers
        assert summary(out)["stop_reason"] == "steps"
    if name == "counts, one batch":
        assert 0 in [worker["steps"] for worker in summary(out)["per_worker"]]
    s, staleness = summary(out), summary(out)["staleness"]
    assert s["pushes_sent"] == s["pushes_applied"] == s["global_step"] == pushes
    applied = [server["applied"] for server in s["per_server"] if server["bytes"]]
    assert set(applied) == {pushes}
    assert sum(staleness["histogram"]) == sum(applied)
    assert sum(s["steps"]) == sum(w["steps"] for w in s["per_worker"]) == pushes


def check_stops(plan: Plan, name: str) -> None:
    """Stops at random steps, and other numbers of workers and servers, lose and repeat nothing."""
    n = samples_of(name)
    assert_counts(final(plan.out(name)), n, epochs_of(name))
    assert summary(plan.out(name))["global_step"] == epochs_of(name) * (29 if n == N else 3)
    assert summary(plan.out(name))["resumed_from"]


def check_backup(plan: Plan, name: str) -> None:
    """Every push is in a round or dropped; all shards have as many updates at each checkpoint."""
    out, s = plan.out(name), summary(plan.out(name))
    folders = list_checkpoints(out)
    assert len(folders) > 1
    for found in map(open_checkpoint, folders):
        updates = found.layout.views(found.read_params())["updates"]
        np.testing.assert_allclose(updates, found.step, atol=1e-9)  # the mean of -1 is -1
    if name == "backup, stops":
        assert s["samples"] == epochs_of(name) * N
        assert final(out).state["allocator"]["pending"] == []
        assert final(out).state["allocator"]["cursor"] == [epochs_of(name), 0]
        return
    text = text_of(name)
    needed = s["workers"] - option(text, "backup-workers", 0)
    assert s["pushes_sent"] == s["pushes_applied"] == sum(s["steps"])
    if "--steps" in text:
        assert s["steps"] == [9] * s["workers"]
    else:
        assert s["samples"] == epochs_of(name) * N
    for server in s["per_server"]:
        taken = server["applied"] - server["pushes_dropped"]
        assert s["global_step"] <= taken <= needed * s["global_step"]
    dropped = sum(server["pushes_dropped"] for server in s["per_server"])
    assert sum(s["staleness"]["histogram"][1:]) == dropped
    assert final(out).step == s["global_step"]
    if "--trace" in text:
        lanes = read_run(out)
        told = [np.count_nonzero(lanes[o["rank"]].whats == APPLYING) for o in s["per_server"]]
        assert told == [server["applied"] for server in s["per_server"]]


def assert_conserved(checkpoint: Checkpoint, rounding: float = 0.0) -> bool:
    """Assert that what was applied and is kept is all gradients; returns whether any is kept."""
    assert wrong_counts(checkpoint, rounding) == []
    return bool(own(checkpoint, "residual").any())


def check_residuals(plan: Plan, name: str) -> None:
    """Parameters and residuals are all gradients, to the last bit, at each checkpoint."""
    out = plan.out(name)
    found = each(out)
    assert final(out).step == found[-1].step
    assert [assert_conserved(checkpoint) for checkpoint in found].count(True) > 0
    assert expected_counts(found[-1], N).tolist() == [epochs_of(name)] * N
    first = open_checkpoint(list_checkpoints(out)[0])
    assert (first.step, first.worker_names) == (0, ())


def check_replicas(plan: Plan, name: str) -> None:
    """Centre and replicas grow by the gradients between two checkpoints, and each batch counts."""
    out = plan.out(name)
    if "other worlds" in name:  # the centre is drawn by every batch, and not beyond
        counts = views_of(final(out))["counts"]
        assert (counts > 0).all()
        assert (counts < epochs_of(name)).all()
    else:
        found = with_replicas(each(out))
        assert len(found) > 1
        assert [text for pair in pairwise(found) for text in wrong_growth(*pair)] == []
    assert final(out).step == summary(out)["global_step"]
    assert final(out).state["samples"] == epochs_of(name) * N
    assert final(out).state["allocator"]["pending"] == []


def check_compensated(plan: Plan, name: str) -> None:
    """The problem has checked every read, and the final parameters."""
    assert summary(plan.out(name))["pushes_applied"] == ORIGIN_STEPS
    assert final(plan.out(name)).slot_names == (("mean_square",) if "adaptive" in name else ())


def check_means(plan: Plan, name: str) -> None:
    """With rate 32 a sample of a full step counts 1, one of a smaller step more: exact numbers."""
    checkpoint, order, expected = final(plan.out(name)), Order(N, 0, 0), np.zeros(N)
    steps = [(begin, min(begin + 32, N)) for begin in range(0, N, 32)]
    for epoch, (begin, end) in itertools.product(range(epochs_of(name)), steps):
        expected[order.sample_ids(epoch, begin, end)] += 32 / (end - begin)
    np.testing.assert_allclose(views_of(checkpoint)["counts"], expected, rtol=1e-14)
    np.testing.assert_array_equal(
        views_of(checkpoint)["updates"], 32.0 * epochs_of(name) * len(steps)
    )
    assert summary(plan.out(name))["pushes_applied"] == epochs_of(name) * len(steps)
    assert checkpoint.state["samples"] == epochs_of(name) * N


def check_delayed(plan: Plan, name: str) -> None:
    """A worker that is slowed has fewer batches where that is no round's matter."""
    s = summary(plan.out(name))
    ((slow, factor),) = s["inject_delay"].items()
    slow = int(slow)
    assert factor == FACTOR
    took_s = [w["compute_s"] / w["steps"] for w in s["per_worker"]]
    others = [w for k, w in enumerate(s["per_worker"]) if k != slow]
    assert min(w["compute_s"] / w["steps"] for w in others) < FACTOR * PAUSE_S <= took_s[slow]
    if s["mode"] == "async":
        assert all(w["steps"] > s["per_worker"][slow]["steps"] for w in others)
        assert_counts(final(plan.out(name)), 512, epochs=1)


KEEPS = ("topk", "onebit", "powersgd", "easgd", "keep")  # of these each has vectors of its own


def check_twins(plan: Plan, name: str) -> None:
    """A whole run and one in parts have the same bits in parameters, slots, and workers' own."""
    outs = [plan.out(f"{name} {kind}") for kind in ("whole", "parts")]
    whole, parted = map(final, outs)
    assert np.isfinite(whole.read_params()).all()
    assert np.ptp(whole.read_params()) > 0
    assert_same_state(whole, parted)
    assert starts_of(outs[1]) == 2 + ("local" in name)
    assert summary(outs[1])["samples"] == whole.state["samples"]
    assert whole.worker_names == parted.worker_names
    assert bool(whole.worker_names) == any(word in text_of(name) for word in KEEPS)
    assert whole.state.get("own") == parted.state.get("own")
    for key in whole.worker_names:
        a, b = own(whole, key), own(parted, key)
        assert np.any(a), key
        assert "kept" not in name or np.ptp(a, axis=0).any(), "workers differ"
        np.testing.assert_array_equal(a.view("u1"), b.view("u1"))


def check_schedules(plan: Plan, name: str) -> None:
    """A schedule ends with the run, in whatever world it goes on; at rate 0 nothing changes."""
    before, saved = map(open_checkpoint, list_checkpoints(plan.out(name))[-2:])
    assert saved.path == final(plan.out(name)).path
    assert np.abs(saved.read_params() - before.read_params()).max() > 1e-3
    last, position = saved.state, saved.state["schedule"]["position"]
    parts = JOBS[name]
    if "steps" in name:
        assert position == max(last["allocator"]["clocks"])
        assert set(last["allocator"]["clocks"]) == {int(parts[-1][1].split()[-1])}
    else:  # but for the last batch of an epoch
        per_epoch = -(-last["n_train"] // last["schedule"]["samples_per_update"])
        epochs = 2 * len(parts)
        assert position == pytest.approx(epochs * per_epoch, abs=epochs)


PACKED = 1e-2  # relative: what fp16 makes of the changes of each round, both ways


def config_of(plan: Plan, name: str) -> tuple[Config, int]:
    """Return the configuration of a job, and its workers."""
    ranks, words = words_of(plan, name)
    config = resolve(parse_command_line(words).options)
    return config, ranks - (config.servers or 0)


def near(pairs: Sequence[tuple[Any, Any]], tolerance: float) -> None:
    """Assert that arrays are those of a serial run, in their norm."""
    for found, expected in pairs:
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def views_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return checkpoint.layout.views(checkpoint.read_params())


def check_rounds(plan: Plan, name: str) -> None:
    """A synchronous run is one of large batches."""
    config, workers = config_of(plan, name)
    expected, found = references.serial_sync(config, workers), views_of(final(plan.out(name)))
    assert found.keys() == expected.keys()
    near([(found[key], expected[key]) for key in expected], TOLERANCE[config.dtype])


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


def check_local(plan: Plan, name: str) -> None:
    """Local SGD is that of its equations, with the slots, and each worker's own where kept."""
    config, workers = config_of(plan, name)
    checkpoint, velocity = final(plan.out(name)), None
    if config.streaming:
        owners = config.servers or workers
        expected, slots, velocity = references.serial_streaming(
            config, workers, owners, rate_of(config)
        )
    else:
        expected, slots = references.serial_local_sgd(config, workers, rate_of(config))
    # Adam divides by roots that may be tiny, which enlarges what was rounded.
    tolerance = TOLERANCE[config.dtype] * (10 if config.optimizer == "adam" else 1)
    tolerance = PACKED if "packed" in name else tolerance
    found = views_of(checkpoint)
    near([(found[key], expected[key]) for key in expected], tolerance)
    if config.local_slots == "keep" or config.streaming:
        pairs = [
            (own(checkpoint, key)[w], slots[w][k])
            for k, key in enumerate(checkpoint.worker_names)
            for w in range(workers)
        ]
    else:
        pairs = [*zip(map(checkpoint.read_slot, checkpoint.slot_names), slots, strict=False)]
    if velocity is not None:
        pairs.append((checkpoint.read_slot("outer_velocity"), velocity))
    near(pairs, 10 * tolerance)
    assert len(pairs) >= SLOTS[config.optimizer]
    assert ("outer_velocity" in checkpoint.slot_names) == bool(config.outer_step)
    told = summary(plan.out(name))
    if "packed" in name:  # each of two workers sends half of a fragment, a half of all
        plain = told["global_step"] / 2 * told["parameters"] * 8
        assert told["bytes_sent"] == pytest.approx(plain / 4, rel=0.05)
        start = (len(told["per_worker"]) - 1) * told["parameters"] * 8
        assert told["bytes_received"] == pytest.approx(plain / 4 + start, rel=0.05)
    if name == "local, alone":
        moved = 2 * -(-1438 // (7 * 16))
        assert told["global_step"] == told["pushes_sent"] == moved
        assert told["per_worker"][0]["steps"] == 2 * -(-1438 // 16)
        assert told["samples"] == 2 * 1438
        assert told["bytes_pushed"] == 3 * moved * told["parameters"] * 8


def check_elastic(plan: Plan, name: str) -> None:
    """Elastic averaging of one worker is that of its equations, without a stop; it is accounted."""
    config, _ = config_of(plan, name)
    expected, checkpoint = references.serial_easgd(config, config.epochs), final(plan.out(name))
    assert checkpoint.slot_names == ()
    tolerance = TOLERANCE[config.dtype] * (10 if config.optimizer == "adam" else 2)
    found = views_of(checkpoint)
    near([(found[key], expected[key]) for key in expected], tolerance)
    told, step = summary(plan.out(name)), config.batch_size * config.accumulate
    exchanges = config.epochs * -(-1438 // (step * config.tau))
    assert told["global_step"] == exchanges
    assert told["samples"] == config.epochs * 1438
    if len(JOBS[name]) == 1:  # else of the last start
        assert told["pushes_sent"] == told["pushes_applied"] == exchanges
        assert sum(w["steps"] for w in told["per_worker"]) == config.epochs * -(-1438 // step)


def check_rows(plan: Plan, name: str) -> None:
    """Tables in rounds are those of logistic regression in NumPy."""
    config, workers = config_of(plan, name)
    expected, found = _logistic(config, workers), final(plan.out(name))
    features = len(expected) - 1
    rows = find_rows(found, WEIGHTS, np.arange(features))[:, 0]
    near([(np.concatenate([found.read_params(), rows]), expected)], TOLERANCE[rows.dtype.name])
    told = summary(plan.out(name))["tables"][WEIGHTS]
    assert (told["changed"], told["again"], told["torn"]) == (features, 0, 0), told


def _logistic(c: Config, workers: int) -> np.ndarray:
    """Return bias and weights of logistic regression after large batches, in NumPy."""
    data = open_dataset(c)
    block = data.train.block(c.batch_size)
    order = Order(data.train.n, block, c.seed)
    allocator = SampleAllocator(data.train.n, c.step_size * workers, workers=1, epochs=c.epochs)
    x, labels = data.train.load(0, data.train.n, np.dtype("f8"))
    inputs = np.zeros((data.train.n, data.info.x_shape[0]))
    inputs[x.samples, x.indices] = x.values
    w, total = np.zeros((2, 1 + data.info.x_shape[0]))  # the bias comes first
    while (batch := allocator.next(0)) is not None:
        ids = order.sample_ids(*batch)
        samples, features = np.nonzero(inputs[ids])
        values = inputs[ids][samples, features]
        z = np.bincount(samples, values * w[1:][features], len(ids)) + w[0]
        delta = (1 / (1 + np.exp(-z)) - labels[ids]) / len(ids)
        sums = np.bincount(features, delta[samples] * values, len(w) - 1)
        g = np.concatenate([[delta.sum()], sums])
        norm = np.linalg.norm(g)
        assert not c.clip or norm > c.clip, "it is clipped"
        g *= c.clip / norm if c.clip else 1.0
        total += g * g
        w -= c.learning_rate * (g if c.optimizer == "sgd" else g / (np.sqrt(total) + c.eps))
    return np.asarray(w)


# What is reached without a codec, less a margin: where cores are few, gradients are staler, and one
# of the held-out digits is 0.003.
ACCURACY = {"adam": 0.94, "sgd": 0.93}
PARAMETERS = 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
CHOSEN = {"none", "fp16", "bf16", "int8"}  # among which auto chooses


def check_codec(plan: Plan, name: str) -> None:
    """Digits are learnt, and the summary has the bytes that were sent and read."""
    found, text = summary(plan.out(name)), text_of(name)
    assert found["accuracy"] >= (0.75 if "--epochs 5" in text else ACCURACY[found["optimizer"]])
    if "--node-size 2" in text:
        return
    push, pull = make_codec(found["codec"]), make_codec(found["pull_codec"])
    width = 8 if "float64" in text else 4
    assert found["parameters"] == PARAMETERS
    assert found["bytes_pushed"] == found["pushes_sent"] * width * PARAMETERS
    body = push.wire_bytes(PARAMETERS, f"f{width}") if push else width * PARAMETERS
    if "topk" not in found["codec"]:  # which sends more at first
        assert found["bytes_sent"] == found["pushes_sent"] * (body + 8 * HEADER_WORDS)
    if name == "codec, dgc":
        assert found["pushes_sent"] * body < found["bytes_sent"] < found["bytes_pushed"] / 10
    if name == "codec, auto":
        assert {found["codec"], found["pull_codec"]} <= CHOSEN
        assert read_toml(plan.out(name) / "config.toml")["codec"] == "auto"
    if name.startswith(
        "codec, pull"
    ):  # one a step, and perhaps one more of each worker, which it left
        assert pull is not None
        one, pushes = pull.wire_bytes(PARAMETERS, f"f{width}"), found["pushes_sent"]
        assert pushes * one <= found["bytes_received"] <= (pushes + 2) * one
        assert found["bytes_pulled"] == found["bytes_received"] // one * width * PARAMETERS


def check_hybrid(plan: Plan, name: str) -> None:
    """At every checkpoint parameters and rows have counted the same samples, each once."""
    for checkpoint in each(plan.out(name)):
        assert_counts(checkpoint, checkpoint.state["n_train"])
    told = summary(plan.out(name))
    assert told["pushes_sent"] == told["pushes_applied"]
    assert 0 <= told["clock_distance_max"] <= 1


def check_summed(plan: Plan, name: str) -> None:
    """Digits are learnt in rounds with codecs, nearly as without."""
    found = summary(plan.out(name))
    assert found["accuracy"] >= {"summed, signs": 0.95, "summed, backup": 0.93}.get(name, 0.96)
    if name == "summed, auto":
        assert {found["codec"], found["pull_codec"]} <= CHOSEN


def check_nan(plan: Plan, name: str) -> None:
    """A gradient that is not finite ends the run."""
    found = summary(plan.out(name))
    assert found["stop_reason"] == "diverged"
    assert found["global_step"] < (20 if "summed" in name else 100)
    assert not (plan.out(name) / "DONE").exists()


def check_clocked(plan: Plan, name: str) -> None:
    """The problem has checked every read; the summary tells the largest distance of clocks."""
    s, slow = summary(plan.out(name)), int(text_of(name).split()[1])
    bound = option(text_of(name), "staleness-bound", 0)
    assert s["pushes_applied"] == s["pushes_sent"] == CLOCK_BATCHES
    assert 0 <= s["clock_distance_max"] <= bound
    if slow < JOBS[name][0][0] and s["mode"] == "ssp":  # the others run ahead as far as they may
        assert s["clock_distance_max"] == bound
    hybrid = s["mode"] == "hybrid"
    for table in s.get("tables", {}).values():  # rows of remote servers were asked for before steps
        assert (table["ahead"] > 0) == (bound > 0 or not hybrid)
        assert table["pulled"] == CLOCK_BATCHES**2


def check(plan: Plan, name: str) -> None:
    """Judge a job of `tests.matrix.jobs.JOBS` by its oracle."""
    judge: Callable[[Plan, str], None] = globals()[f"check_{name.partition(',')[0]}"]
    judge(plan, name)
