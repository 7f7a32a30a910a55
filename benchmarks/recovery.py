"""Time from the death of a rank to the first update after it, and the longest of all repeats.

A gradient sleeps for 10 ms. Failures that end a job are repeated with a job under `mpips.launch`.
Their time includes a pause of a second, the start of Python and of the ranks, and the first step.
If MPI lets other ranks continue, the measure kills a worker, server 0 and another server of a job
with 3 servers and 3 workers; each time a shard is taken over. The time ends when a worker's push
after the death is applied to all shards. The status boards show this, as a worker may have two
more pushes open. In rounds, the measure kills one of 5 workers, and then another. The time ends
when the others have made the current round and the next one.

With shards of 100 MB, gradients take seconds, so servers keep up. Then the time ends at the line in
`metrics.jsonl` that a shard is served again. The aim is a second.

``--repeats 20`` gives the figures of the guide.
"""

import contextlib
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from benchmarks.sleeping_model import SleepingModel
from mpips.checkpoint.run_folder import METRICS, read_ranks
from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.errors import write_line
from mpips.health import status_board
from mpips.health.status_board import RankStatus, StatusBoard
from mpips.launch.mpirun import Running, survivors_launcher
from mpips.launch.ranks import open_boards
from mpips.layout import Layout
from mpips.problems.base import Arrays
from mpips.tools.bench.jobs import Failed, temporary_folder
from mpips.tools.bench.measure import Options, Row, bytes_text
from tests.chaos.follow import Follower, strike
from tests.chaos.job import Job
from tests.chaos.plan import TRAINING, Fault

RANKS = 4
ENDING = {  # failures that end a job with one server, with their names
    "kill:worker": "a worker is killed", "kill:server": "the only server is killed",
    "kill:job": "mpirun is killed", "exception:worker": "a worker raises",
}  # fmt: skip
DEATHS = (  # deaths in a job that continues
    "a worker is killed: the others go on",
    "server 0 is killed: the next one takes its shard and duties over",
    "another server is killed: that one takes its shard over",
)
SERVERS, WORKERS = 3, 3
OPEN = 2  # pushes of a worker that may not be applied yet
ROUNDS = {  # modes in rounds, in which a job continues without a worker
    "sync": "a worker is killed in rounds of sync: the others go on",
    "local_sgd": "a worker is killed in local_sgd: the others go on",
}
SIZES, QUICK = (64 << 10, 100_000_000), (64 << 10,)  # bytes of a shard
AIM_S, LARGE = 1.0, 10_000_000
SLEEP_S = 3.0  # duration of a large gradient
WAIT_S, POLL_S, REST_S = 120.0, 0.001, 1.0
FAILURES = 3  # largest number of failed jobs of one kind
Times: TypeAlias = dict[str, list[float]]
TRAIN = (
    "--mode", "async", "--optimizer", "sgd", "--batch-size", "8", "--epochs", "1000000",
    "--eval-every", "0", "--log-every", "0.1",
)  # fmt: skip


class Large(SleepingModel):
    """A vector of ``--hidden`` parameters, whose gradient sleeps."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"w": (config.hidden[0],)})

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return 1, after a while."""
        if out["w"].size >= LARGE:
            time.sleep(SLEEP_S)
        return super().loss_and_grad(params, batch, out)


def run(options: Options) -> list[Row]:
    """Measure failures that end a job, and deaths after which a job continues if MPI allows it.

    Raises:
        Failed: If a job does not recover.
    """
    repeats, rows = 1 if options.quick else options.repeats, []
    survivors = survivors_launcher()
    for kind, name in list(ENDING.items())[-1 if options.quick else 0 :]:
        if kind == "kill:worker" and survivors:
            continue  # the others go on
        found, failed = _repeated(partial(_restarts, kind, repeats), [kind], repeats)
        rows.append(_row(f"{name}: the job starts again", found[kind], failed))
    for size in options.pick(SIZES, QUICK) if survivors else ():
        found, failed = _repeated(partial(_deaths, size, survivors), DEATHS, repeats)
        aim, size_text = size >= LARGE and not options.quick, bytes_text(size)
        rows += [_row(f"{k}, shards of {size_text}", found[k], failed, aim) for k in DEATHS]
    for mode, name in ROUNDS.items() if survivors else ():
        found, failed = _repeated(partial(_rounds, mode, survivors), [name], repeats)
        rows.append(_row(name, found[name], failed))
    return rows


