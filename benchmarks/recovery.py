"""From the death of a rank to the first update after it, and the worst of all repeats.

Jobs whose gradients take a hundredth of a second asleep. What ends a job is done to one under
`mpips.launch`, again and again: the time holds the pause of a second, the start of Python and of
the ranks, and the first step. Where MPI lets the others go on, of 3 servers and 3 workers a worker
is killed, then server 0, then another server: one shard is taken over each time. The first update
is one that some worker has pushed after the death to all shards, seen in the words of the ranks: of
each worker two more pushes may be open. Of 5 workers in rounds one is killed, and another; the time
is that until the others have made the round in work and the next one.

With shards of 100 MB gradients take seconds, so that servers keep up. There the time is that from
the death to the line of `metrics.jsonl` that says that a shard is served again: within a second.

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
from mpips.checkpoint.run_folder import METRICS, noted_ranks
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
ENDING = {  # what is done to a job with one server, and what it is called
    "kill:worker": "a worker is killed", "kill:server": "the only server is killed",
    "kill:job": "mpirun is killed", "exception:worker": "a worker raises",
}  # fmt: skip
DEATHS = (  # of a job that goes on
    "a worker is killed: the others go on",
    "server 0 is killed: the next one takes its shard and duties over",
    "another server is killed: that one takes its shard over",
)
SERVERS, WORKERS = 3, 3
OPEN = 2  # pushes of a worker that may not be applied yet
ROUNDS = {  # of a job that goes on without a worker: its mode
    "sync": "a worker is killed in rounds of sync: the others go on",
    "local_sgd": "a worker is killed in local_sgd: the others go on",
}
SIZES, QUICK = (64 << 10, 100_000_000), (64 << 10,)  # bytes of a shard
AIM_S, LARGE = 1.0, 10_000_000
SLEEP_S = 3.0  # that a large gradient takes
WAIT_S, POLL_S, REST_S = 120.0, 0.001, 1.0
FAILURES = 3  # jobs that may fail for one kind of job
Times: TypeAlias = dict[str, list[float]]
TRAIN = (
    "--mode", "async", "--optimizer", "sgd", "--batch-size", "8", "--epochs", "1000000",
    "--eval-every", "0", "--log-every", "0.1",
)  # fmt: skip


class Large(SleepingModel):
    """As many parameters as ``--hidden`` says."""

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"w": (config.hidden[0],)})

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return 1, after a while."""
        if out["w"].size >= LARGE:
            time.sleep(SLEEP_S)
        return super().loss_and_grad(params, batch, out)


def run(options: Options) -> list[Row]:
    """Measure what ends a job, and where MPI lets jobs go on, what they go on without.

    Raises:
        Failed: If a job does not go on.
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
    """Measure by one job after the other until there are so many times under each name.

    A job that does not go on is told of, and another one begins in its place: what was measured
    stays.

    Returns:
        The times, and how many jobs have not.

    Raises:
        Failed: If more than `FAILURES` have not.
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
    """Do a thing again and again to a job that starts again; adds the seconds of each time."""
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
            moment, before, start = follower.now, noted_ranks(out), time.perf_counter()
            strike(follower, fault)
            _wait(lambda: _has_updated(out, before), job)  # noqa: B023
            times.append(time.perf_counter() - start)
            anew = True


def _has_updated(out: Path, before: list[status_board.Address]) -> bool:
    """Whether the server of another start than before has applied a push."""
    if noted_ranks(out) in ([], before):
        return False
    return any(one.role == status_board.SERVER and one.clock > 0 for one in _ranks(out))


def _ranks(out: Path) -> list[RankStatus]:
    """Return the words of a job's ranks, of those that live."""
    found = []
    for board in open_boards(noted_ranks(out), platform.node()):
        found += board.read()
        board.close()
    return found


def _wait(ready: Callable[[], bool], job: Job | Running) -> None:
    """Wait until something holds.

    Raises:
        Failed: If it does not in time.
    """
    deadline = time.monotonic() + WAIT_S
    while not ready():
        if time.monotonic() > deadline or job.process.poll() is not None:
            printed = job.output if isinstance(job, Job) else job.output()
            raise Failed(f"the job does not go on:\n{printed[-2000:]}")
        time.sleep(POLL_S)


def _deaths(size: int, launcher: list[str], folder: Path, found: Times) -> None:
    """Kill a worker, server 0 and another of a job that goes on; adds the seconds of each."""
    out = folder / "out"
    job_words = ["--problem", f"{__file__}:Large", "--hidden", f"{SERVERS * size // 4}", *TRAIN]
    job_words += ["--servers", f"{SERVERS}", "--checkpoint-every", "0", "--dtype", "float32"]
    train = ["-m", "mpips.train", *job_words, "--out", str(out)]
    with Running(SERVERS + WORKERS, train, folder, launcher=launcher) as job:
        _wait(lambda: _all_push(_ranks(out)), job)
        (board,) = open_boards(noted_ranks(out), platform.node())
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
    """Kill a worker of a job in rounds, and another; adds the seconds until a later round."""
    words = ["--problem", f"{__file__}:Large", "--hidden", "1000", *TRAIN, "--mode", mode]
    words += ["--checkpoint-every", "0", "--out", str(folder / "out")]
    found[ROUNDS[mode]] += after_deaths(5, 2, words, launcher, folder)


def after_deaths(
    ranks: int, deaths: int, words: Sequence[str], launcher: Sequence[str], folder: Path
) -> list[float]:
    """Return the seconds from each death of a worker until a round that the others have begun then.

    Args:
        ranks: Of a job in rounds.
        deaths: How many of the last ranks are killed, one after the other.
        words: Its options, of which ``--out`` is ``out`` in `folder`.
        launcher: Of ranks that go on when others die.
        folder: Where it runs.
    """
    out, seconds = folder / "out", []
    train = ["-m", "mpips.train", *words, "--on-death", "shrink"]
    with Running(ranks, train, folder, launcher=launcher) as job:
        _wait(lambda: any(one.clock > OPEN for one in _ranks(out)), job)
        (board,) = open_boards(noted_ranks(out), platform.node())
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
    """Whether all that live have made more rounds than so many."""
    return all(one.clock > clock for one in board.read() if one.pid in living)


def _told(out: Path) -> int:
    """Return how many shards and workers a run has told of that it goes on for, or without."""
    return (out / METRICS).read_text().count('"kind": "lost"')


def _all_push(ranks: list[RankStatus]) -> bool:
    pushed = [one.clock > OPEN for one in ranks if one.role != status_board.SERVER]
    return len(pushed) == WORKERS and all(pushed)


def _gone_on(board: StatusBoard, living: set[int], before: dict[int, int]) -> bool:
    """Whether a push after a death is applied to all shards: its worker has more than may wait."""
    return any(one.pid in living and one.clock > before[one.pid] + OPEN for one in board.read())
