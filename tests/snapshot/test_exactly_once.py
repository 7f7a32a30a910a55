"""Every batch is applied exactly once, whatever happens: proved by counting."""

import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from launch import Running, train
from runs import (
    ENDLESS,
    SAVED,
    Plan,
    assert_counts,
    cases,
    counting,
    final,
    is_whole,
    kill_once,
    names_asked,
    newest,
    samples_file,
    summary,
    thinned,
    wait_until_training,
)

from mpips.checkpoint import list_checkpoints, open_checkpoint

pytestmark = pytest.mark.launch
MANY = [pytest.mark.long, pytest.mark.one_mpi]

N = 230  # not divisible by any batch size below


def assert_accounts(out: Path, pushes: int) -> None:
    """Check the summary of an uninterrupted run of `pushes` pushes."""
    s, staleness = summary(out), summary(out)["staleness"]
    assert s["pushes_sent"] == s["pushes_applied"] == s["global_step"] == pushes
    applied = [server["applied"] for server in s["per_server"] if server["bytes"]]
    assert set(applied) == {pushes}
    assert sum(staleness["histogram"]) == sum(applied)
    inbox = 2 if len(s["nodes"]) > 1 else 0  # beside the two open pushes of each worker
    config = (out / "config.toml").read_text()
    ahead = s["workers"] if "prefetch = true" in config else 0
    if "node_aggregation = true" in config:  # one of each worker in every message
        inbox, ahead = inbox * s["workers"], ahead + 2 * s["workers"]
    for server in s["per_server"]:
        assert server["staleness_mean"] <= 2 * s["workers"] - 1 + inbox + ahead
    assert sum(s["steps"]) == sum(w["steps"] for w in s["per_worker"]) == pushes


EPOCHS, STEPS = 2, 5
LONG = {6: 80, N: 24}  # epochs: of 3 and 29 batches, and more than all stops of a run take
PLAIN = cases(f"""
  smallest world: 2 --servers 1
  several servers: 5 --servers 3 --batch-size 7
  default servers: 8 --batch-size 16
  nodes of two: 6 --servers 3 --batch-size 16 --node-size 2
  unequal nodes: 5 --servers 2 --batch-size 9 --node-size 2
  nodes of servers only: 6 --server-ranks 0,1 --batch-size 16 --node-size 2
  private windows: 4 --servers 2 --batch-size 16 --window private
  consistent reads from other nodes: 5 --servers 2 --batch-size 16 --read consistent --node-size 2
  pulls ahead by reply: 6 --servers 2 --batch-size 8 --node-size 2 --prefetch --far-read reply
  pulls ahead by get: 5 --servers 2 --batch-size 8 --node-size 1 --prefetch --far-read get
  means of nodes: 6 --servers 2 --batch-size 4 --node-size 3 --node-aggregation
  means ahead: 8 --server-ranks 0,1 --batch-size 4 --node-size 2 --node-aggregation --prefetch
  in lock step on nodes: 5 --servers 2 --batch-size 8 --mode ssp --staleness-bound 0 --node-size 2
  with a bound on nodes: 6 --servers 2 --batch-size 4 --mode ssp --staleness-bound 2 --node-size 1
  two batches in lock step: 8 --servers 1 --batch-size 115 --mode ssp --staleness-bound 0
  one batch: 8 --servers 2 --batch-size 230
  more servers than cache lines: 6 --servers 3 --batch-size 2 --hidden 1
  remote servers without a line: 6 --servers 3 --batch-size 2 --hidden 1 --node-size 1
  stalling checkpoints: 5 --servers 2 --batch-size 8 --snapshot stall
  steps on nodes: 6 --servers 2 --steps {STEPS} --node-size 2
""")
# Ranks and options of the parts of one run; all but the last are stopped at a random step.
STOPPED = {
    "stops": (
        (4, "--servers 1"), (6, "--servers 3"), (2, "--servers 1"), (8, "--servers 1"),
        (5, "--servers 3"),
    ),
    "stops on nodes": (
        (6, "--servers 3 --node-size 2"), (3, "--servers 2 --node-size 1"),
        (6, "--servers 1 --node-size 2"), (4, "--servers 1 --window private"),
    ),
    "stops with means of nodes": (
        (6, "--servers 2 --node-size 3 --node-aggregation"), (5, "--servers 2"),
        (
            6,
            "--servers 2 --server-ranks 0,1 --node-size 2 --node-aggregation --read consistent",
        ),
        (8, "--servers 2 --node-size 2 --node-aggregation"),
    ),
    "stops in lock step": (
        (6, "--servers 3 --mode ssp --staleness-bound 0 --node-size 2"),
        (3, "--servers 1 --mode async"), (8, "--servers 2 --mode ssp --staleness-bound 0"),
        (5, "--servers 2 --mode ssp --staleness-bound 2 --node-size 1 --node-aggregation"),
    ),
    "stops with more servers than lines": (
        (6, "--servers 4 --hidden 1"), (6, "--servers 3 --node-size 1"), (3, "--servers 1"),
    ),
}  # fmt: skip

