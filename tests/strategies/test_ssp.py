"""Whole jobs in mode ssp: what reads hold, on worlds of several nodes, with a slow worker."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from launch import Running, train
from runs import (
    COUNT,
    HERE,
    SAVED,
    Plan,
    names_asked,
    samples_file,
    shared_out,
    summary,
    wait_until_training,
)

pytestmark = pytest.mark.launch

CLOCKS = f"{HERE / 'problems' / 'clocks.py'}:Clocks"
CLOCK_ROWS = f"{HERE / 'problems' / 'clocks.py'}:ClockRows"
BATCHES = 64
NOBODY = 9
LINES = 24
CASES = {  # ranks, servers, slow rank, options
    "near": (5, 2, 2, "--staleness-bound 2"),
    "lock step": (5, 1, 4, "--staleness-bound 0"),
    "nodes of one": (5, 2, 4, "--staleness-bound 1 --node-size 1"),
    "nodes of two": (6, 2, 3, "--staleness-bound 2 --node-size 2"),
    "lock step on nodes": (6, 2, 2, "--staleness-bound 0 --node-size 2"),
    "consistent": (6, 2, 5, "--staleness-bound 1 --node-size 2 --read consistent"),
    "means of nodes": (6, 2, 4, "--staleness-bound 1 --node-size 3 --node-aggregation"),
    "private": (4, 1, 2, "--staleness-bound 2 --window private"),
    "nobody slow": (5, 1, NOBODY, ""),
    "rows": (6, 2, 3, "--staleness-bound 2 --node-size 2"),
    "rows, nobody slow": (5, 2, NOBODY, "--staleness-bound 1 --node-size 1"),
    "rows in lock step": (4, 1, 2, "--staleness-bound 0 --node-size 1"),
}
BOTH = ("near", "means of nodes", "rows")


def options(
    data: str, ranks: int, servers: int, slow: int, text: str, rows: bool = False
) -> list[str]:
    """Return a job of counted clocks; servers are the first ranks."""
    where = ["--servers", str(servers), "--server-ranks", ",".join(map(str, range(servers)))]
    files = ["--dataset", data, "--test-dataset", data.replace("train-", "test-")]
    size = ["--hidden", f"{LINES},{ranks - servers},{slow}", "--batch-size", "1"]
    once = ["--epochs", "1", "--no-shuffle"]
    problem = CLOCK_ROWS if rows else CLOCKS
    return ["--problem", problem, *COUNT, *files, *where, *size, *once, *text.split()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    plan = Plan(tmp_path_factory.mktemp("runs"))
    data = samples_file(plan.folder, BATCHES)
    for name in filter(names_asked(request).__contains__, CASES):
        ranks, servers, slow, text = CASES[name]
        words = options(data, ranks, servers, slow, text, rows=name.startswith("rows"))
        plan.add(name, ranks, [*words, "--mode", "ssp", "--checkpoint-every", "7steps"])
    plan.run(200)
    return plan


@pytest.mark.parametrize("name", shared_out(CASES, BOTH))
def test_reads_hold_what_their_clocks_say(name: str, runs: Plan) -> None:
    """The problem has checked every read; the summary tells the largest distance."""
    s, text = summary(runs.out(name)), CASES[name][3]
    bound = int(text.split()[1]) if text else 3
    assert s["pushes_applied"] == s["pushes_sent"] == BATCHES
    assert 0 <= s["clock_distance_max"] <= bound
    if CASES[name][2] != NOBODY:  # the others run ahead of the slow worker as far as they may
        assert s["clock_distance_max"] == bound
    for table in s.get("tables", {}).values():  # rows of remote servers were asked for before steps
        assert table["ahead"] > 0
        assert table["pulled"] == BATCHES**2


def test_without_a_bound_the_check_bites(tmp_path: Path) -> None:
    """In mode async the same problem finds reads that lack what is promised."""
    words = options(samples_file(tmp_path, BATCHES), 4, 1, 1, "--mode async")
    done = train(4, *words, "--out", str(tmp_path / "out"), cwd=tmp_path).check(1)
    assert re.search(r"updates .* are missing|own pushes are missing", done.output), done.output


@pytest.mark.parametrize(
    ("node_size", "rows"), [(1, True), pytest.param(0, False, marks=pytest.mark.long)]
)
def test_stop_at_the_gate(node_size: int, rows: bool, tmp_path: Path) -> None:
    """Workers that wait for a slow one stop with it; what they were to do is assigned again."""
    out = tmp_path / "out"
    text = f"--mode ssp --staleness-bound 0 --node-size {node_size}"
    words = [*options(samples_file(tmp_path, 3000), 4, 1, 1, text, rows), "--out", str(out)]
    with Running(4, ["-m", "mpips.train", *words], tmp_path) as job:
        wait_until_training(job, out, 1)
        time.sleep(0.1)
        os.kill(job.process.pid, signal.SIGUSR1)
        done = job.wait(60).check(SAVED)
    s = summary(out)
    assert s["stop_reason"] == "SIGUSR1", done.output
    assert s["clock_distance_max"] == 0
    assert s["pushes_sent"] == s["pushes_applied"] == s["global_step"]
