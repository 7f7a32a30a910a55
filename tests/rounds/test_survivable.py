"""Rounds whose workers are killed at each of their points, against a serial recomputation."""

from pathlib import Path

import numpy as np
import pytest
from launch import train
from runs import COUNTING, final, starts_of, summary
from supervised import Supervised

from mpips.config import Config
from mpips.datasets import open_dataset
from mpips.launch import mpirun
from tests.chaos.serial import check_serial, told

WORKERS, PROGRAM = 4, Path(__file__).with_name("dying.py")
JOB = "--on-death shrink --batch-size 16 --epochs 2 --dtype float64 --hidden 16"
LOCAL = "--mode local_sgd --local-steps 2"
HYBRID = f"--mode hybrid --problem {COUNTING}:EvaluatedTableMeanCounting --optimizer sgd --lr 1"
SAVED = "--checkpoint-every 5steps --eval-every 1 --resume auto --seed 3 --out out"
WORDS = [*JOB.split(), *SAVED.split()]

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not mpirun.survivors_launcher(), reason="this MPI ends jobs whose ranks die"
    ),
]


def run(folder: Path, plan: str, *more: str, ranks: int = WORKERS) -> str:
    """Run the job with its deaths, and return what it says."""
    words = [str(PROGRAM), plan, *WORDS, *(more or ("--mode", "sync"))]
    with Supervised(folder, ranks, words, "--ft", "--timeout", "60") as job:
        return job.wait(0)


@pytest.mark.parametrize(
    ("plan", "first"),
    [
        ("half:2:3,partly:1:11", {2: 3, 1: 12}),
        ("entered:3:7,copying:2:12", {3: 8, 2: 13}),
        ("applied:1:6,after:2:9", {1: 7, 2: 10}),
        # Two in one round, of which one has brought its gradient in.
        ("half:1:8,partly:3:8", {1: 8, 3: 9}),
    ],
)
def test_the_round_of_a_death_is_made_by_the_others(
    plan: str, first: dict[int, int], tmp_path: Path
) -> None:
    """Every sample counts once an epoch, and the parameters are those of a serial run."""
    printed, out = run(tmp_path, plan, "--mode", "sync", "--scale-lr"), tmp_path / "out"
    assert printed.count("has died; its") == len(first)
    assert "starting again" not in printed
    assert starts_of(out) == 1
    assert {each["rank"]: each["first"] for each in told(out, "lost")} == first
    assert check_serial(out, WORKERS, within=1e-9) == []
    assert summary(out)["lost"] == sorted(first)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("half:2:3,partly:1:7", f"{LOCAL} --optimizer adam --scale-lr"),
        (
            "entered:3:4,copying:2:9",
            f"{LOCAL} --outer-momentum 0.5 --outer-lr 0.7 --outer-nesterov",
        ),
        ("applied:1:3,after:2:6,partly:0:9", f"{LOCAL} --optimizer momentum --outer-momentum 0.5"),
    ],
)
def test_the_local_steps_of_a_dead_worker_are_made_by_the_others(
    plan: str, words: str, tmp_path: Path
) -> None:
    """Where its replica was whole, it counts; else its samples are assigned again."""
    printed = run(tmp_path, plan, *words.split())
    assert printed.count("has died; its") == 2
    assert check_serial(tmp_path / "out", WORKERS, within=1e-9) == []


@pytest.mark.parametrize(
    ("plan", "first", "servers"),
    [
        ("unpushed:2:3,pushed:1:7", {2: 3, 1: 8}, "0"),
        ("held:3:4,unpushed:2:11", {3: 5, 2: 11}, "0"),
        ("held:3:5,entered:2:9", {3: 6, 2: 10}, "0,1"),
        ("applied:4:6,after:2:9", {4: 7, 2: 10}, "0,1"),
        # Two in one round, of which one has pushed its rows; the first rank is a worker.
        ("unpushed:1:8,pushed:2:8", {1: 8, 2: 9}, "3"),
        ("held:1:1,evaluating:2:30", {1: 2, 2: 31}, "0"),
    ],
)
def test_rows_of_a_dead_worker_count_where_its_gradient_does(
    plan: str, first: dict[int, int], servers: str, tmp_path: Path
) -> None:
    """Each once an epoch, whatever servers have applied; and all samples held out are evaluated."""
    words, ranks = [*HYBRID.split(), "--server-ranks", servers], 3 + len(servers.split(","))
    words += ["--scale-lr"] * (servers == "0")
    printed, out = run(tmp_path, plan, *words, ranks=ranks), tmp_path / "out"
    assert starts_of(out) == 1
    assert "if a worker dies, the others go on without it: a round has" in printed
    assert {each["rank"]: each["first"] for each in told(out, "lost")} == first
    assert check_serial(out, ranks, within=1e-9) == []
    assert summary(out)["lost"] == sorted(first)
    with open_dataset(Config()) as digits:
        _, y = digits.test.load(0, digits.test.n, np.dtype("f8"))
    assert [each["loss"] for each in told(out, "eval")] == pytest.approx([y.mean()] * 2)


