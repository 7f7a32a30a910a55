"""Mode hybrid beside the other modes that train tables, with click models in PyTorch.

All runs of a case train the same model in one pass over the samples, with one server and the same
workers. The seed determines the clicks, the start and the order; ``--repeats`` is the number of
seeds. The modes take turns within a world, for each seed in another order. Rows have medians over
the seeds of the held-out log loss at the end, with the accuracy, and of the seconds of training.
The ratio is the median over the seeds of a mode's value divided by that of hybrid.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpips.tools.bench import jobs
from mpips.tools.bench.jobs import temporary_folder
from mpips.tools.bench.measure import Options, Row, compare

OUT, HYBRID = "found.json", "hybrid"
MODES: Mapping[str, Mapping[str, Any]] = {
    HYBRID: {"mode": "hybrid"},
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness_bound": 2},
    "sync": {"mode": "sync"},
}
SAMPLES, BATCH, QUICK_SAMPLES = 40_000, 64, 2000


@dataclass(frozen=True)
class Case:
    """Model and workers that all modes share.

    Attributes:
        model: Key of `benchmarks.clicks_program.MODELS`.
        rate: Learning rate of Adam for the parameters.
        workers: Number of workers; there is one server.
        slow: Factor by which one worker is slower.
    """

    model: str
    rate: float
    workers: int = 3
    slow: int = 1


CASES = {
    "wide & deep, 3 workers": Case("wide & deep", 0.01),
    "DLRM, 3 workers": Case("DLRM", 0.01),
    "DLRM, 6 workers, 3 x the rate": Case("DLRM", 0.03, workers=6),
    "DLRM, 3 workers, one 4 x slower": Case("DLRM", 0.01, slow=4),
}


def run(options: Options) -> list[Row]:
    """Compare the modes in each case.

    Raises:
        Failed: If a run fails, or trains on more or fewer samples than another.
    """
    rows = []
    for name, case in list(CASES.items())[: 1 if options.quick else None]:
        found = _train(case, options)
        print(f"benchmarks: {name}: {found}", file=sys.stderr, flush=True)
        rows += compared(name, found)
    return rows


def plan_of(case: Case, seeds: int) -> list[tuple[int, str, dict[str, Any]]]:
    """Return the runs of a case in their order: all modes for each seed, beginning with another."""
    given: dict[str, Any] = {"servers": 1, "batch_size": BATCH, "epochs": 1}
    if case.slow > 1:
        given["inject_delay"] = f"0:{case.slow}"
    names, runs = [*MODES], []
    for seed in range(seeds):
        first = seed % len(names)
        turn = names[first:] + names[:first]
        runs += [(seed, name, {**given, **MODES[name]}) for name in turn]
    return runs


def given_of(case: Case, options: Options) -> dict[str, Any]:
    """Return the arguments of `benchmarks.clicks_program`."""
    runs = plan_of(case, 1 if options.quick else options.repeats)
    samples = QUICK_SAMPLES if options.quick else SAMPLES
    return {"model": case.model, "rate": case.rate, "samples": samples, "runs": runs}


def _train(case: Case, options: Options) -> list[dict[str, Any]]:
    """Run the jobs of a case, and return the results of each."""
    given = given_of(case, options)
    with temporary_folder() as folder:
        jobs.run(case.workers + 1, ["-m", "benchmarks.clicks_program", json.dumps(given)], folder)
        found: list[dict[str, Any]] = json.loads((folder / OUT).read_text())
    if len({each["samples"] for each in found}) > 1:
        raise jobs.Failed(f"runs of different lengths, expected as many samples of each: {found}")
    return found


def compared(name: str, found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return two rows for each mode beside hybrid: held-out loss, and seconds."""
    rows = []
    for mode in MODES:
        if mode == HYBRID:
            continue
        of = partial(_series, found)
        loss, other, ratio = compare(of(HYBRID, "eval_loss"), of(mode, "eval_loss"))
        points = [100 * statistics.median(of(each, "accuracy")) for each in (HYBRID, mode)]
        each = [
            f"{min(of(k, 'eval_loss')):.4f} to {max(of(k, 'eval_loss')):.4f}"
            for k in (HYBRID, mode)
        ]
        text = f"{name}: {each[0]}, {points[0]:.2f} %"
        beside = f"{mode}: {each[1]}, {points[1]:.2f} %"
        rows.append(Row("hybrid log loss", text, loss, "", beside, other, ratio))
        spent, other, ratio = compare(of(HYBRID, "train_s"), of(mode, "train_s"))
        rows.append(Row("hybrid time", name, spent, "s", mode, other, ratio))
    return rows


def _series(found: Sequence[Mapping[str, Any]], mode: str, key: str) -> list[float]:
    """Return the value `key` of each run of a mode, by seed."""
    runs = sorted((each["seed"], each[key]) for each in found if each["name"] == mode)
    return [value for _, value in runs]
