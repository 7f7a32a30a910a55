"""Whole jobs in rounds with backup workers: accounts, stops, stragglers, and the end."""

import re
from pathlib import Path

import numpy as np
import pytest
from launch import train
from runs import (
    ENDLESS,
    SAVED,
    Plan,
    counting,
    final,
    names_asked,
    samples_file,
    shared_out,
    summary,
)

from mpips.checkpoint import list_checkpoints, open_checkpoint
from mpips.health.status_board import APPLYING
from mpips.tools.trace import read_run

pytestmark = pytest.mark.launch

N, EPOCHS = 230, 3
PLAIN = {  # ranks, options; every worker makes as many steps where it says --steps
    "one backup": (6, "--servers 2 --backup-workers 1"),
    "nodes of one": (5, "--servers 2 --backup-workers 1 --node-size 1"),
    "nodes of two": (6, "--servers 2 --backup-workers 2 --node-size 2 --trace"),
    "all but one": (5, "--servers 1 --backup-workers 3"),
    "private": (4, "--servers 1 --backup-workers 1 --window private"),
    "accumulated": (5, "--servers 2 --backup-workers 1 --accumulate 2 --node-size 2"),
    "fewer batches than a round needs": (8, "--servers 1 --backup-workers 1 --batch-size 115"),
    "steps": (5, "--servers 2 --backup-workers 1 --steps 9"),
}
STOPPED = (
    (5, "--servers 2 --backup-workers 1"),
    (6, "--servers 3 --backup-workers 1 --node-size 2"),
    (4, "--servers 1 --backup-workers 2 --node-size 1"),
    (4, "--servers 2 --backup-workers 0"),
    (6, "--servers 2 --backup-workers 2"),
)
REFUSED = {  # ranks, options: what is said, on all ranks
    (3, "--servers 1 --backup-workers 2"): "backup_workers 2 of 2 workers, expected backup_workers "
    "<= 1",
    (5, "--servers 3 --backup-workers 1 --hidden 1 --batch-size 2"): "servers 3 for 7 parameters, "
    "expected a share for each",
}
LONG = 20  # epochs: more than all stops take


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    plan = Plan(tmp_path_factory.mktemp("runs"))
    words = [*counting(samples_file(plan.folder, N)), "--mode", "sync", "--batch-size", "8"]
    words += ["--checkpoint-every", "5steps", "--keep", "1000"]
    for name in filter(names_asked(request).__contains__, PLAIN):
        ranks, text = PLAIN[name]
        length = [] if "--steps" in text else ["--epochs", str(EPOCHS)]
        plan.add(name, ranks, [*words, *length, *text.split()])
    words[words.index("--problem") + 1] = words[1].replace(":Counting", ":StoppingCounting")
    for k, (ranks, text) in enumerate(STOPPED):
        last = k + 1 == len(STOPPED)
        more = ["--epochs", str(LONG if last else ENDLESS), *["--resume"] * (k > 0)]
        plan.add("stops", ranks, [*words, *text.split(), *more], 0 if last else SAVED)
    for ranks, text in REFUSED:
        tiny = [*counting(samples_file(plan.folder, 6)), "--mode", "sync", *text.split()]
        plan.add("refused", ranks, tiny, code=2)
    plan.run(240)
    return plan


def assert_rounds(out: Path) -> None:
    """Check that all shards of each checkpoint have as many updates: the mean of -1 is -1."""
    folders = list_checkpoints(out)
    assert len(folders) > 1
    for folder in folders:
        found = open_checkpoint(folder)
        updates = found.layout.views(found.read_params())["updates"]
        np.testing.assert_allclose(updates, found.step, atol=1e-9)


@pytest.mark.parametrize("name", shared_out(PLAIN, ["nodes of two"]))
def test_accounts_are_exact(name: str, runs: Plan) -> None:
    """Every push is in a round or dropped, and a round has as many as it needs, or fewer."""
    out, (_, text) = runs.out(name), PLAIN[name]
    s = summary(out)
    found = re.search(r"--backup-workers (\d)", text)
    needed = s["workers"] - int(found[1] if found else 0)
    assert s["pushes_sent"] == s["pushes_applied"] == sum(s["steps"])
    if "steps" in name:
        assert s["steps"] == [9] * s["workers"]
    else:
        assert s["samples"] == EPOCHS * N
    for server in s["per_server"]:
        taken = server["applied"] - server["pushes_dropped"]
        assert s["global_step"] <= taken <= needed * s["global_step"]
    assert sum(s["staleness"]["histogram"][1:]) == sum(
        server["pushes_dropped"] for server in s["per_server"]
    )
    assert final(out).step == s["global_step"]
    assert_rounds(out)
    if "--trace" in text:
        lanes = read_run(out)
        told = [np.count_nonzero(lanes[o["rank"]].whats == APPLYING) for o in s["per_server"]]
        assert told == [server["applied"] for server in s["per_server"]]


def test_stopped_rounds_are_exact(runs: Plan) -> None:
    """Through stops, and parts without backup workers, each batch is handled once."""
    out = runs.out("stops")
    assert summary(out)["samples"] == LONG * N
    assert final(out).state["allocator"]["pending"] == []
    assert final(out).state["allocator"]["cursor"] == [LONG, 0]
    assert_rounds(out)


def test_the_end_is_saved_though_its_gradients_were_too_late(tmp_path: Path) -> None:
    """The last checkpoint replaces one of the same step, and knows all that was handled."""
    words = [*counting(samples_file(tmp_path, 40), kind="SlowCounting"), "--mode", "sync"]
    words += ["--servers", "1", "--backup-workers", "1", "--inject-delay", "0:150,1:450"]
    out = tmp_path / "out"
    words += ["--steps", "1", "--checkpoint-every", "1steps", "--out", str(out)]
    train(3, *words, cwd=tmp_path).check()
    s, state = summary(out), final(out).state
    assert s["global_step"] + s["per_server"][0]["pushes_dropped"] == 2
    assert (state["allocator"]["pending"], state["allocator"]["clocks"]) == ([], [1, 1])
    assert state["samples"] == s["samples"]
    assert_rounds(out)


def test_what_no_round_can_do_is_refused(runs: Plan) -> None:
    for (ranks, _), text in REFUSED.items():
        assert sum(text in line for line in runs.errors()) == ranks, text
