"""From the death of a rank to the first update after it, and the worst of all repeats.

Jobs whose gradients take a hundredth of a second asleep. What ends a job is done to one under
`mpips.launch`, again and again: the time holds the pause of a second, the start of Python and of
the ranks, and the first step. Where MPI lets the others go on, of 3 servers and 3 workers a worker
is killed, then a server whose shard server 0 takes over, then server 0. The first update is one
that some worker has pushed after the death to all shards, seen in the words of the ranks: of each
worker two more pushes may be open.

With shards of 100 MB gradients take seconds, so that servers keep up. There the time is that from
the death to the line of `metrics.jsonl` that says that a shard is served again: within a second.

``--repeats 20`` gives the figures of the guide.
"""

import contextlib
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from mpips.bench.jobs import Failed, temporary_folder
from mpips.bench.measure import Options, Row, bytes_text
from mpips.bench.sleeping_model import SleepingModel
from mpips.chaos.follow import Follower
from mpips.chaos.inject import strike
from mpips.chaos.job import Job
from mpips.chaos.plan import TRAINING, Fault
from mpips.checkpoint.place import METRICS, noted_ranks
from mpips.cluster import words
from mpips.cluster.words import Board, Record
from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.launch.mpirun import Running, survivors_launcher
from mpips.launch.ranks import open_boards
from mpips.layout import Layout
from mpips.problems.base import Arrays

RANKS = 4
ENDING = {  # what is done to a job with one server, and what it is called
    "kill:worker": "a worker is killed", "kill:server": "the only server is killed",
    "kill:job": "mpirun is killed", "exception:worker": "a worker raises",
}  # fmt: skip
SERVERS, WORKERS = 3, 3
OPEN = 2  # pushes of a worker that may not be applied yet
SIZES, QUICK = (64 << 10, 100_000_000), (64 << 10,)  # bytes of a shard
AIM_S, LARGE = 1.0, 10_000_000
SLEEP_S = 3.0  # that a large gradient takes
WAIT_S, POLL_S, REST_S = 120.0, 0.001, 1.0
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
        with temporary_folder() as folder:
            seconds = _restarts(kind, folder, repeats)
        rows.append(_row(f"{name}: the job starts again", seconds))
    for size in options.pick(SIZES, QUICK) if survivors else ():
        found: dict[str, list[float]] = {}
        for _ in range(repeats):
            with temporary_folder() as folder:
                for name, taken in _deaths(size, folder, survivors).items():
                    found.setdefault(name, []).append(taken)
        aim = AIM_S if size >= LARGE and not options.quick else None
        rows += [_row(f"{name}, shards of {bytes_text(size)}", found[name], aim) for name in found]
    return rows


def _row(case: str, seconds: list[float], aim_s: float | None = None) -> Row:
    middle, worst = statistics.median(seconds), max(seconds)
    if aim_s is not None:
        return Row("recovery", case, worst, "s", "worst; aim", aim_s, aim_s / worst, 1.0)
    return Row("recovery", case, middle, "s", f"worst of {len(seconds)}", worst, worst / middle)


def _restarts(kind: str, folder: Path, repeats: int) -> list[float]:
    """Do a thing again and again to a job that starts again; returns the seconds of each time."""
    out = folder / "out"
    job_words = ["--problem", f"{__file__}:Large", "--hidden", "1000", *TRAIN, "--servers", "1"]
    job_words += ["--checkpoint-every", "0.3", "--out", str(out)]
    if kind.startswith("exception"):
        train = ["-m", "mpips.train", *job_words, "--resume", "auto"]
        job_words = ["-m", "mpips.chaos.rank", *train]
    more, found = ["--restarts", f"{2 * repeats}", "--timeout", f"{WAIT_S:g}"], []
    deadline = time.monotonic() + WAIT_S * (repeats + 1)
    fault = Fault(kind, TRAINING, 1, 0.0, 0.5)
    with (
        Job(folder, RANKS, job_words, more, folder) as job,
        contextlib.closing(Follower(job, deadline)) as follower,
    ):
        moment = follower.now
        for repeat in range(repeats):
            if not follower.wait(lambda: follower.saves(moment, repeat > 0) >= 2):  # noqa: B023
                raise Failed(f"{kind}: the job is over\n{job.output[-2000:]}")
            moment, before, start = follower.now, noted_ranks(out), time.perf_counter()
            strike(follower, fault)
            _wait(lambda: _has_updated(out, before), job)  # noqa: B023
            found.append(time.perf_counter() - start)
    return found


def _has_updated(out: Path, before: list[words.Address]) -> bool:
    """Whether the server of another start than before has applied a push."""
    if noted_ranks(out) in ([], before):
        return False
    return any(one.is_server and one.clock > 0 for one in _ranks(out))


def _ranks(out: Path) -> list[Record]:
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


def _deaths(size: int, folder: Path, launcher: list[str]) -> dict[str, float]:
    """Kill a worker, a server and server 0 of a job that goes on; returns the seconds of each."""
    out, found = folder / "out", {}
    job_words = ["--problem", f"{__file__}:Large", "--hidden", f"{SERVERS * size // 4}", *TRAIN]
    job_words += ["--servers", f"{SERVERS}", "--checkpoint-every", "0", "--dtype", "float32"]
    train = ["-m", "mpips.train", *job_words, "--out", str(out)]
    with Running(SERVERS + WORKERS, train, folder, launcher=launcher) as job:
        _wait(lambda: _all_push(_ranks(out)), job)
        (board,) = open_boards(noted_ranks(out), platform.node())
        ranks = sorted(board.read())
        servers = [one for one in ranks if one.is_server]
        workers = [one for one in ranks if not one.is_server]
        for name, victim in (
            ("a worker is killed: the others go on", workers.pop()),
            ("a server is killed: server 0 takes its shard over", servers[1]),
            ("server 0 is killed: the last server goes on", servers[0]),
        ):
            time.sleep(REST_S)
            living = {one.pid for one in workers}
            before = {one.pid: one.clock for one in board.read()}
            told, start = _told(out), time.perf_counter()
            os.kill(victim.pid, signal.SIGKILL)
            if size < LARGE:
                _wait(lambda: _gone_on(board, living, before), job)  # noqa: B023
            else:
                _wait(lambda: _told(out) > told, job)  # noqa: B023
            found[name] = time.perf_counter() - start
        board.close()
    return found


def _told(out: Path) -> int:
    """Return how many shards and workers a run has told of that it goes on for, or without."""
    return (out / METRICS).read_text().count('"kind": "lost"')


def _all_push(ranks: list[Record]) -> bool:
    pushed = [one.clock > OPEN for one in ranks if not one.is_server]
    return len(pushed) == WORKERS and all(pushed)


def _gone_on(board: Board, living: set[int], before: dict[int, int]) -> bool:
    """Whether a push after a death is applied to all shards: its worker has more than may wait."""
    return any(one.pid in living and one.clock > before[one.pid] + OPEN for one in board.read())
