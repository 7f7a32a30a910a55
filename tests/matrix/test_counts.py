"""Every batch is applied exactly once, whatever happens: proved by counting."""

import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from launch import Running, train
from runs import (
    ENDLESS,
    SAVED,
    Plan,
    assert_counts,
    counting,
    final,
    is_whole,
    kill_once,
    newest,
    samples_file,
    summary,
    wait_until_training,
)

from mpips.checkpoint import Checkpoint, list_checkpoints
from tests.chaos.exact import expected_counts, own
from tests.matrix.jobs import (
    CLOCK_BATCHES,
    FAULTY,
    JOBS,
    ROUND_WORDS,
    TOPK,
    WIDE,
    N,
    clocks,
    of_matrix,
)
from tests.matrix.oracles import assert_conserved, check, each

pytestmark = pytest.mark.launch
WORLDS = ((3, 2), (1, 1), (4, 2), (2, 3))  # workers, servers; shares are exact


def add_refused(plan: Plan) -> None:
    words = [*counting(samples_file(plan.folder, 6)), "--mode", "sync", "--batch-size", "2"]
    words += ["--servers", "3", "--backup-workers", "1", "--hidden", "1"]
    plan.add("refused", 5, words, code=2)


def add_late(plan: Plan) -> None:
    words = [*counting(samples_file(plan.folder, 40), kind="SlowCounting"), *ROUND_WORDS.split()]
    words += ["--servers", "1", "--backup-workers", "1", "--inject-delay", "0:150,1:450"]
    plan.add("late", 3, [*words, "--steps", "1", "--checkpoint-every", "1steps"])


def add_worlds(plan: Plan) -> None:
    slow = [*counting(samples_file(plan.folder, N), kind="SlowCounting"), *WIDE.split()]
    for k, (workers, servers) in enumerate(WORLDS):
        more = ["--servers", str(servers), "--epochs", str(k + 1), *["--resume"] * (k > 0)]
        plan.add("worlds", workers + servers, [*slow, *TOPK.split(), "--node-size", "1", *more])


MORE = {
    "test_the_end_is_saved_though_its_gradients_were_too_late": add_late,
    "test_what_no_round_can_do_is_refused": add_refused,
    "test_other_worlds_share_out_the_sum": add_worlds,
}
KINDS = ("counts", "stops", "backup", "hybrid", "residuals", "replicas", "clocked")
STALE = ("compensated", "means", "delayed")
COMPENSATED = {name for name in JOBS if name.startswith("compensated")}
NEEDS = {"test_something_was_compensated": COMPENSATED}


@pytest.mark.parametrize("name", of_matrix(*KINDS, *STALE))
def test_job(name: str, runs: Plan) -> None:
    check(runs, name)


@pytest.mark.one_mpi
def test_the_end_is_saved_though_its_gradients_were_too_late(runs: Plan) -> None:
    """The last checkpoint replaces one of the same step, and knows all that was handled."""
    s, state = summary(runs.out("late")), final(runs.out("late")).state
    assert s["global_step"] + s["per_server"][0]["pushes_dropped"] == 2
    assert (state["allocator"]["pending"], state["allocator"]["clocks"]) == ([], [1, 1])
    assert state["samples"] == s["samples"]


@pytest.mark.one_mpi
def test_what_no_round_can_do_is_refused(runs: Plan) -> None:
    told = "servers 3 for 7 parameters, expected a share for each"
    assert [told in line for line in runs.errors()].count(True) == 5


@pytest.mark.long
@pytest.mark.one_mpi
def test_something_was_compensated(runs: Plan) -> None:
    assert max(summary(runs.out(name))["staleness"]["max"] for name in COMPENSATED) > 0


def test_without_a_bound_the_check_bites(tmp_path: Path) -> None:
    """In mode async the same problem finds reads that lack what is promised."""
    words = clocks(samples_file(tmp_path, CLOCK_BATCHES), 4, "1 1 --mode async")
    done = train(4, *words, "--out", str(tmp_path / "out"), cwd=tmp_path).check(1)
    assert re.search(r"updates .* are missing|own pushes are missing", done.output), done.output


@pytest.mark.long
@pytest.mark.one_mpi
def test_a_worker_that_has_failed_is_in_no_checkpoint(tmp_path: Path) -> None:
    """The last rank fails in the midst of its local steps: no replica is saved as it is then."""
    failing = ["--problem", f"{FAULTY}:NanLossLate", "--mode", "easgd", "--tau", "3"]
    failing += ["--keep", "100", "--batch-size", "8", "--checkpoint-every", "1steps", "--quiet"]
    found = list[Checkpoint]()
    for out in (tmp_path / "0", tmp_path / "1"):
        train(6, *failing, "--out", str(out), cwd=tmp_path).check(1)
        assert summary(out)["stop_reason"] == "diverged"
        found += each(out)
    assert found
    for checkpoint in found:
        steps = [numbers["steps"] for numbers in checkpoint.state["own"]]
        assert steps == [3 * clock for clock in checkpoint.state["allocator"]["clocks"]]
        assert np.isfinite(own(checkpoint, "replica")).all()


