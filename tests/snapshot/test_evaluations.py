"""Evaluators: the curve is that of the checkpoints, the best is kept, patience ends a run."""

import dataclasses
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, train
from runs import (
    ENDLESS,
    MODELS,
    SAVED,
    Plan,
    few_digits,
    final,
    names_asked,
    newest,
    summary,
    thinned,
)

from mpips.checkpoint import list_checkpoints, open_checkpoint, verify
from mpips.checkpoint.files import step_folder
from mpips.config.jobfile import from_toml
from mpips.datasets import iterate, open_dataset
from mpips.problems import load_problem
from mpips.problems.evaluation import CHUNK, metric_sums
from mpips.problems.rows import evaluation
from mpips.snapshot.evaluations import Standing
from mpips.tables.saved_rows import SavedRows

SAMPLES = 160
TOLERANCE = 1e-5  # chunks of other sizes round in another way
PEAKED = ROOT / "tests" / "problems" / "peaked.py"  # lowest in the middle of a run
ENDS = "--mode sync --optimizer sgd --lr 1 --keep-best --keep 1 --eval-every 2"
SAME = f"{ROOT / 'benchmarks' / 'sleeping_model.py'}:SleepingModel"  # its loss is always 1
CLICKS = f"--problem factorization_machine --dataset {ROOT / 'jobs' / 'clicks.svm'} --batch-size 32"
MODES = {  # ranks, options
    "async": (4, "--servers 2 --evaluators 1 --keep-best"),
    "two evaluators": (5, "--servers 1 --evaluators 2 --node-size 2 --dtype float64"),
    "ssp": (4, "--mode ssp --servers 1 --evaluators 1 --node-size 1"),
    "sync": (3, "--mode sync --evaluators 1 --keep-best"),
    "tables": (4, f"--evaluators 1 --keep-best --checkpoint-rows changed {CLICKS}"),
    "backup": (5, "--mode sync --servers 1 --backup-workers 1 --evaluators 1"),
    "local_sgd": (3, "--mode local_sgd --local-steps 2 --evaluators 1"),
    "easgd": (4, "--mode easgd --tau 2 --servers 1 --evaluators 1 --window private"),
}
STOPS = (  # ranks, options
    (5, "--servers 2 --evaluators 1"),
    (3, "--servers 1 --evaluators 1"),
    (5, "--mode sync --evaluators 2"),
    (4, "--servers 1 --evaluators 1"),
)
COMMON = "--keep 1000 --eval-every 0.5 --batch-size 8 --timeout 30"
QUICK = ("async", "sync", "tables")
LOOK_AT_ALL = ("test_the_best", "test_patience", "test_a_target")
PATIENCE = {"async": "--servers 1", "sync": "--mode sync"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    """Runs of the modes that are asked for; and all others, if the tests of those are."""
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), {"async", *names_asked(request)}
    own = ["--hidden", "8", *few_digits(plan.folder, SAMPLES)]
    slow = [*own, "--problem", f"{MODELS}:SlowMLP"]

    def add(name: str, ranks: int, *options: str, code: int = 0, quiet: bool = True) -> None:
        plan.add(name, ranks, [*COMMON.split(), *options], code, quiet)

    for name in filter(asked.__contains__, MODES):
        ranks, options = MODES[name]
        add(name, ranks, *[] if CLICKS in options else slow, *options.split(), "--epochs", "16")
    if any(name.startswith(LOOK_AT_ALL) for name in asked):
        endless, one = ["--epochs", str(ENDLESS)], ["--evaluators", "1"]
        stopping = [*own, "--problem", f"{MODELS}:StoppingMLP", "--keep-best", "--keep", "2"]
        for k, (ranks, options) in enumerate(STOPS):
            more = [*options.split(), *["--resume"] * bool(k)]
            if k + 1 == len(STOPS):
                add("stops", ranks, *stopping, *more, "--epochs", "12")
            else:
                add("stops", ranks, *stopping, *more, *endless, code=SAVED)
        for name, options in PATIENCE.items():
            same = [*own, "--problem", SAME, "--patience", "2", *endless, *options.split(), *one]
            add(f"patience {name}", 3, *same)
            add(f"patience {name}", 3, *same, "--resume")
        add("target", 3, *own, "--target-accuracy", "0.3", *endless, *one)
        last = [*own, *one, *ENDS.split()]
        for epochs in ("3", "8"):
            more = ["--problem", f"{PEAKED}:Peaked", "--epochs", epochs]
            add("last", 3, *last, *more, *["--resume"] * (epochs == "8"))
        add("unsaved", 3, *last, "--problem", f"{PEAKED}:NeverPeaked", "--epochs", "3", code=1)
        best = ["--init-from", str(plan.out("async") / "best"), "--eval-only"]
        add("eval only", 2, *slow, *best, quiet=False)
    plan.run(150)
    return plan