@pytest.mark.parametrize(
    ("plan", "first", "servers"),
    [
        # The first ranks are servers; of a dead worker nothing, a part or all has left its node.
        ("unpushed:2:3,unsent:1:7", {2: 3, 1: 8}, "0,3"),
        ("cut:5:4,pushed:2:9", {5: 5, 2: 10}, "0,3"),
        ("held:4:5,cut:1:5", {4: 6, 1: 6}, "0,3"),
        ("held:2:1,entered:4:1,cut:5:8", {2: 2, 4: 2, 5: 9}, "0,3"),
        # They are workers, and one of them decides; a node has no server.
        ("cut:2:6,held:5:6", {2: 7, 5: 7}, "1,4"),
        ("unsent:5:6,unpushed:2:6", {5: 7, 2: 6}, "1,4"),
        ("cut:4:3,entered:5:8", {4: 4, 5: 9}, "0"),
        # As another death is acted upon, or the other node has left the round, and at its end.
        ("asking:4:6,again:1:6", {4: 6, 1: 7}, "0,3"),
        ("cut:4:6,asking:1:9,asking:2:9", {4: 7, 1: 9, 2: 9}, "0,3"),
        ("placing:5:5,cut:1:9", {5: 6, 1: 10}, "0,3"),
        ("applied:2:4,after:5:9", {2: 5, 5: 10}, "0,3"),
        ("cut:1:3,evaluating:2:29", {1: 4, 2: 30}, "0,3"),
    ],
)
def test_rows_for_other_nodes_of_a_dead_worker_count_where_its_gradient_does(
    plan: str, first: dict[int, int], servers: str, tmp_path: Path
) -> None:
    """The first rank of its node sends what remote servers are without."""
    words = [*HYBRID.split(), "--server-ranks", servers, "--node-size", "3"]
    printed, out = run(tmp_path, plan, *words, ranks=6), tmp_path / "out"
    assert "if a server or the first rank of a node (0, 3) dies, this job starts again" in printed
    assert starts_of(out) == 1
    assert {each["rank"]: each["first"] for each in told(out, "lost")} == first
    assert check_serial(out, 6, within=1e-9) == []


@pytest.mark.parametrize(
    ("plan", "servers"),
    [
        ("entered:0:7", "0"),
        ("unpushed:2:6,pushed:0:9", "3"),
        ("pushed:2:5,unpushed:3:9", "0,1"),
        ("cut:1:4,entered:2:7", "0,2 --node-size 2"),
        ("cut:1:5,pushed:3:9", "0,2 --node-size 2"),
        ("unsent:3:7,cut:2:8", "1 --node-size 2"),
    ],
)
def test_the_death_of_a_server_the_first_rank_or_all_workers_starts_hybrid_again(
    plan: str, servers: str, tmp_path: Path
) -> None:
    """With all ranks, and what was applied behind the checkpoint is applied again."""
    run(tmp_path, plan, *f"{HYBRID} --server-ranks {servers}".split())
    assert starts_of(tmp_path / "out") == 2
    assert check_serial(tmp_path / "out", WORKERS, within=1e-9) == []