@pytest.mark.long
@pytest.mark.one_mpi
def test_other_worlds_share_out_the_sum(runs: Plan) -> None:
    """Nothing is lost while every shard is far from every worker, and large enough to be packed."""
    found = each(runs.out("worlds"))
    assert {len(checkpoint.workers) for checkpoint in found} == {n for n, _ in WORLDS}
    assert [assert_conserved(checkpoint) for checkpoint in found].count(True) >= len(WORLDS)
    assert expected_counts(final(runs.out("worlds")), N).tolist() == [len(WORLDS)] * N


def stop(out: Path, ranks: int, words: list[str], number: int, starts: int, who: str) -> None:
    """Start or resume a run, let it get on, and ask `who` to stop it."""
    with Running(ranks, ["-m", "mpips.train", *words, "--out", str(out)], out.parent) as job:
        wait_until_training(job, out, starts)
        time.sleep(random.uniform(0, 0.3))
        os.kill(job.process.pid if who == "mpirun" else random.choice(job.ranks()), number)
        job.wait(90).check(SAVED)
    assert not (out / "DONE").exists()
    assert summary(out)["stop_reason"] == signal.Signals(number).name


def test_signals_to_a_job(tmp_path: Path) -> None:
    """Signals from outside save the run and end it with code 85; what follows is exact."""
    out, step = tmp_path / "out", 0
    common = counting(samples_file(tmp_path, N), kind="SlowCounting")
    for k, (ranks, options, number, who) in enumerate((
        (4, "--servers 2 --node-size 2", signal.SIGUSR1, "mpirun"),
        (2, "--servers 1", signal.SIGTERM, "rank"),
    )):  # fmt: skip
        words = [*common, *options.split(), *["--resume"] * k, "--epochs", str(ENDLESS)]
        stop(out, ranks, words, number, k + 1, who)
        assert_counts(newest(out), N)
        assert newest(out).step == summary(out)["global_step"] > step
        step = newest(out).step
    finish(out, [*common, "--resume", "--servers", "2"])


def finish(out: Path, words: list[str]) -> None:
    """Have a run go on to the end of its epoch, and judge it."""
    whole = any(is_whole(folder) for folder in list_checkpoints(out))
    epochs = newest(out).state["allocator"]["cursor"][0] + 1 if whole else 1
    line = [*words, "--out", str(out), "--epochs", str(epochs)]
    train(3, *line, cwd=out.parent, timeout_s=120).check()
    assert_counts(final(out), N, epochs)


@pytest.mark.parametrize(
    "kills", [2, pytest.param(11, marks=[pytest.mark.long, pytest.mark.one_mpi])]
)
def test_killed_run_is_exact(kills: int, tmp_path: Path) -> None:
    """SIGKILL of the whole job at any moment loses the time since a checkpoint, and no more."""
    out, chance = tmp_path / "out", random.Random(kills)
    common = [*counting(samples_file(tmp_path, N), kind="SlowCounting"), "--resume", "auto"]
    common += ["--checkpoint-every", "5steps", "--quiet", "--hidden", "100000"]
    for _ in range(kills):
        ranks = chance.randint(3, 4 if kills < 10 else 7)
        where = ["--servers", str(chance.randint(1, ranks - 2)), "--epochs", str(ENDLESS)]
        where += ["--node-size", str(chance.choice((0, 0, 1, 2))), "--out", str(out)]
        when = chance.choice(("start", "training", "write"))
        kill_once(out, ranks, [*common, *where], when=when)
        if any(is_whole(folder) for folder in list_checkpoints(out)):
            assert_counts(newest(out), N)
    finish(out, [*common, "--servers", "2"])


@pytest.mark.parametrize(
    ("node_size", "rows"),
    [
        pytest.param(1, True, marks=pytest.mark.one_mpi),
        pytest.param(0, False, marks=[pytest.mark.long, pytest.mark.other_mpi]),
    ],
)
def test_stop_at_the_gate(node_size: int, rows: bool, tmp_path: Path) -> None:
    """Workers that wait for a slow one stop with it; what they were to do is assigned again."""
    text = f"1 1 --mode ssp --staleness-bound 0 --node-size {node_size}"
    kind, out = "ClockRows" if rows else "Clocks", tmp_path / "out"
    words = clocks(samples_file(tmp_path, 3000), 4, text, kind)
    stop(out, 4, words, signal.SIGUSR1, 1, "mpirun")
    s = summary(out)
    assert s["clock_distance_max"] == 0
    assert s["pushes_sent"] == s["pushes_applied"] == s["global_step"]
