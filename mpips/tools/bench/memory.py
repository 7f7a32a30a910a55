"""Memory of a server and a worker, beside the least they need.

Shared memory counts for the rank that owns the segment. By proportional set size, half of each
gradient would count for the server, which reads it in the worker's segment. The sum over all ranks
is by proportional set size, and includes all memory. The measure observes one asynchronous run with
adam from outside, while it trains and while it saves.
"""

import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from mpips.checkpoint.run_folder import METRICS, SUMMARY
from mpips.errors import Exit
from mpips.launch.mpirun import Running
from mpips.mpi.pages import text_of
from mpips.tools.bench.jobs import LIMIT_S, TAIL, TRAIN, Failed, temporary_folder
from mpips.tools.bench.measure import Options, Row

WIDTH, QUICK_WIDTH = 8000, 2200  # 258 and 20 MB of parameters; with adam's slots three times that
SERVER, WORKER = 0, 1
SPARE_MB = 100
STEADY, COPIED = 1.1, 2.1
WATCHED_S, QUICK_S = 4.0, 0.3
PERIOD_S = 0.02


def run(options: Options) -> list[Row]:
    """Compare the memory of a server, while it trains and while it saves, and of a worker.

    Raises:
        Failed: If the run fails.
    """
    width = QUICK_WIDTH if options.quick else WIDTH
    with temporary_folder() as folder:
        steady, own, peak = _watch(folder, width, QUICK_S if options.quick else WATCHED_S)
        summary = json.loads((folder / "run" / SUMMARY).read_text())
    state = summary["per_server"][0]["bytes"] / 1e6
    replica = summary["parameters"] * 4 / 1e6
    model = f"{replica:.0f} MB of parameters, adam"
    everyone = sum(steady), STEADY * state + 2 * 3 * replica + 2 * SPARE_MB
    cases = (
        (f"server, {model}", own[SERVER] + state, STEADY * state, f"{STEADY:g} x state"),
        (f"server that saves, {model}", peak + state, COPIED * state, f"{COPIED:g} x state"),
        (f"worker, {model}", own[WORKER] + 2 * replica, 3 * replica, "replica, 2 gradients"),
        (f"server and 2 workers, {model}", *everyone, "all of these"),
    )
    return [
        Row("memory", case, used, "MB", f"{what}, + {SPARE_MB} MB", bound + SPARE_MB,
            (bound + SPARE_MB) / used, 1.0)
        for case, used, bound, what in cases
    ]  # fmt: skip


def _watch(folder: Path, width: int, watched_s: float) -> tuple[list[float], list[float], float]:
    """Run a job, and return the memory of its ranks in MB.

    Returns:
        Memory of each rank while it trains; private memory of each rank while it trains; largest
        private memory of the server.
    """
    options = ["--hidden", f"{width},{width}", "--batch-size", "4", "--servers", "1"]
    options += ["--optimizer", "adam", "--lr", "1e-5", "--epochs", "100000", "--eval-every", "0"]
    options += ["--checkpoint-every", "0", "--out", "run"]
    with Running(3, [*TRAIN, *options], folder) as job:
        log = folder / "run" / METRICS
        seen = _sizes_until(job, lambda _: '"checkpoint"' in text_of(log))  # of step 0
        ends = time.monotonic() + watched_s
        steps = _sizes_until(job, lambda count: time.monotonic() > ends and count > 1)
        late = steps[len(steps) // 2 :]
        steady, own = (
            [statistics.median(size[k] for size in sizes) for sizes in zip(*late, strict=True)]
            for k in (0, 1)
        )
        os.kill(job.ranks()[SERVER], signal.SIGUSR1)
        seen += steps + _sizes_until(job, lambda _: job.process.poll() is not None)
        if job.process.returncode != Exit.SAVED:
            raise Failed(job.output()[-TAIL:])
    return steady, own, max(sizes[SERVER][1] for sizes in seen)


def _sizes_until(job: Running, done: Callable[[int], bool]) -> list[list[tuple[float, float]]]:
    """Read the memory of a job's ranks repeatedly.

    Args:
        job: The job.
        done: Function of the number of results so far, which returns whether to end.

    Returns:
        Results of `_sizes_mb` for all ranks, each time that all were running.

    Raises:
        Failed: If the job ends before, or takes too long.
    """
    seen, ends = list[list[tuple[float, float]]](), time.monotonic() + LIMIT_S
    while not done(len(seen)):
        ended = job.process.poll() is not None
        if (ended and not done(len(seen))) or time.monotonic() > ends:
            raise Failed(job.output()[-TAIL:])
        sizes = [_sizes_mb(pid) for pid in job.ranks()]
        if len(sizes) == 3 and all(size for size, _ in sizes):
            seen.append(sizes)
        time.sleep(PERIOD_S)
    return seen


def _sizes_mb(pid: int) -> tuple[float, float]:
    """Return the proportional set size of a process in MB, and that of its private mappings.

    Both are 0 if the process has ended.
    """
    total, own, shared = 0, 0, False
    for line in text_of(Path(f"/proc/{pid}/smaps")).splitlines():
        words = line.split()
        if "-" in words[0]:  # the line of a mapping: addresses, permissions, ...
            shared = words[1].endswith("s")
        elif words[0] == "Pss:":
            total += int(words[1])
            own += 0 if shared else int(words[1])
    return total * 1024 / 1e6, own * 1024 / 1e6