def _repeated(
    measure: Callable[[Path, Times], None], names: Iterable[str], repeats: int
) -> tuple[Times, int]:
    """Measure with one job after another, until there are `repeats` times under each name.

    If a job does not recover, the function prints this and starts another job. Times measured
    before stay.

    Returns:
        The times, and the number of jobs that did not recover.

    Raises:
        Failed: If more than `FAILURES` jobs did not recover.
    """
    found: Times = {name: [] for name in names}
    failed = 0
    while min(map(len, found.values())) < repeats:
        with temporary_folder() as folder:
            try:
                measure(folder, found)
            except (Failed, TimeoutError) as error:
                failed += 1
                if failed > FAILURES:
                    raise Failed(f"{failed} jobs have failed, the last one: {error}") from None
                write_line(f"benchmarks: recovery: a job has failed: {error}", sys.stderr)
    return found, failed


def _row(case: str, seconds: list[float], failed: int, aim: bool = False) -> Row:
    middle, worst = statistics.median(seconds), max(seconds)
    left_out = f", {failed} failed" if failed else ""
    if aim:
        beside = f"worst{left_out}; aim"
        return Row("recovery", case, worst, "s", beside, AIM_S, AIM_S / worst, 1.0)
    beside = f"worst of {len(seconds)}{left_out}"
    return Row("recovery", case, middle, "s", beside, worst, worst / middle)


def _restarts(kind: str, repeats: int, folder: Path, found: Times) -> None:
    """Cause a failure repeatedly in a job that restarts, and add the seconds of each recovery."""
    out, times = folder / "out", found[kind]
    job_words = ["--problem", f"{__file__}:Large", "--hidden", "1000", *TRAIN, "--servers", "1"]
    job_words += ["--checkpoint-every", "0.3", "--out", str(out)]
    if kind.startswith("exception"):
        train = ["-m", "mpips.train", *job_words, "--resume", "auto"]
        job_words = ["-m", "tests.chaos.rank", *train]
    more = ["--restarts", f"{2 * repeats}", "--timeout", f"{WAIT_S:g}"]
    deadline = time.monotonic() + WAIT_S * (repeats + 1)
    fault = Fault(kind, TRAINING, 1, 0.0, 0.5)
    with (
        Job(folder, RANKS, job_words, more, folder) as job,
        contextlib.closing(Follower(job, deadline)) as follower,
    ):
        moment = follower.now
        anew = False
        while len(times) < repeats:
            if not follower.wait(lambda: follower.saves(moment, anew) >= 2):  # noqa: B023
                raise Failed(f"{kind}: the job is over\n{job.output[-2000:]}")
            moment, before, start = follower.now, read_ranks(out), time.perf_counter()
            strike(follower, fault)
            _wait(lambda: _has_updated(out, before), job)  # noqa: B023
            times.append(time.perf_counter() - start)
            anew = True


def _has_updated(out: Path, before: list[status_board.Address]) -> bool:
    """Return whether the server of a new start has applied a push."""
    if read_ranks(out) in ([], before):
        return False
    return any(one.role == status_board.SERVER and one.clock > 0 for one in _ranks(out))


def _ranks(out: Path) -> list[RankStatus]:
    """Return the status boards of a job's living ranks."""
    found = []
    for board in open_boards(read_ranks(out), platform.node()):
        found += board.read()
        board.close()
    return found


def _wait(ready: Callable[[], bool], job: Job | Running) -> None:
    """Wait until `ready()` returns True.

    Raises:
        Failed: If it takes too long.
    """
    deadline = time.monotonic() + WAIT_S
    while not ready():
        if time.monotonic() > deadline or job.process.poll() is not None:
            printed = job.output if isinstance(job, Job) else job.output()
            raise Failed(f"the job does not go on:\n{printed[-2000:]}")
        time.sleep(POLL_S)


