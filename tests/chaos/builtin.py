"""The built-in jobs: digits are counted, in any mode, for as long as the faults take."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from mpips.config.command_line import load
from mpips.errors import UserError
from mpips.launch import mpirun
from mpips.layout.roles import assign, with_spares
from tests.chaos import counting
from tests.chaos.plan import Fault, chosen

MODES = {
    "async": "--mode async",
    "ssp": "--mode ssp --staleness-bound 2",
    "async-servers": "--mode async --servers 2",
    "ssp-spare": "--mode ssp --staleness-bound 2 --servers 1 --spares 1",
    "async-nodes": "--mode async --servers 2 --server-ranks 2,3 --node-size 2",
    "ssp-nodes": "--mode ssp --staleness-bound 2 --servers 1 --node-size 1",
    "ssp-nodes-spare": "--mode ssp --staleness-bound 2 --servers 1 --spares 1 --node-size 2",
    "sync": "--mode sync",
    "sync-shrink": "--mode sync --on-death shrink --hidden 100000 --eval-every 0.2",
    "sync-shrink-nodes": "--mode sync --on-death shrink --eval-every 0.2 --node-size 2",
    "local_sgd": "--mode local_sgd --local-steps 2",
    "local_sgd-shrink": "--mode local_sgd --local-steps 2 --on-death shrink --eval-every 0.2",
    "local_sgd-shrink-nodes": (
        "--mode local_sgd --local-steps 2 --on-death shrink --eval-every 0.2 --node-size 2 "
        "--optimizer momentum --momentum 0.5 --outer-momentum 0.5"
    ),
    "easgd": "--mode easgd --tau 2 --hidden 1000 --keep 1000 --checkpoint-every 25steps",
    "backup": "--mode sync --servers 1 --backup-workers 1",
    "async-topk": "--mode async --codec topk --topk-ratio 0.1 --node-size 1",
    "async-onebit": "--mode async --codec onebit --node-size 1",
    "async-fp16": "--mode async --codec fp16 --node-size 1",
    "async-bf16": "--mode async --codec bf16 --node-size 1",
    "async-int8": "--mode async --codec int8 --node-size 1",
    "async-aggregated": "--mode async --servers 1 --node-aggregation --node-size 2",
    "async-aggregated-topk": "--mode async --codec topk --node-aggregation --node-size 2",
    "ssp-topk": "--mode ssp --staleness-bound 2 --codec topk --topk-ratio 0.1 --node-size 1",
    "sync-topk": "--mode sync --codec topk --topk-ratio 0.1 --node-size 2",
    "sync-powersgd": "--mode sync --codec powersgd --powersgd-rank 2 --node-size 2",
    "async-tables": "--mode async --servers 2",
    "ssp-tables": "--mode ssp --staleness-bound 2 --servers 2 --checkpoint-rows changed",
    "async-spare-tables": "--mode async --servers 1 --spares 1",
    "sync-tables": "--mode sync --checkpoint-rows changed",
    "async-nodes-tables": "--mode async --servers 2 --server-ranks 2,3 --node-size 2",
    "ssp-nodes-tables": "--mode ssp --staleness-bound 2 --servers 2 --node-size 1",
    "sync-nodes-tables": "--mode sync --node-size 2",
    "hybrid-tables": "--mode hybrid --servers 1 --checkpoint-rows changed",
    "hybrid-shrink-tables": "--mode hybrid --servers 1 --on-death shrink --eval-every 0.2",
    "hybrid-shrink-nodes-tables": (
        "--mode hybrid --servers 2 --on-death shrink --eval-every 0.2 --node-size 2"
    ),
    "hybrid-nodes-tables": "--mode hybrid --servers 2 --node-size 2",
}
PROGRAM = "program-"  # begins the names of jobs that are programs of `mpips.run`
MODES |= {
    f"{PROGRAM}{name}": MODES[name]
    for name in ("async", "ssp", "sync", "local_sgd", "easgd", "backup")
}
MODES[f"{PROGRAM}ssp"] += " --servers 2"
SHRUNK = tuple(name for name in MODES if "shrink" in name)  # rounds go on without workers
INVARIANT = tuple(name for name in MODES if name.endswith(("easgd", "backup")))
DIGITS, HELD_OUT, BATCH = 1797, 359, 8
SAVE_S = 0.4
FAULT_S = 12.0  # for which workers make steps, at most, before a fault and after it
COMMON = f"""
--dataset digits --dtype float64 --optimizer sgd --batch-size {BATCH} --hidden 40000
--checkpoint-every {SAVE_S} --eval-every 0 --log-every 0.1
"""


def parse_modes(text: str) -> list[str]:
    """Return the names of built-in jobs in a list with commas; ``all`` for each that can run."""
    names = chosen(text, "built-in job", [*MODES])
    shrunk = [name for name in names if name in SHRUNK]
    if not shrunk or mpirun.survivors_launcher():
        return names
    if text != "all":
        got = f"built-in job {shrunk[0]!r} where this MPI ends all ranks"
        raise UserError(got, "a job without 'shrink'", "take Open MPI, or leave it out")
    return [name for name in names if name not in shrunk]


def job(
    mode: str, ranks: int, plan: Sequence[Fault], timeout_s: float, out: Path, on_hosts: bool
) -> list[str]:
    """Return the words of a built-in job that lasts until all faults of a plan have come."""
    words = options(mode, ranks, plan, timeout_s)
    if on_hosts and "--node-size" in words:
        at = words.index("--node-size")
        del words[at : at + 2]
    if mode.startswith(PROGRAM):
        return ["-m", "tests.chaos.program", str(out), *words]
    return [*words, "--out", str(out)]


def options(mode: str, ranks: int, plan: Sequence[Fault], timeout_s: float) -> list[str]:
    """Return the options of a built-in job; see `job`."""
    words = [*COMMON.split(), *shlex.split(MODES[mode])]
    kind = "Table" if mode.endswith("-tables") else "Matrix" if mode == "sync-powersgd" else ""
    config = load(words)
    roles = assign(config.mode, ["here"] * ranks, [0] * ranks, config.servers)
    workers = len(with_spares(roles, config.spares, [0] * ranks).workers)
    problem, rate, n_train = f"{kind}Counting", 1, DIGITS - HELD_OUT
    if config.in_rounds:  # of which each is to be whole: a mean over fewer samples counts for more
        n_train -= n_train % (BATCH * workers * config.round_steps)
        rate = workers
        if config.mode in ("sync", "hybrid"):
            problem, rate = f"{kind}MeanCounting", BATCH * workers
    seconds = sum(FAULT_S + timeout_s * (fault.action == "stop") for fault in plan)
    epochs = math.ceil(seconds / counting.HELD_S * workers * BATCH / n_train)
    words += ["--problem", _problem(problem), "--lr", f"{rate}", "--epochs", f"{epochs}"]
    return [*words, "--test-fraction", f"{(DIGITS - n_train) / DIGITS:.6f}"]


def _problem(name: str) -> str:
    return f"{Path(counting.__file__).resolve()}:{name}"
