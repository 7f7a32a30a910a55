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

PROGRAM = Path(__file__).with_name("dying.py")
JOB = "--on-death shrink --batch-size 16 --epochs 2 --dtype float64 --hidden 16 --seed 3"
SAVED = "--checkpoint-every 5steps --eval-every 1 --resume auto --out out"
SYNC, LOCAL, NODES = "--mode sync", "--mode local_sgd --local-steps 2", "--node-size 2"
PROBLEM = f"--problem {COUNTING}:EvaluatedTableMeanCounting --optimizer sgd --lr 1"
HYBRID = f"--mode hybrid {PROBLEM} --server-ranks"
NESTEROV = "--outer-momentum 0.9 --outer-lr 0.7 --outer-nesterov"
# Ranks and options, and plans of deaths (see dying.py): one a line.
GO_ON = {
    (4, f"{SYNC} --scale-lr"): """
      half:2:3,partly:1:11
      entered:3:7,copying:2:12
      applied:1:6,after:2:9
      half:1:8,partly:3:8""",  # one of the two has brought its gradient in
    (4, f"{LOCAL} --optimizer adam --scale-lr"): "half:2:3,partly:1:7",
    (4, f"{LOCAL} {NESTEROV}"): "entered:3:4,copying:2:9",
    (4, f"{HYBRID} 0 --scale-lr"): """
      unpushed:2:3,pushed:1:7
      held:3:4,unpushed:2:11
      held:1:1,evaluating:2:30""",
    (5, f"{HYBRID} 0,1"): """
      held:3:5,entered:2:9
      applied:4:6,after:2:9""",
    (4, f"{HYBRID} 3"): "unpushed:1:8,pushed:2:8",  # the first rank is a worker
    # Of a dead worker nothing, a part or all has left its node; as another death is acted upon, or
    # the other node has left the round; and at the end of the run.
    (6, f"{HYBRID} 0,3 --node-size 3"): """
      unpushed:2:3,unsent:1:7
      cut:5:4,pushed:2:9
      held:4:5,cut:1:5
      held:2:1,entered:4:1,cut:5:8
      asking:4:6,again:1:6
      cut:4:6,asking:1:9,asking:2:9
      placing:5:5,cut:1:9
      applied:2:4,after:5:9
      cut:1:3,evaluating:2:29""",
    # The first ranks of the nodes are workers, and one decides; a node has no server.
    (6, f"{HYBRID} 1,4 --node-size 3"): """
      cut:2:6,held:5:6
      unsent:5:6,unpushed:2:6""",
    (6, f"{HYBRID} 0 --node-size 3"): "cut:4:3,entered:5:8",
    (4, f"{SYNC} {NODES}"): """
      half:3:3,partly:1:7
      entered:1:4,applied:3:8
      copying:3:6,after:1:9
      placing:3:5,placing:1:9
      partly:3:6,up:1:6""",
    # Of an agent in the middle of a send, and of an owner between its results.
    (4, f"{SYNC} {NODES} --scale-lr"): """
      summed:3:5,sending:1:9
      sending:3:7,summed:1:7
      summed:3:6,again:1:6""",
    (4, f"{LOCAL} {NODES} --optimizer adam"): """
      half:3:3,partly:1:7
      placing:3:3,placing:1:6""",
    (4, f"{LOCAL} {NODES} {NESTEROV}"): "entered:1:4,applied:3:8",
    (4, f"{LOCAL} {NODES} --optimizer momentum --outer-momentum 0.5"): """
      copying:3:3,after:1:6
      partly:3:6,up:1:6""",
    (4, f"{LOCAL} {NODES} --optimizer adam --outer-momentum 0.5"): "summed:3:3,sending:1:6",
    (4, f"{LOCAL} {NODES} --optimizer adam {NESTEROV}"): "summed:3:4,again:1:4",
}
THREE = """
  half:5:4,partly:1:4,sending:3:4
  sending:1:3,half:3:6,after:5:9
  summed:5:4,up:3:4,again:1:4"""  # a node may be past round 3, another one not
