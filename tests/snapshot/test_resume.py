"""A run that was stopped or killed and resumed ends as if nothing had happened."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, Running
from runs import (
    ENDLESS,
    MODELS,
    SAVED,
    Plan,
    assert_same_state,
    cases,
    counting,
    final,
    is_whole,
    kill_once,
    names_asked,
    newest,
    samples_file,
    starts_of,
    summary,
    thinned,
    wait_until_training,
)

from mpips.checkpoint import list_checkpoints, open_checkpoint
from mpips.checkpoint.__main__ import main as checkpoint_command
from mpips.config import Config
from mpips.config.command_line import parse_command_line
from mpips.session.folder import find_run, save_config
from tests.chaos.exact import own

pytestmark = pytest.mark.launch

SYNC = ("--mode", "sync", "--hidden", "16")
LOCK = "--mode ssp --staleness-bound 0 --optimizer sgd --hidden 600"  # of one worker: nothing races
EASGD = "--mode easgd --hidden 600"
STOPPED = cases(f"""
  momentum: 4 --optimizer momentum
  adam: 5 --optimizer adam --servers 2 --schedule step --step-every 20
  nodes of two: 5 --optimizer nesterov --clip 0.1 --node-size 2 --epochs 3
  nodes of one: 3 --optimizer adagrad --node-size 1 --servers 1
  allreduce: 4 --optimizer adamw --reduce allreduce --weight-decay 0.1
  double: 1 --optimizer rmsprop --dtype float64 --batch-size 64
  stalled: 4 --optimizer adam --snapshot stall --checkpoint-every 5steps --epochs 3
  topk: 2 {LOCK} --codec topk --topk-ratio 0.1 --node-size 1
  dgc: 3 {LOCK} --codec topk --topk-momentum 0.9 --topk-warmup 90 --servers 2 --node-size 1
  onebit: 3 {LOCK} --codec onebit --servers 2 --node-size 2 --dtype float64
  easgd: 2 {EASGD} --tau 2
  easgd adam: 3 {EASGD} --optimizer adam --tau 3 --servers 2 --schedule step --step-every 9
  easgd single: 2 {EASGD} --optimizer momentum --tau 2 --snapshot stall
""")
QUICK = ("nodes of two", "dgc")
# A schedule that ends with the run: ranks and options of each part.
SCHEDULED = {
    "fewer ranks": ((6, "--mode sync --epochs 2"), (2, "--epochs 4")),
    "and again": (
        (4, "--mode async --epochs 2"),
        (4, "--mode sync --servers 0 --epochs 4"),
        (6, "--epochs 6"),
    ),
    "more ranks, steps": ((2, "--mode sync --steps 20"), (6, "--steps 30")),
    "servers, steps": ((4, "--mode async --steps 20"), (5, "--mode sync --servers 0 --steps 40")),
}
SCHEDULED_QUICK = ("servers, steps",)
FROZEN = ("async", "sync")
COUNTED = "sync counting"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """All runs of this module that need no launcher of their own."""
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    for name in filter(asked.__contains__, STOPPED):
        ranks, options = STOPPED[name]
        words = ["--problem", f"{MODELS}:StoppingMLP", *SYNC, "--batch-size", "24", "--keep", "100"]
        words += ["--epochs", "2", "--eval-every", "0", *options.split()]
        plan.add(f"{name} whole", ranks, words)
        plan.add(f"{name} parts", ranks, [*words, "--epochs", str(ENDLESS)], code=SAVED)
        plan.add(f"{name} parts", ranks, [*words, "--resume"])
    for name in filter(asked.__contains__, SCHEDULED):
        words = [str(ROOT / "jobs/digits-sync.toml"), "--schedule", "cosine", "--eval-every", "0"]
        words += ["--keep", "9", "--checkpoint-every", "0"]
        for k, (ranks, options) in enumerate(SCHEDULED[name]):
            plan.add(name, ranks, [*(["--resume"] if k else words), *options.split()])
    for mode in filter(asked.__contains__, FROZEN):
        words = ["--problem", f"{MODELS}:FrozenLater", "--mode", mode, "--optimizer", "adagrad"]
        words += ["--keep", "100"]
        for epochs, ranks, servers in ((1, 5, 3), (2, 3, 1), (3, 7, 5)):
            options = ["--epochs", str(epochs), "--servers", str(servers), *resume(epochs - 1)]
            plan.add(f"frozen {mode}", ranks, [*words, *options])
    if "test_sync_counts_on_other_numbers_of_workers" in asked:
        add_sync_counting(plan)
    plan.run(300)
    return plan


def resume(part: int) -> list[str]:
    """Return the option for part 0, 1, ... of a run."""
    return ["--resume"] if part else []


def add_sync_counting(plan: Plan) -> None:
    """Add a run on 4, 2, and 1 workers, each stopped in the midst of an epoch by ``--steps``."""
    data = counting(samples_file(plan.folder, 128), kind="MeanCounting")
    for steps, ranks, servers in ((6, 4, 0), (6 + 9, 4, 2), (6 + 9 + 5, 1, 0)):
        rate = 8 * (ranks - servers)
        words = ["--mode", "sync", "--batch-size", "8", "--steps", str(steps)]
        words += ["--servers", str(servers), "--lr", str(rate)]
        plan.add(COUNTED, ranks, [*data, *words, *resume(steps - 6)])


@pytest.mark.parametrize("name", thinned(STOPPED, QUICK))
def test_stopped_run_ends_bitwise_equal(name: str, runs: Plan) -> None:
    """A whole run and one in parts have the same bits in parameters, slots, and workers' own."""
    whole, parted = (final(runs.out(f"{name} {kind}")) for kind in ("whole", "parts"))
    assert np.isfinite(whole.read_params()).all()
    assert np.ptp(whole.read_params()) > 0
    assert_same_state(whole, parted)
    assert starts_of(runs.out(f"{name} parts")) == 2
    assert summary(runs.out(f"{name} parts"))["samples"] == whole.state["samples"]
    assert whole.worker_names == parted.worker_names
    assert bool(whole.worker_names) == ("--codec" in STOPPED[name][1] or "easgd" in name)
    assert whole.state.get("own") == parted.state.get("own")
    for key in whole.worker_names:
        a, b = own(whole, key), own(parted, key)
        assert np.any(a), key
        np.testing.assert_array_equal(a.view("u1"), b.view("u1"))


