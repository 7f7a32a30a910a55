"""Held-out accuracy of every mode beside one rank alone, and of every codec beside none.

Whole runs of the job files in jobs/, with 2 servers and 6 workers, on two problems; ``--repeats``
is the number of seeds. The seed determines the start and the order, which compared runs share. All
modes of a problem train the same model on the same number of samples. So do a codec and the job
without it, on 2 nodes of 4 ranks, with a model wide enough to pack its shards. The accuracy is that
at the end, and the aim is for the mean over the seeds. The case "untuned" uses the batch and the
rate of the run on one rank, and shows the cost of staleness. With --plot, all runs evaluate after
each epoch, and the means over the seeds are drawn too.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import curves
from benchmarks.options import BenchmarkOptions
from mpips.checkpoint.run_folder import METRICS, SUMMARY
from mpips.config.jobfile import shared_files
from mpips.tools.bench import jobs
from mpips.tools.bench.jobs import temporary_folder
from mpips.tools.bench.measure import Row

PROBLEMS = ("digits", "spirals")
RANKS, SERVERS = 8, 2
POINTS = 0.5  # largest loss of accuracy, in percentage points
PACKED = 0.9  # largest share of the bytes between nodes with a codec; every codec saves more
QUICK_EPOCHS = 1
SERIAL = "serial"
UNPACKED = ("--codec", "none", "--pull-codec", "none")


@dataclass(frozen=True)
class Case:
    """One of the compared runs.

    Attributes:
        job: Part of the job file's name after the problem.
        beside: Case on the other side of the comparison; None for such a case itself.
        options: Options that override those of the job file.
        ranks: Number of ranks.
        aim: Whether the accuracy should be within `POINTS` of `beside`.
    """

    job: str
    beside: str | None = SERIAL
    options: tuple[str, ...] = ()
    ranks: int = RANKS
    aim: bool = True


CASES = {
    SERIAL: Case("-serial", None, ranks=1),
    "async, untuned": Case("-serial", options=("--mode", "async"), aim=False),
    "async": Case(""),
    "ssp": Case("-ssp"),
    "sync": Case("-sync"),
    "sync, 1 backup": Case("-backup"),
    "local_sgd": Case("-local-sgd"),
    "easgd": Case("-easgd"),
    "none, adam": Case("-packed", None, UNPACKED),
    "fp16, adam": Case("-packed", "none, adam", ("--codec", "fp16")),
    "bf16, adam": Case("-packed", "none, adam", ("--codec", "bf16")),
    "int8, adam": Case("-packed", "none, adam", ("--codec", "int8")),
    "none, sgd": Case("-onebit", None, UNPACKED),
    "onebit, sgd": Case("-onebit", "none, sgd"),
    "topk, sgd": Case("-topk", "none, sgd"),
    "none, rounds": Case("-powersgd", None, UNPACKED),
    "powersgd, rounds": Case("-powersgd", "none, rounds"),
}


@dataclass(frozen=True)
class RunResult:
    """Results of a run.

    Attributes:
        accuracy: Held-out accuracy in percent.
        samples: Number of samples trained on.
        parameters: Number of parameters of the model.
        bytes_sent: Bytes of pushes, or of rounds' sums, to other nodes.
        curve: Seconds, share of the epochs, accuracy in percent; shape (3, evaluations).
    """

    accuracy: float
    samples: int
    parameters: int
    bytes_sent: int
    curve: np.ndarray = field(default_factory=lambda: np.zeros((3, 0)), compare=False)


def run(options: BenchmarkOptions) -> list[Row]:
    """Compare all cases of all problems.

    Raises:
        Failed: If a run fails, or two compared runs trained on different numbers of samples.
    """
    rows, panels = [], []
    for problem in PROBLEMS:
        found: dict[str, list[RunResult]] = {}
        for name, case in CASES.items():
            found[name] = _train(problem, case, options)
            _tell(f"{problem}, {name}", found[name])
        check(problem, found)
        rows += compared(problem, found)
        panels += _panels(problem, found)
    if options.plot is not None:
        curves.draw(panels, options.plot)
    return rows


def _panels(
    problem: str, found: Mapping[str, Sequence[RunResult]]
) -> list[tuple[str, str, curves.Curves]]:
    """Return the panels of a problem: modes over time, and codecs over MB between nodes."""
    modes = {name: [run.curve[[0, 2]] for run in runs] for name, runs in found.items()
             if SERIAL in (name, CASES[name].beside)}  # fmt: skip
    codecs = {
        name: [np.stack([run.bytes_sent / 1e6 * run.curve[1], run.curve[2]]) for run in runs]
        for name, runs in found.items() if name not in modes
    }  # fmt: skip
    return [(f"{problem}: modes", "seconds", modes), (f"{problem}: codecs", "MB sent", codecs)]


def _train(problem: str, case: Case, options: BenchmarkOptions) -> list[RunResult]:
    """Run a job file with each seed.

    Raises:
        Failed: If a run fails.
    """
    job = str(shared_files("jobs")[f"{problem}{case.job}.toml"])
    number = 1 if options.quick else options.repeats
    words = ["--quiet", "--checkpoint-every", "0", *case.options]
    words += ["--eval-every", "1" if options.plot else "0"]
    if case.ranks > 1:
        words += ["--servers", str(SERVERS)]
    if options.quick:
        words += ["--epochs", str(QUICK_EPOCHS)]
    with temporary_folder() as folder:
        jobs.run(case.ranks, ["-m", "benchmarks.seeds", str(number), job, *words], folder)
        return [_result(folder / f"run-{seed}") for seed in range(number)]


def _result(run: Path) -> RunResult:
    summary = json.loads((run / SUMMARY).read_text())
    if summary["stop_reason"] != "epochs":
        raise jobs.Failed(f"a run ended by {summary['stop_reason']}, expected its epochs")
    samples, parameters, sent = (summary[k] for k in ("samples", "parameters", "bytes_sent"))
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    points = [
        (line["time_s"] - lines[0]["time_s"], line["epoch"] / summary["epochs"], line["accuracy"])
        for line in lines if line["kind"] == "eval"
    ]  # fmt: skip
    points.append((lines[-1]["time_s"] - lines[0]["time_s"], 1.0, summary["accuracy"]))
    scale = np.array([[1.0], [1.0], [100.0]])
    curve = np.array(points).T * scale
    return RunResult(100 * summary["accuracy"], samples, parameters, sent, curve)


def check(problem: str, found: Mapping[str, Sequence[RunResult]]) -> None:
    """Check that the compared runs are comparable.

    Args:
        problem: Name of the problem.
        found: Runs of each case in `CASES`, by seed.

    Raises:
        Failed: If two cases differ in samples or model, or a codec packed nothing.
    """
    for name, case in CASES.items():
        for mine, other in zip(found[name], found[case.beside or name], strict=True):
            for what in ("samples", "parameters"):
                got, expected = getattr(mine, what), getattr(other, what)
                if got != expected:
                    what = f"{problem}, {name}: {got} {what}, expected {expected}"
                    raise jobs.Failed(f"{what} as in {case.beside!r}; change its job file")
            packed = case.beside not in (None, SERIAL)
            if packed and mine.bytes_sent > PACKED * other.bytes_sent:
                what = f"{problem}, {name}: {mine.bytes_sent} bytes between nodes"
                raise jobs.Failed(f"{what}, expected at most {PACKED} x {other.bytes_sent}")


def compared(problem: str, found: Mapping[str, Sequence[RunResult]]) -> list[Row]:
    """Return a row for each case: mean and worst accuracy, and the mean of the other side.

    Args:
        problem: Name of the problem.
        found: Runs of each case in `CASES`, by seed.
    """
    mean = {name: statistics.mean(o.accuracy for o in runs) for name, runs in found.items()}
    rows = []
    for name, case in CASES.items():
        mine, other = mean[name], mean[case.beside or name]
        text = f"{problem}, {name}: worst {min(o.accuracy for o in found[name]):.2f}"
        if case.beside:
            text += f", {mine - other:+.2f} points"
        beside = f"{case.beside or name}, mean of {len(found[name])}"
        reach = (other - POINTS) / other if case.beside and case.aim else None
        rows.append(Row("accuracy", text, mine, "%", beside, other, mine / other, reach))
    return rows


def _tell(label: str, runs: Sequence[RunResult]) -> None:
    """Print the results of a case, as progress of a long measure."""
    each = " ".join(f"{o.accuracy:.2f}" for o in runs)
    print(f"benchmarks: {label}: {each}", file=sys.stderr, flush=True)