def curve(out: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run, in their order."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "eval"]


def evaluated(out: Path, step: int, problem_name: str = "") -> dict[str, float]:
    """Return the metrics of a checkpoint, evaluated here; by another problem if one is named."""
    saved = open_checkpoint(step_folder(out / "checkpoints", step))
    config = from_toml(saved.config)
    config = dataclasses.replace(config, problem=problem_name or config.problem)
    with open_dataset(config) as data:
        assert data.test is not None
        problem = load_problem(config.problem, data.info, config)
        params = saved.layout.views(saved.read_params())
        batches = iterate(data.test, 0, data.info.n_test, CHUNK, config.dtype)
        sums = metric_sums(batches, evaluation(problem, params, SavedRows(saved)))
        return {name: value / data.info.n_test for name, value in sums.items()}


@pytest.mark.launch
@pytest.mark.parametrize("name", thinned(MODES, QUICK, ()))
def test_the_curve_is_that_of_the_checkpoints(runs: Plan, name: str) -> None:
    out = runs.out(name)
    found = curve(out)
    assert len(found) >= 2
    assert found[-1]["step"] == final(out).step
    assert [line["step"] for line in found] == sorted({line["step"] for line in found})
    for line in found:
        expected = evaluated(out, line["step"])
        measured = {metric: line[metric] for metric in expected}
        assert measured == pytest.approx(expected, rel=TOLERANCE), line
    lowest = min(found, key=lambda line: line["loss"])
    assert summary(out)["best_step"] == lowest["step"]
    assert summary(out)["best_loss"] == lowest["loss"]
    assert (out / "best").is_symlink() == ("--keep-best" in MODES[name][1])


@pytest.mark.launch
@pytest.mark.one_mpi
def test_the_best_is_a_whole_checkpoint(runs: Plan) -> None:
    out = runs.out("async")
    assert verify(out / "best") == []
    assert newest(out / "best").step == summary(out)["best_step"]
    printed = re.search(r"accuracy (\S+), loss (\S+)$", runs.outputs("eval only")[0], re.MULTILINE)
    assert printed is not None
    lowest = min(curve(out), key=lambda line: line["loss"])
    assert float(printed[1]) == pytest.approx(lowest["accuracy"], abs=2e-6)
    assert float(printed[2]) == pytest.approx(lowest["loss"], abs=1e-5)


@pytest.mark.launch
@pytest.mark.one_mpi
def test_the_best_goes_on_through_stops(runs: Plan) -> None:
    out = runs.out("stops")
    standing, seen = Standing(), dict[int, float]()
    for line in curve(out):
        if line["step"] in seen:  # made again: the run was stopped in the middle of it, or after
            assert line["loss"] == pytest.approx(seen[line["step"]], rel=TOLERANCE)
            continue
        seen[line["step"]] = line["loss"]
        standing.note(line["step"], line["loss"])
    found = summary(out)
    assert (found["best_step"], found["best_loss"]) == (standing.best_step, standing.best_loss)
    assert newest(out / "best").step == standing.best_step
    assert len(list_checkpoints(out)) <= 4, "two, the best, and one that is being evaluated"


@pytest.mark.launch
@pytest.mark.one_mpi
def test_the_best_is_there(runs: Plan) -> None:
    """Also if it was the last state of a run that goes on; never one that was not saved."""
    out = runs.out("last")
    lowest = min(curve(out), key=lambda line: line["loss"])
    assert newest(out / "best").step == summary(out)["best_step"] == lowest["step"]
    assert not (runs.out("unsaved") / "best").is_symlink()


@pytest.mark.launch
@pytest.mark.one_mpi
@pytest.mark.parametrize("name", PATIENCE)
def test_patience_ends_a_run(runs: Plan, name: str) -> None:
    out = runs.out(f"patience {name}")
    assert summary(out)["stop_reason"] == "patience"
    assert (out / "DONE").read_text() == "patience\n"
    assert summary(out)["best_step"] == curve(out)[0]["step"]
    lines = (out / "metrics.jsonl").read_text().partition('"kind": "end"')[0]
    assert lines.count('"kind": "eval"') in (3, 4), "the best, two more, and perhaps the last state"
    known = newest(out).state["evaluations"]["standing"]
    assert known["since"] >= 2


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_target_ends_a_run(runs: Plan) -> None:
    out = runs.out("target")
    assert summary(out)["stop_reason"] == "target"
    assert max(line["accuracy"] for line in curve(out)) >= 0.3


HANGS = """
import os, signal
from mpi4py import MPI
from mpips.problems.mlp import MLP
class Hangs(MLP):
    made = 0
    def evaluate(self, params, batch):
        self.made += 1
        if MPI.COMM_WORLD.rank == 3 and self.made == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().evaluate(params, batch)
"""


@pytest.mark.launch
def test_an_evaluator_that_hangs_is_given_up(tmp_path: Path) -> None:
    """The other one evaluates all from then on, and the job ends without it."""
    (tmp_path / "hangs.py").write_text(HANGS)
    words = ["--problem", "hangs.py:Hangs", "--evaluators", "2", "--hidden", "8", "--epochs", "40"]
    words += ["--mode", "sync", "--eval-every", "0.2", "--timeout", "3", "--keep", "1000"]
    ended = train(5, *words, "--out", "out", cwd=tmp_path)
    # Where ranks have been given up the coordinator has mpirun end them; seldom Open MPI's crashes
    # then.
    assert ended.code in (0, -signal.SIGSEGV), ended.output
    out = tmp_path / "out"
    assert (out / "DONE").exists()
    assert "evaluator 0 (rank 3) is stopped for 3 s; the others evaluate its share" in ended.output
    assert summary(out)["lost"] == [3]
    found = curve(out)
    assert len(found) >= 3, "two before it hung, and that one"
    for line in found[:3]:
        metrics = evaluated(out, line["step"], "mlp")
        assert line["loss"] == pytest.approx(metrics["loss"], rel=TOLERANCE)


def test_better_is_a_lower_loss() -> None:
    standing = Standing()
    better = [standing.note(k, loss) for k, loss in enumerate((math.nan, 3.0, 2.0, 2.0, math.inf))]
    assert better == [False, True, True, False, False]
    assert (standing.best_step, standing.best_loss, standing.since) == (2, 2.0, 2)
