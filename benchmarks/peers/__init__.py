"""mpips beside its peers: the same work, in turn, each in its own processes."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import core_rows, mlp, recovery, row_workers, torch
from benchmarks.options import BenchmarkOptions
from benchmarks.peers import process
from benchmarks.peers.script import ONE_CORE, STEPS
from benchmarks.row_workers import DRAWN
from benchmarks.turns import compare_rates, take_turns
from mpips.errors import UserError
from mpips.launch.mpirun import survivors_launcher
from mpips.tools.bench import jobs
from mpips.tools.bench.measure import MEASURES, Options, Row, bytes_text
from mpips.tools.bench.row_ids import ROW_DIM

LIMIT_S = 300.0
QUICK_STEPS = 4
ENDLESS = 1_000_000  # epochs


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        measure: The corresponding measure of mpips.
        peer: A key of `process.PEERS`.
        work: A key of `process.UNITS`.
        case: Text of the row.
        ranks: Number of ranks of mpips, servers and workers together.
        workers: Number of workers on either side.
        steps: Number of steps of a peer's worker in one repeat.
        reach: Smallest ratio that is the aim.
        size: Bytes of the parameters.
        options: For training, options of `mpips.train`, or the mode.
    """

    measure: str
    peer: str
    work: str
    case: str
    ranks: int
    workers: int
    steps: int
    reach: float
    size: int = 0
    options: tuple[str, ...] = ()


def _push_pull(peer: str, size: int, steps: int, reach: float) -> Case:
    case = f"{bytes_text(size)}, 1 server, 2 workers"
    return Case("pushpull", peer, "push+pull", case, 3, 2, steps, reach, size)


def _train(peer: str, ranks: str, world: int, reach: float, *options: str) -> Case:
    return Case("mlp", peer, "mlp", ranks, world, 2, 200, reach, options=options)