QUICK = (
    *("pulls ahead by reply", "means ahead", "one batch", "remote servers without a line"),
    *("steps on nodes", "stops on nodes"),
)


def thin(names: Iterable[str]) -> list[Any]:
    """Leave most of them to the long tests."""
    names = list(names)
    return thinned(names, set(QUICK) & set(names))


def samples_of(options: str) -> int:
    """Return the training samples of a job: fewer than a cache line where it is so tiny."""
    return 6 if "--hidden 1" in options else N


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """All runs of this module that need no launcher of their own."""
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    if "test_worker_without_a_batch" in asked:
        asked.add("one batch")
    data = {n: samples_file(plan.folder, n) for n in (6, N)}
    every = ["--checkpoint-every", "4steps", "--keep", "100"]
    for name, (ranks, text) in PLAIN.items():
        if name not in asked:
            continue
        length = [] if "--steps" in text else ["--epochs", str(EPOCHS)]
        words = [*counting(data[samples_of(text)]), *every, *length]
        plan.add(name, ranks, [*words, *text.split()])
    for name, parts in STOPPED.items():
        if name not in asked:
            continue
        n = samples_of(parts[0][1])
        words = [*counting(data[n], kind="StoppingCounting"), *every]
        words += ["--batch-size", "2", "--hidden", "1"] if n < N else ["--batch-size", "8"]
        for k, (ranks, text) in enumerate(parts):
            last = k + 1 == len(parts)
            more = ["--epochs", str(LONG[n] if last else ENDLESS), *["--resume"] * (k > 0)]
            plan.add(name, ranks, [*words, *text.split(), *more], 0 if last else SAVED)
    if "test_steps_are_totals_over_resumes" in asked:
        for steps, more in ((STEPS, []), (STEPS + 3, ["--resume"])):
            plan.add("more steps", 4, [*counting(data[N]), "--steps", str(steps), *more])
    plan.run(300)
    return plan