THREE_NODES = {
    (6, f"{SYNC} {NODES} --optimizer adam"): THREE,
    (6, f"{LOCAL} --outer-momentum 0.5 {NODES} --optimizer adam"): THREE,
}
TWICE = "entered:0:2,partly:0:3"  # in two starts, neither of which has saved
# A server, the coordinator, the first rank of a node, which acts on the deaths of the others, or
# all workers.
START_AGAIN = {
    (4, SYNC): f"""
      partly:0:12
      half:2:7,partly:0:13,entered:1:18
      evaluating:2:46
      {TWICE}""",
    (4, f"{SYNC} {NODES}"): """
      summed:2:9
      half:3:7,again:0:7""",
    (4, f"{LOCAL} --optimizer adam --outer-momentum 0.5 {NODES}"): "sending:1:3,placing:2:8",
    (4, f"{LOCAL} --optimizer momentum --outer-momentum 0.5"): "applied:1:3,after:2:6,partly:0:9",
    (4, f"{HYBRID} 0"): "entered:0:7",
    (4, f"{HYBRID} 3"): "unpushed:2:6,pushed:0:9",
    (4, f"{HYBRID} 0,1"): "pushed:2:5,unpushed:3:9",
    (4, f"{HYBRID} 0,2 {NODES}"): """
      cut:1:4,entered:2:7
      cut:1:5,pushed:3:9""",
    (4, f"{HYBRID} 1 {NODES}"): "unsent:3:7,cut:2:8",
}

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not mpirun.survivors_launcher(), reason="this MPI ends jobs whose ranks die"
    ),
]


def cases(table: dict[tuple[int, str], str], *marks: pytest.MarkDecorator) -> list[object]:
    """Return ranks, options and a plan for each line of a table."""
    return [
        pytest.param(ranks, words, plan, id=f"{plan} {words.replace(PROBLEM, '')}", marks=marks)
        for (ranks, words), plans in table.items()
        for plan in plans.split()
    ]


def run(folder: Path, ranks: int, words: str, plan: str) -> tuple[str, Path]:
    """Run the job with its deaths; returns what it says, and the folder of the run."""
    line = [str(PROGRAM), plan, *f"{JOB} {SAVED} {words}".split()]
    with Supervised(folder, ranks, line, "--ft", "--timeout", "60") as job:
        said = job.wait(0)
    assert check_serial(folder / "out", ranks, within=1e-9) == []
    return said, folder / "out"


@pytest.mark.parametrize(
    ("ranks", "words", "plan"), [*cases(GO_ON), *cases(THREE_NODES, pytest.mark.long)]
)
def test_the_others_make_the_round_of_a_death(
    ranks: int, words: str, plan: str, tmp_path: Path
) -> None:
    """Rows, gradients and replicas count if they were whole; all samples do once an epoch."""
    said, out = run(tmp_path, ranks, words, plan)
    deaths = [death.split(":") for death in plan.split(",")]
    # The first round without a rank: the one that it has not brought its part into, or the next.
    first = {int(r): int(step) + (p not in ("half", "unpushed", "asking")) for p, r, step in deaths}
    assert said.count("has died; its") == len(first)
    assert starts_of(out) == 1
    assert {each["rank"]: each["first"] for each in told(out, "lost")} == first
    assert summary(out)["lost"] == sorted(first)
    if "hybrid" in words:
        with open_dataset(Config()) as digits:
            _, y = digits.test.load(0, digits.test.n, np.dtype("f8"))
        assert [each["loss"] for each in told(out, "eval")] == pytest.approx([y.mean()] * 2)


@pytest.mark.parametrize(("ranks", "words", "plan"), cases(START_AGAIN))
def test_a_death_that_starts_the_job_again(
    ranks: int, words: str, plan: str, tmp_path: Path
) -> None:
    """With all ranks, from a checkpoint that fewer may have written.

    Deaths are no failures of the program, which would end two starts without progress.
    """
    said, out = run(tmp_path, ranks, words, plan)
    assert said.count("starting again") == starts_of(out) - 1 == 1 + (plan == TWICE)
    assert "Traceback" not in said


def test_after_a_death_the_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Each sample counts once an epoch: the number of samples says so."""
    _, out = run(tmp_path, 4, SYNC, "entered:2:5")
    n = final(out).state["samples"] // 2
    words = "--resume yes --out out --epochs 3 --on-death restart"
    train(3, *words.split(), cwd=tmp_path).check()
    assert final(out).state["samples"] == 3 * n
    assert summary(out)["lost"] == []