def _round(peer: str, ranks: int, size: int, steps: int, reach: float) -> Case:
    case, steps = f"{bytes_text(size)}, {ranks} ranks", max(2, 4 * steps // ranks**2)
    return Case("rounds", peer, "round", case, ranks, ranks, steps, reach, size)


def _train_torch(peer: str, ranks: str, world: int, mode: str, reach: float = 1.5) -> Case:
    return Case("torch", peer, "mlp", f"{mode}, {ranks}", world, 2, 200, reach, options=(mode,))


def _rows(rows: int, drawn: str) -> Case:
    case = f"{row_workers.Case(rows, drawn)}, pull + Adagrad"
    size = rows * ROW_DIM * 4
    return Case("rows", "tensorflow-ps", drawn, case, 3, 2, 60, 5, size)


def _core_rows(work: str, rows: int = 1_000_000) -> Case:
    case = f"{core_rows.case(work, rows)}, CPU time"
    return Case("rows", "fbgemm", work, case, 1, 1, STEPS[work], 2, rows * ROW_DIM * 4)


OUR_STEPS = 15  # of rows, for one of the peer: or it would be over at once
ROUND_RANKS = 2, 4, 8
ROUNDS = (  # bytes, steps of two ranks, the ratios to DeepSpeed and to plain C that are aimed at
    *((4 << 10, 5000, 6, 0.3), (64 << 10, 4000, 13, 0.6), (1 << 20, 400, 30, 0.9)),
    *((16 << 20, 30, 3.4, 0.95), (64 << 20, 10, 4, 0.95)),
)
CASES = (
    _push_pull("tensorflow-ps", 64 << 10, 400, 10),
    _push_pull("tensorflow-ps", 1 << 20, 200, 10),
    _push_pull("tensorflow-ps", 16 << 20, 30, 5),
    _push_pull("torch-rpc", 16 << 20, 30, 3),
    _push_pull("plain-c", 4 << 10, 20000, 0.3),
    _push_pull("plain-c", 64 << 10, 4000, 0.6),
    _push_pull("plain-c", 1 << 20, 500, 0.7),
    _push_pull("plain-c", 16 << 20, 30, 0.95),
    Case("rounds", "torch-ddp", "round", "16.8 MB, 2 ranks", 2, 2, 30, 4, 16 << 20),
    *(_round("deepspeed-shm", n, *each[:3]) for n in ROUND_RANKS for each in ROUNDS),
    *(_round("plain-c", 2, *each[:2], each[3]) for each in ROUNDS),
    _train("tensorflow-ps", "async, 1 server, 2 workers", 3, 2, "--servers", "1"),
    _train("torch-ddp", "sync, 2 ranks", 2, 1.6, "--mode", "sync"),
    _train("deepspeed-shm", "sync, 2 ranks", 2, 1.2, "--mode", "sync"),
    Case("mlp", "torchft", "mlp", "sync, 3 ranks", 3, 3, 200, 1.5, options=("--mode", "sync")),
    Case("recovery", "torchft", "death", "sync, 3 ranks, one dies", 3, 3, 50, 5),
    _train_torch("torch-ddp", "2 ranks", 2, "sync"),
    _train_torch("deepspeed-shm", "2 ranks", 2, "sync", 1.2),
    _train_torch("tensorflow-ps", "1 server, 2 workers", 3, "async"),
    Case("torch", "torch-ddp", "memory", "adam, sync, 4 ranks", 4, 4, 2, 2, 400_000_000),
    *(_rows(rows, drawn) for rows in (1_000_000, 50_000_000) for drawn in DRAWN),
    *map(_core_rows, ONE_CORE),
)
NAMES = {"push+pull": "push+pull", "round": "sync round", "mlp": "mlp", "death": "recovery"}
NAMES |= dict.fromkeys((*DRAWN, *ONE_CORE), "rows")
QUICK_SHARE = 0.01  # share of the parameters in a quick measure of memory


def run(options: BenchmarkOptions) -> Iterator[Row]:
    """Compare with all peers that are installed in a virtual environment.

    Raises:
        Failed: After all cases, if runs of mpips or of peers have failed.
        UserError: If no environment is given, or it does not work.
    """
    if options.venv is None:
        remedy = (
            "install torch, torchft, tensorflow-cpu, deepspeed, ninja and fbgemm-gpu-cpu into one"
        )
        raise UserError("measure peers without --venv", "--venv VENV", remedy)
    missing, survivors = process.missing(options.venv), survivors_launcher()
    for name, why in missing.items():
        print(f"benchmarks: {name} is left out: {why}", file=sys.stderr, flush=True)
    failed = []
    for case in CASES:
        if case.peer not in missing and (survivors or case.work != "death"):
            try:
                yield _compare(case, options.venv, options)
            except (jobs.Failed, UserError) as error:
                failed.append(f"{case.peer}, {case.work}, {case.case}: {error}")
                print(f"benchmarks: failed: {failed[-1]}", file=sys.stderr, flush=True)
    if failed:
        raise jobs.Failed("\n".join(failed))


def _compare(case: Case, venv: Path, options: Options) -> Row:
    """Take turns with a peer.

    Raises:
        Failed: If a run of mpips fails.
        UserError: If a run of the peer fails.
    """
    steps, repeats = QUICK_STEPS if options.quick else case.steps, options.repeats
    if case.work == "memory":
        repeats = 1  # memory does not vary
        if options.quick:
            case = dataclasses.replace(case, size=int(QUICK_SHARE * case.size))
    if case.work in DRAWN and options.quick:
        case = _rows(10_000, case.work)
    if case.work in ONE_CORE and options.quick:
        case = _core_rows(case.work, 10_000)

    def theirs() -> float:
        return process.measure(
            venv, case.peer, case.work, size=case.size, workers=case.workers,
            steps=steps, repeats=1, timeout_s=LIMIT_S,
        ).rate  # fmt: skip

    with jobs.temporary_folder() as folder:
        text, ours = _ours(case, options, folder)
        found = take_turns({"mpips": ours, "peer": theirs}, repeats)
    mine, other, ratio = compare_rates(found["mpips"], found["peer"])
    unit = process.UNITS[case.work]
    if case.work in ("round", "death"):  # shown as times, as the other rounds are
        mine, other, unit = 1e3 / mine, 1e3 / other, "ms"
    if case.work == "memory":  # less is better
        ratio = 1 / ratio
    name = "torch" if case.measure == "torch" else NAMES[case.work]
    return Row(name, text, mine, unit, case.peer, other, ratio, case.reach)


def _ours(case: Case, options: Options, folder: Path) -> tuple[str, Callable[[], float]]:
    """Return the text of a case, and a function that measures mpips."""
    if case.work == "memory":
        text = f"{case.size / 4e6:.0f} M parameters, {case.case}"
        return text, partial(torch.memory_mb, case.ranks, case.size // 4)
    if case.measure == "torch":
        text = f"MLP {torch.shape(options)}, batch 64, {case.case}"
        return text, partial(torch.rate, case.options[0], case.ranks, options)
    if case.work == "mlp":
        job = mlp.Perceptron(folder, options.quick)
        return f"{job.case}, {case.case}", partial(job.rate, case.ranks, *case.options)
    if case.work == "death":
        job = mlp.Perceptron(folder, options.quick)
        return f"{job.case}, {case.case}", partial(_death, job, case.ranks, folder)
    if case.work in DRAWN:
        steps = OUR_STEPS * case.steps
        drawn = row_workers.Case(case.size // (4 * ROW_DIM), case.work)
        return case.case, partial(row_workers.rate, drawn, steps)
    if case.work in ONE_CORE:
        rows, steps = case.size // (4 * ROW_DIM), QUICK_STEPS if options.quick else case.steps
        return case.case, partial(core_rows.rate, case.work, rows, steps)
    return case.case, partial(_world, case)


def _death(job: mlp.Perceptron, ranks: int, folder: Path) -> float:
    """Kill a rank of a job in rounds; returns 1 / (seconds until the others continue)."""
    with jobs.temporary_folder() as place:
        words = [*job.words(place / "out", ENDLESS), "--mode", "sync"]
        words[words.index("samples.npz")] = str(folder / "samples.npz")
        (seconds,) = recovery.after_deaths(ranks, 1, words, survivors_launcher(), place)
    return 1 / seconds


def _world(case: Case) -> float:
    """Return the rate of mpips in a new world, in the peer's unit."""
    only = Options(repeats=1, sizes=(case.size,))
    (row,) = jobs.world(MEASURES[case.measure], case.ranks, only)
    return row.value if row.unit == "GB/s" else 1e3 / row.value