@pytest.mark.parametrize("name", thin(name for name in PLAIN if "steps" not in name))
def test_plain_run_is_exact(name: str, runs: Plan) -> None:
    """Counts are exact on many worlds, with checkpoints coming thick and fast."""
    options = PLAIN[name][1].split()
    n = samples_of(PLAIN[name][1])
    at = options.index("--batch-size") + 1 if "--batch-size" in options else None
    assert_counts(final(runs.out(name)), n, EPOCHS)
    for folder in list_checkpoints(runs.out(name)):
        assert_counts(open_checkpoint(folder), n)
    assert_accounts(runs.out(name), EPOCHS * -(-n // (int(options[at]) if at else 32)))


@pytest.mark.parametrize("name", thin(name for name in PLAIN if "steps" in name))
def test_steps_are_each_workers(name: str, runs: Plan) -> None:
    """``--steps`` gives every worker as many, and the data goes round as often as needed."""
    out = runs.out(name)
    assert_counts(final(out), N)
    workers = summary(out)["workers"]
    assert summary(out)["steps"] == [STEPS] * workers
    assert summary(out)["stop_reason"] == "steps"
    assert_accounts(out, STEPS * workers)


@pytest.mark.parametrize("name", thin(STOPPED))
def test_stopped_run_is_exact(name: str, runs: Plan) -> None:
    """Stops at random steps, and other numbers of workers and servers, lose and repeat nothing."""
    out = runs.out(name)
    n = samples_of(STOPPED[name][0][1])
    assert_counts(final(out), n, LONG[n])
    assert summary(out)["global_step"] == LONG[n] * (29 if n == N else 3)
    assert summary(out)["resumed_from"]


def test_steps_are_totals_over_resumes(runs: Plan) -> None:
    assert_counts(final(runs.out("more steps")), N)
    assert summary(runs.out("more steps"))["steps"] == [STEPS + 3] * 3


def test_worker_without_a_batch(runs: Plan) -> None:
    """Six workers share one batch an epoch."""
    steps = [w["steps"] for w in summary(runs.out("one batch"))["per_worker"]]
    assert len(steps) == 6
    assert sum(steps) == EPOCHS
    assert 0 in steps


def stop(out: Path, ranks: int, options: list[str], number: int, who: str, starts: int) -> None:
    """Start or resume a run, let it get on, and ask `who` to stop it."""
    with Running(ranks, ["-m", "mpips.train", *options], out.parent) as job:
        wait_until_training(job, out, starts)
        time.sleep(random.uniform(0, 0.3))
        target = job.process.pid if who == "mpirun" else random.choice(job.ranks())
        os.kill(target, number)
        job.wait(90).check(SAVED)
    assert not (out / "DONE").exists()
    assert summary(out)["stop_reason"] == signal.Signals(number).name


SIGNALS = (
    (4, "--servers 2 --node-size 2", signal.SIGUSR1, "mpirun"),
    (2, "--servers 1", signal.SIGTERM, "rank"),
)


def test_signals_to_a_job(tmp_path: Path) -> None:
    """Signals from outside save the run and end it with code 85; what follows is exact."""
    out = tmp_path / "out"
    common = [*counting(samples_file(tmp_path, N), kind="SlowCounting"), "--out", str(out)]
    step = 0
    for k, (ranks, options, number, who) in enumerate(SIGNALS):
        resume = ["--resume"] if k else []
        words = [*common, *options.split(), *resume, "--epochs", str(ENDLESS)]
        stop(out, ranks, words, number, who, k + 1)
        assert_counts(newest(out), N)
        assert newest(out).step == summary(out)["global_step"] > step
        step = newest(out).step
    epochs = newest(out).state["allocator"]["cursor"][0] + 1
    words = [*common, "--resume", "--epochs", str(epochs), "--servers", "2"]
    train(3, *words, cwd=tmp_path, timeout_s=120).check()
    assert_counts(final(out), N, epochs)


def kill_often(out: Path, options: list[str], kills: int, seed: int) -> None:
    """Kill a run again and again at random moments; each time what it left must be exact."""
    chance = random.Random(seed)
    for _ in range(kills):
        ranks = chance.randint(3, 4 if kills < 10 else 7)
        where = ["--servers", str(chance.randint(1, ranks - 2))]
        where += ["--node-size", str(chance.choice((0, 0, 1, 2)))]
        words = [*options, *where, "--resume", "auto", "--epochs", str(ENDLESS)]
        kill_once(out, ranks, words, when=chance.choice(("start", "training", "write")))
        if any(is_whole(folder) for folder in list_checkpoints(out)):
            assert_counts(newest(out), N)


@pytest.mark.parametrize("kills", [2, pytest.param(11, marks=MANY)])
def test_killed_run_is_exact(kills: int, tmp_path: Path) -> None:
    """SIGKILL of the whole job at any moment loses the time since a checkpoint, and no more."""
    out = tmp_path / "out"
    common = [*counting(samples_file(tmp_path, N), kind="SlowCounting"), "--out", str(out)]
    common += ["--checkpoint-every", "5steps", "--quiet", "--hidden", "100000"]
    kill_often(out, common, kills, seed=kills)
    whole = any(is_whole(folder) for folder in list_checkpoints(out))
    epochs = newest(out).state["allocator"]["cursor"][0] + 1 if whole else 1
    words = [*common, "--servers", "2", "--resume", "auto", "--epochs", str(epochs)]
    train(3, *words, cwd=tmp_path, timeout_s=120).check()
    assert_counts(final(out), N, epochs)
