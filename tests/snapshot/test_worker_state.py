"""What is a worker's alone in asynchronous runs is part of the snapshot, and of a resumed run."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from launch import train
from runs import (
    ENDLESS,
    HERE,
    SAVED,
    Plan,
    cases,
    counting,
    final,
    is_whole,
    kill_once,
    names_asked,
    newest,
    samples_file,
    shared_out,
    summary,
    thinned,
)

from mpips.checkpoint import Checkpoint, list_checkpoints, open_checkpoint
from tests.chaos.exact import (
    ROUNDING,
    expected_counts,
    own,
    with_replicas,
    wrong_counts,
    wrong_growth,
)

pytestmark = pytest.mark.launch

N, EPOCHS, LONG = 230, 2, 4  # LONG: more than the stop of a run takes
WIDE = "26000"  # in double precision: three shards of it are large enough to be packed
TOPK = "--codec topk --topk-ratio 0.1"
# By `TOPK`, of three workers or more on two nodes or more.
COUNTED = cases("""
  ssp: 5 --servers 2 --node-size 2 --mode ssp --staleness-bound 1
  ahead: 6 --servers 2 --node-size 2 --prefetch --far-read reply
  ahead by get: 5 --servers 2 --node-size 1 --prefetch --far-read get
  stalling: 5 --servers 2 --node-size 2 --snapshot stall
  consistent: 5 --servers 2 --node-size 2 --read consistent
  a straggler: 4 --servers 1 --node-size 2 --inject-delay 1:30
  carried: 6 --servers 1 --node-size 3 --node-aggregation
  carried, bounded: 6 --servers 2 --node-size 3 --node-aggregation --mode ssp --staleness-bound 1
""")
DROPS, DROPPED = (
    "test_no_batch_is_lost_where_pushes_are_dropped",
    (5, "--servers 2 --node-size 2 --max-staleness 1"),
)
FAULTY, FAILING, RANKS = HERE / "problems" / "faulty.py", 2, 6  # RANKS: of the largest job here
WORLDS = ((3, 2), (1, 1), (4, 2), (2, 3))  # workers, servers; shares are exact
MOVES = 0.3  # how often a run that is stopped goes on elsewhere
STOPPED, STOPS = ("ssp", "ahead", "carried"), 1
ALL_COUNTED = [*COUNTED, *(f"stopped {name}" for name in STOPPED)]
COUNTED_QUICK = ("stopped carried",)
ELASTIC = cases("""
  near: 5 --servers 2 --tau 2
  remote: 5 --servers 2 --tau 3 --node-size 2
  carried replicas: 6 --servers 2 --tau 2 --node-size 3 --node-aggregation