@pytest.mark.parametrize("name", thinned(SCHEDULED, SCHEDULED_QUICK))
def test_a_schedule_ends_with_the_run(name: str, runs: Plan) -> None:
    """In whatever world it goes on; at rate 0 nothing would change."""
    before, saved = map(open_checkpoint, list_checkpoints(runs.out(name))[-2:])
    assert saved.path == final(runs.out(name)).path
    assert np.abs(saved.read_params() - before.read_params()).max() > 1e-3
    last, position = saved.state, saved.state["schedule"]["position"]
    if "steps" in name:
        assert position == max(last["allocator"]["clocks"])
        assert set(last["allocator"]["clocks"]) == {int(SCHEDULED[name][-1][1].split()[-1])}
    else:  # but for the last batch of an epoch
        per_epoch = -(-last["n_train"] // last["schedule"]["samples_per_update"])
        epochs = 2 * len(SCHEDULED[name])
        assert position == pytest.approx(epochs * per_epoch, abs=epochs)


def export(out: Path, step: int) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint as the command line exports them."""
    file = out / f"{step}.npz"
    assert checkpoint_command(["export", str(out), "--step", str(step), "-o", str(file)]) == 0
    with np.load(file) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", thinned(FROZEN, ["async"]))
def test_checkpoint_of_3_servers_is_that_of_1_and_of_5(name: str, runs: Plan) -> None:
    """Each run reads the one before it, changes nothing, and saves by its own servers."""
    out = runs.out(f"frozen {name}")
    first, last = summary_steps(out)
    found = {len(open_checkpoint(p).shards): open_checkpoint(p) for p in list_checkpoints(out)}
    assert set(found) == {3, 1, 5}
    assert found[3].step == first
    assert found[5].step == last
    arrays = {servers: export(out, c.step) for servers, c in found.items()}
    assert {name.split("/")[0] for name in arrays[3]} == {"params", "slots"}
    for servers in (1, 5):
        assert arrays[servers].keys() == arrays[3].keys()
        for name, array in arrays[3].items():
            np.testing.assert_array_equal(arrays[servers][name], array, strict=True)
    assert any(np.ptp(array) > 0 for array in arrays[3].values())


def summary_steps(out: Path) -> tuple[int, int]:
    """Return the steps of the first checkpoint after step 0 and of the last."""
    steps = [open_checkpoint(p).step for p in list_checkpoints(out)]
    return min(s for s in steps if s), max(steps)


def test_sync_counts_on_other_numbers_of_workers(runs: Plan) -> None:
    """4 workers x 6 rounds, then 2 x 9 and 1 x 5 more, of 8 samples each: 376 samples in all."""
    checkpoint = final(runs.out(COUNTED))
    samples = 8 * (4 * 6 + 2 * 9 + 1 * 5)
    counts = checkpoint.layout.views(checkpoint.read_params())["counts"]
    assert checkpoint.state["samples"] == samples == counts.sum()
    assert set(counts.tolist()) == {samples // 128, samples // 128 + 1}


def assert_as_if_nothing_happened(out: Path, ranks: int, options: list[str]) -> None:
    """Resume a run to the end of an epoch, do it all in a run without a stop, and compare."""
    epochs = newest(out).state["allocator"]["cursor"][0] + 1
    words = [*options, "--epochs", str(epochs)]
    plan = Plan(out.parent)
    plan.add("out", ranks, [*words, "--resume", "auto"])
    plan.add("whole", ranks, words)
    plan.run(120)
    assert_same_state(final(out), final(plan.out("whole")))


SIGNALS = (signal.SIGUSR1, signal.SIGINT)


@pytest.mark.long
def test_signals_to_a_sync_job(tmp_path: Path) -> None:
    """A run stopped by signals from outside ends bitwise equal to one that was not."""
    out, common = tmp_path / "out", ["--problem", f"{MODELS}:SlowMLP", *SYNC]
    for k, number in enumerate(SIGNALS):
        words = [*common, "--out", str(out), "--epochs", str(ENDLESS), *resume(k)]
        with Running(3, ["-m", "mpips.train", *words], tmp_path) as job:
            wait_until_training(job, out, k + 1)
            time.sleep(random.uniform(0, 0.3))
            os.kill(random.choice(job.ranks()), number)
            job.wait(90).check(SAVED)
        assert not (out / "DONE").exists()
        assert summary(out)["stop_reason"] == number.name
        assert summary(out)["global_step"] == newest(out).step
    assert_as_if_nothing_happened(out, 3, common)


@pytest.mark.long
@pytest.mark.parametrize(
    "kills",
    [pytest.param(2, marks=pytest.mark.other_mpi), pytest.param(11, marks=pytest.mark.one_mpi)],
)
def test_killed_sync_run_ends_bitwise_equal(kills: int, tmp_path: Path) -> None:
    """SIGKILL of the whole job, often while a checkpoint is written, leaves no trace."""
    out = tmp_path / "out"
    common = ["--problem", f"{MODELS}:SlowMLP", *SYNC, "--hidden", "1000,500"]
    common += ["--checkpoint-every", "5steps", "--servers", "1", "--batch-size", "8"]
    writing = 0
    for k in range(kills):
        words = [*common, "--out", str(out), "--epochs", str(ENDLESS), "--resume", "auto"]
        when = "write" if k % 2 == 0 or k > 7 else random.choice(("start", "training"))
        writing += kill_once(out, 3, words, when)
        whole = [p for p in list_checkpoints(out) if is_whole(p)]
        assert not whole or newest(out).path == whole[-1]
    if kills > 10:
        assert writing >= 2, f"only {writing} kills in the midst of a checkpoint"
    assert_as_if_nothing_happened(out, 3, common)


@pytest.mark.parametrize(
    "left", ["config.toml.tmp", "config.toml", "checkpoints/step-000000000000/"]
)
def test_run_killed_before_its_first_checkpoint_begins_anew(left: str, tmp_path: Path) -> None:
    """``--resume auto`` starts where a killed job has left a folder, and nothing to continue."""
    line = parse_command_line(["--out", str(tmp_path), "--resume", "auto", "--epochs", "3"])
    if left.endswith("/"):
        (tmp_path / left).mkdir(parents=True)
        (tmp_path / left / "shard-0000.h5.tmp").write_text("half")
    if left != "config.toml.tmp":
        save_config(tmp_path, Config())
    (tmp_path / "config.toml.tmp").write_text("epo")
    (tmp_path / ".lock").touch()  # as each start does first
    found = find_run(line)
    assert (found.out, found.resumed, found.checkpoint) == (tmp_path, False, None)
    assert found.config.epochs == 3