def _deaths(size: int, launcher: list[str], folder: Path, found: Times) -> None:
    """Kill a worker, server 0 and another server of a job, and add the seconds of each recovery."""
    out = folder / "out"
    job_words = ["--problem", f"{__file__}:Large", "--hidden", f"{SERVERS * size // 4}", *TRAIN]
    job_words += ["--servers", f"{SERVERS}", "--checkpoint-every", "0", "--dtype", "float32"]
    train = ["-m", "mpips.train", *job_words, "--out", str(out)]
    with Running(SERVERS + WORKERS, train, folder, launcher=launcher) as job:
        _wait(lambda: _all_push(_ranks(out)), job)
        (board,) = open_boards(read_ranks(out), platform.node())
        ranks = sorted(board.read())
        servers = [one for one in ranks if one.role == status_board.SERVER]
        workers = [one for one in ranks if one.role != status_board.SERVER]
        for name, victim in zip(DEATHS, (workers.pop(), servers[0], servers[2]), strict=True):
            time.sleep(REST_S)
            living = {one.pid for one in workers}
            before = {one.pid: one.clock for one in board.read()}
            told, start = _told(out), time.perf_counter()
            os.kill(victim.pid, signal.SIGKILL)
            if size < LARGE:
                _wait(lambda: _gone_on(board, living, before), job)  # noqa: B023
            else:
                _wait(lambda: _told(out) > told, job)  # noqa: B023
            found[name].append(time.perf_counter() - start)
        board.close()


def _rounds(mode: str, launcher: list[str], folder: Path, found: Times) -> None:
    """Kill two workers of a job in rounds, and add the seconds until a later round."""
    words = ["--problem", f"{__file__}:Large", "--hidden", "1000", *TRAIN, "--mode", mode]
    words += ["--checkpoint-every", "0", "--out", str(folder / "out")]
    found[ROUNDS[mode]] += after_deaths(5, 2, words, launcher, folder)


def after_deaths(
    ranks: int, deaths: int, words: Sequence[str], launcher: Sequence[str], folder: Path
) -> list[float]:
    """Return the seconds from each death of a worker until the others have ended the next round.

    Args:
        ranks: Number of ranks of a job in rounds.
        deaths: Number of ranks to kill, one after another, from the last one on.
        words: Options of the job; its ``--out`` is ``out`` in `folder`.
        launcher: Words of a launcher whose ranks continue when others die.
        folder: Working folder of the job.
    """
    out, seconds = folder / "out", []
    train = ["-m", "mpips.train", *words, "--on-death", "shrink"]
    with Running(ranks, train, folder, launcher=launcher) as job:
        _wait(lambda: any(one.clock > OPEN for one in _ranks(out)), job)
        (board,) = open_boards(read_ranks(out), platform.node())
        pids = [one.pid for one in sorted(board.read())]
        for _ in range(deaths):
            time.sleep(REST_S)
            in_work, start = max(one.clock for one in board.read()) + 1, time.perf_counter()
            os.kill(pids.pop(), signal.SIGKILL)
            _wait(lambda: _past(board, pids, in_work), job)  # noqa: B023
            seconds.append(time.perf_counter() - start)
        board.close()
    return seconds


def _past(board: StatusBoard, living: Sequence[int], clock: int) -> bool:
    """Return whether all living ranks have made more than `clock` rounds."""
    return all(one.clock > clock for one in board.read() if one.pid in living)


def _told(out: Path) -> int:
    """Return the number of lost workers and shards that a run's metrics list."""
    return (out / METRICS).read_text().count('"kind": "lost"')


def _all_push(ranks: list[RankStatus]) -> bool:
    pushed = [one.clock > OPEN for one in ranks if one.role != status_board.SERVER]
    return len(pushed) == WORKERS and all(pushed)


def _gone_on(board: StatusBoard, living: set[int], before: dict[int, int]) -> bool:
    """Return whether a push after a death is applied to all shards.

    It is if its worker has made more pushes than may be open.
    """
    return any(one.pid in living and one.clock > before[one.pid] + OPEN for one in board.read())