def test_after_a_death_the_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Each sample counts once an epoch: the number of samples says so."""
    run(tmp_path, "entered:2:5")
    out = tmp_path / "out"
    n = final(out).state["samples"] // 2
    words = "--resume yes --out out --epochs 3 --on-death restart"
    train(3, *words.split(), cwd=tmp_path).check()
    assert final(out).state["samples"] == 3 * n
    assert summary(out)["lost"] == []


@pytest.mark.parametrize(
    ("plan", "first"),
    [
        ("half:3:3,partly:1:7", {3: 3, 1: 8}),
        ("entered:1:4,applied:3:8", {1: 5, 3: 9}),
        ("copying:3:6,after:1:9", {3: 7, 1: 10}),
        # Of an agent in the middle of a send, and of an owner between its results.
        ("summed:3:5,sending:1:9", {3: 6, 1: 10}),
        # The other node has left the round, or makes it again.
        ("placing:3:5,placing:1:9", {3: 6, 1: 10}),
        # Two in one round, of both nodes.
        ("sending:3:7,summed:1:7", {3: 8, 1: 8}),
        # While the death of another one is acted upon.
        ("partly:3:6,up:1:6", {3: 7, 1: 7}),
        ("summed:3:6,again:1:6", {3: 7, 1: 7}),
    ],
)
def test_a_round_of_several_nodes_is_made_by_the_others(
    plan: str, first: dict[int, int], tmp_path: Path
) -> None:
    """The node of a dead rank has its slices, and its part of the transfers."""
    words = ["--mode", "sync", "--node-size", "2", *["--scale-lr"] * ("summed" in plan)]
    printed, out = run(tmp_path, plan, *words), tmp_path / "out"
    assert "if the first rank of a node (0, 2) dies, this job starts again" in printed
    assert starts_of(out) == 1
    assert {each["rank"]: each["first"] for each in told(out, "lost")} == first
    assert check_serial(out, WORKERS, within=1e-9) == []


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("half:3:3,partly:1:7", "--optimizer adam"),
        ("entered:1:4,applied:3:8", "--outer-momentum 0.5 --outer-lr 0.7 --outer-nesterov"),
        ("copying:3:3,after:1:6", "--optimizer momentum --outer-momentum 0.5"),
        # The other node has left the round, or makes it again.
        ("placing:3:3,placing:1:6", "--optimizer adam"),
        ("summed:3:3,sending:1:6", "--optimizer adam --outer-momentum 0.5"),
        ("partly:3:6,up:1:6", "--optimizer momentum"),
        ("summed:3:4,again:1:4", "--optimizer adam --outer-momentum 0.9 --outer-nesterov"),
    ],
)
def test_averages_of_several_nodes_are_made_by_the_others(
    plan: str, words: str, tmp_path: Path
) -> None:
    """Those of the slots too, from local steps that stay until all have left the round."""
    printed = run(tmp_path, plan, *f"{LOCAL} {words} --node-size 2".split())
    assert printed.count("has died; its") == 2
    assert starts_of(tmp_path / "out") == 1
    assert check_serial(tmp_path / "out", WORKERS, within=1e-9) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        "half:5:4,partly:1:4,sending:3:4",
        "sending:1:3,half:3:6,after:5:9",  # a node may be past round 3, another one not
        "summed:5:4,up:3:4,again:1:4",
    ],
)
@pytest.mark.parametrize("mode", ["--mode sync", f"{LOCAL} --outer-momentum 0.5"])
def test_each_of_three_nodes_loses_a_rank(mode: str, plan: str, tmp_path: Path) -> None:
    """Whoever dies while the others are about it, each sample counts once an epoch."""
    run(tmp_path, plan, *f"{mode} --node-size 2 --optimizer adam".split(), ranks=6)
    assert sorted(each["rank"] for each in told(tmp_path / "out", "lost")) == [1, 3, 5]
    assert check_serial(tmp_path / "out", 6, within=1e-9) == []


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("summed:2:9", "--mode sync"),
        ("half:3:7,again:0:7", "--mode sync"),
        ("sending:1:3,placing:2:8", f"{LOCAL} --optimizer adam --outer-momentum 0.5"),
    ],
)
def test_the_death_of_the_first_rank_of_a_node_starts_the_job_again(
    plan: str, words: str, tmp_path: Path
) -> None:
    """It acts on the deaths of the others, and may die as it does."""
    run(tmp_path, plan, *f"{words} --node-size 2".split())
    assert starts_of(tmp_path / "out") == 2
    assert check_serial(tmp_path / "out", WORKERS, within=1e-9) == []


@pytest.mark.parametrize("plan", ["partly:0:12", "half:2:7,partly:0:13,entered:1:18"])
def test_the_death_of_the_coordinator_starts_the_job_again(plan: str, tmp_path: Path) -> None:
    """With all ranks, from a checkpoint that one fewer may have written."""
    printed, out = run(tmp_path, plan), tmp_path / "out"
    assert "rank 0" in printed
    assert printed.count("starting again") == 1
    assert starts_of(out) == 2
    assert check_serial(out, WORKERS, within=1e-9) == []