""")
RESUMED = (  # ranks, options, what is said
    (4, "--node-size 1", ""),
    (4, "--node-size 1", "each worker goes on with its own residual"),
    (3, "--node-size 1", "workers' residual goes to those who pack now: saved by 3 workers, now 2"),
    (3, "--node-size 2", "who pack now: nodes of the ranks are [0, 0, 1], were [0, 1, 2]"),
    (4, "--node-size 2 --node-aggregation", "goes to those who pack now: saved by 2 workers, now"),
    (3, "--codec none --topk-ratio 0.01", "residual is left out: this run has none"),
    (
        3,
        "--node-size 1 --no-node-aggregation",
        "workers' residual begins at zero: none that fits was saved",
    ),
)


def each(out: Path) -> list[Checkpoint]:
    """Return all whole checkpoints of a run but that of step 0."""
    found = [open_checkpoint(path) for path in list_checkpoints(out) if is_whole(path)]
    return [checkpoint for checkpoint in found if checkpoint.step]


def parts(plan: Plan, name: str, ranks: int, words: list[str], epochs: int) -> None:
    """Add a run that is stopped at random, and goes on to its end."""
    for k in range(STOPS + 1):
        last = ["--epochs", str(epochs if k == STOPS else ENDLESS), *["--resume"] * (k > 0)]
        plan.add(name, ranks, [*words, *last], 0 if k == STOPS else SAVED)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """All runs of this module that need no launcher of their own."""
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    data = samples_file(plan.folder, N)
    words = ["--hidden", WIDE, "--keep", "100", "--checkpoint-every", "6steps"]
    words += ["--batch-size", "8"]
    for name, (ranks, text) in (COUNTED | {"dropped": DROPPED}).items():
        packed = [*words, *TOPK.split(), *text.split()]
        options = [*counting(data, kind="SlowCounting"), *packed]
        if name in asked or (name == "dropped" and DROPS in asked):
            plan.add(name, ranks, [*options, "--epochs", str(EPOCHS)])
        if f"stopped {name}" in asked:
            options = [*counting(data, kind="StoppingCounting"), *packed]
            parts(plan, f"stopped {name}", ranks, options, LONG)
    for name in filter(asked.__contains__, ELASTIC):
        ranks, text = ELASTIC[name]
        options = [*counting(data, kind="StoppingCounting"), "--mode", "easgd", *words]
        parts(plan, name, ranks, [*options, *text.split()], LONG)
    failing = ["--problem", f"{FAULTY}:NanLossLate", "--mode", "easgd", "--tau", "3"]
    failing += ["--keep", "100", "--batch-size", "8"]
    for k in range(FAILING * ("test_a_worker_that_has_failed_is_in_no_checkpoint" in asked)):
        plan.add(f"failing {k}", RANKS, [*failing, "--checkpoint-every", "1steps"], code=1)
    if "test_other_worlds_share_out_the_sum" in asked:
        slow = [*counting(data, kind="SlowCounting"), *words, *TOPK.split(), "--node-size", "1"]
        for k, (workers, servers) in enumerate(WORLDS):
            more = ["--servers", str(servers), "--epochs", str(k + 1), *["--resume"] * (k > 0)]
            plan.add("worlds", workers + servers, [*slow, *more])
    if "test_a_resumed_run_says_what_becomes_of_residuals" in asked:
        add_resumed(plan, [*counting(data), "--hidden", WIDE, *TOPK.split(), "--servers", "1"])
    plan.run(400)
    return plan


def add_resumed(plan: Plan, words: list[str]) -> None:
    """Add a run that goes on in other worlds, and says what becomes of its residuals."""
    for k, (ranks, text, _) in enumerate(RESUMED):
        more = ["--keep", "100", "--epochs", str(k + 1), *["--resume"] * (k > 0)]
        plan.add("said", ranks, [*words, *text.split(), *more], quiet=False)


def assert_conserved(checkpoint: Checkpoint, rounding: float = 0.0) -> bool:
    """Assert that what was applied and what workers keep are all gradients up to the snapshot.

    Returns:
        Whether any worker keeps anything.
    """
    assert wrong_counts(checkpoint, rounding) == []
    return bool(own(checkpoint, "residual").any())


@pytest.mark.parametrize("name", thinned(ALL_COUNTED, COUNTED_QUICK))
def test_parameters_and_residuals_are_all_gradients_of_the_cut(name: str, runs: Plan) -> None:
    """At each checkpoint, to the last bit: nothing is lost, nothing is counted twice."""
    found = each(runs.out(name))
    assert final(runs.out(name)).step == found[-1].step
    assert [assert_conserved(checkpoint) for checkpoint in found].count(True) > 0
    epochs = LONG if name.startswith("stopped") else EPOCHS
    assert expected_counts(found[-1], N).tolist() == [epochs] * N
    some = False
    for checkpoint in found:  # the number decides how much a warm-up sends
        packed = [numbers["packed"] for numbers in checkpoint.state["own"]]
        clocks = checkpoint.state["allocator"]["clocks"]
        if "carried" in name:  # a message holds several
            assert max(packed) <= sum(clocks)
        else:
            assert all(p in (0, c) for p, c in zip(packed, clocks, strict=True))
        some |= any(packed)
    assert some  # where a run ends soon after a stop, no other node may have pushed in between
    first = open_checkpoint(list_checkpoints(runs.out(name))[0])
    assert (first.step, first.worker_names) == (0, ())


@pytest.mark.long
def test_no_batch_is_lost_where_pushes_are_dropped(runs: Plan) -> None:
    found = each(runs.out("dropped"))
    assert expected_counts(final(runs.out("dropped")), N).tolist() == [EPOCHS] * N
    assert any(own(checkpoint, "residual").any() for checkpoint in found)


@pytest.mark.parametrize("name", shared_out(ELASTIC, ["carried replicas"]))
def test_centre_and_replicas_hold_what_was_computed(name: str, runs: Plan) -> None:
    """An exchange moves, so from cut to cut they grow by the gradients between, and no more."""
    found = with_replicas(each(runs.out(name)))
    assert len(found) > 1
    assert [text for pair in pairwise(found) for text in wrong_growth(*pair)] == []
    assert final(runs.out(name)).step == summary(runs.out(name))["global_step"]


@pytest.mark.long
def test_a_worker_that_has_failed_is_in_no_checkpoint(runs: Plan) -> None:
    """The last rank fails in the midst of its local steps: no replica is saved as it is then."""
    names = [f"failing {k}" for k in range(FAILING)]
    assert [summary(runs.out(name))["stop_reason"] for name in names] == ["diverged"] * FAILING
    found = [checkpoint for name in names for checkpoint in each(runs.out(name))]
    assert found
    for checkpoint in found:
        steps = [numbers["steps"] for numbers in checkpoint.state["own"]]
        assert steps == [3 * clock for clock in checkpoint.state["allocator"]["clocks"]]
        assert np.isfinite(own(checkpoint, "replica")).all()


@pytest.mark.long
def test_other_worlds_share_out_the_sum(runs: Plan) -> None:
    """Nothing is lost while every shard is far from every worker, and large enough to be packed."""
    found = each(runs.out("worlds"))
    assert {len(checkpoint.workers) for checkpoint in found} == {n for n, _ in WORLDS}
    assert [assert_conserved(checkpoint) for checkpoint in found].count(True) >= len(WORLDS)
    assert expected_counts(final(runs.out("worlds")), N).tolist() == [len(WORLDS)] * N


@pytest.mark.long
@pytest.mark.one_mpi
def test_a_resumed_run_says_what_becomes_of_residuals(runs: Plan) -> None:
    for (_, _, line), said in zip(RESUMED, runs.outputs("said"), strict=True):
        assert line in said
    last = {c.state["allocator"]["cursor"][0]: c for c in each(runs.out("said"))}
    for k, (_, more, _) in enumerate(RESUMED):
        assert ("own" in last[k + 1].state) == ("--codec none" not in more)


PLACES = (  # ranks, options; no worker is on the node of a server, and 1, 2 or 4 pack for each
    (6, "--server-ranks 0,1 --node-size 2 --node-aggregation"),
    (8, "--server-ranks 0,1,2,3 --node-size 4 --node-aggregation --mode ssp --staleness-bound 1"),
    (5, "--server-ranks 0 --node-size 1 --prefetch"),
    (4, "--server-ranks 0,1 --node-size 2 --node-aggregation --read consistent"),
    (6, "--server-ranks 0,1 --node-size 2"),
)
UNSET = "--mode async --read relaxed --no-prefetch --no-node-aggregation"  # as a place may be


def stop_often(folder: Path, codec: str, stops: int, kills: int, seed: int) -> None:
    """Stop a run that goes from place to place, then kill it; nothing may be lost at any cut."""
    chance, plan = random.Random(seed), Plan(folder)
    data = samples_file(folder, N)
    words = [*counting(data, kind="SlowStoppingCounting"), "--hidden", "40000", *codec.split()]
    words += ["--batch-size", "8", "--keep", "1000", *UNSET.split()]
    place = PLACES[0]
    for k in range(stops):
        place = chance.choice(PLACES) if chance.random() < MOVES else place
        more = ["--checkpoint-every", "0", "--epochs", str(ENDLESS), *["--resume"] * (k > 0)]
        plan.add("run", place[0], [*words, *place[1].split(), *more], SAVED)
    plan.run(60 + 5 * stops)
    out = plan.out("run")
    assert [assert_conserved(checkpoint, ROUNDING) for checkpoint in each(out)].count(
        True
    ) > stops / 2
    words += ["--out", str(out), "--resume", "--quiet", "--checkpoint-every", "5steps"]
    for _ in range(kills):
        ranks, options = chance.choice(PLACES)
        line = [*words, *options.split(), "--epochs", "1000"]
        kill_once(out, ranks, line, chance.choice(("training", "write")))
        assert_conserved(newest(out), ROUNDING)
    epochs = newest(out).state["allocator"]["cursor"][0] + 1
    line = [*words, *place[1].split(), "--epochs", str(epochs)]
    train(place[0], *line, cwd=folder, timeout_s=120).check()
    assert_conserved(final(out), ROUNDING)
    assert expected_counts(final(out), N).tolist() == [epochs] * N


@pytest.mark.long
@pytest.mark.one_mpi
@pytest.mark.parametrize("codec", [TOPK, "--codec onebit"])
def test_many_stops_lose_nothing(codec: str, tmp_path: Path) -> None:
    """With one push or several in a message, wherever the run goes on."""
    stop_often(tmp_path, codec, stops=8, kills=2, seed=8)
