"""Words that ranks write in memory of their node, and what is made of them."""

import contextlib
import ctypes
import itertools
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mpips.checkpoint.run_folder import write_ranks
from mpips.health import status_board as sb
from mpips.health.hang_report import Deadline, HangDetector, Stopped, awaited, table, trouble
from mpips.health.status_board import RankStatus, StatusBoard
from mpips.launch import ranks as command
from mpips.mpi import process
from mpips.mpi.process import GONE, STOPPED, TRACED

LIMIT_S = 10.0


@pytest.fixture
def board() -> Iterator[StatusBoard]:
    """Of two ranks, of which this process is the second."""
    board = StatusBoard.make(2, coordinator=0)
    sb.write_to(board.record(1), board.job)
    yield board
    sb.write_to_own()
    board.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def stop(one: RankStatus) -> None:
    """Stop a process; returns when it is."""
    os.kill(one.pid, signal.SIGSTOP)
    while trouble(one) != STOPPED:
        time.sleep(0.01)


def record(pid: int, rank: int = 0, phase: int = sb.COMPUTING, since: float = 0.0) -> RankStatus:
    started = int(process.stat_of(pid)[process.STARTED])
    role = sb.SERVER if rank == 0 else sb.WORKER
    who = rank, pid, started, role, max(0, rank - 1), -1
    return RankStatus(*who, phase, since, 0, 0, -1, False, since, 0.0, "call")


def found(
    detector: HangDetector | Stopped, ranks: Sequence[RankStatus], begin: int, end: int
) -> list[int]:
    """Return the seconds at which a detector that looks in each finds something."""
    return [now for now in range(begin, end) if detector.look(ranks, float(now))]


def test_what_others_read(board: StatusBoard) -> None:
    now = time.perf_counter()
    sb.begin(1, sb.WORKER, 0, -1, now)
    sb.set_phase(sb.COMPUTING, now)
    sb.report(sb.CLOCK, 17)
    sb.beat(now, "x" * 300)
    sb.beat(now, "Model.gradient")
    with contextlib.closing(StatusBoard.open(os.getpid(), board.file)) as other:
        (one,) = other.read()
    found = one.name, one.pid, one.phase, one.clock, one.call
    assert found == ("worker 0", os.getpid(), sb.COMPUTING, 17, "Model.gradient")


def test_an_inner_wait_is_not_told_of(board: StatusBoard) -> None:
    sb.begin(1, sb.WORKER, 0, -1, 1.0)
    sb.set_phase(sb.PULLING, 2.0)
    outer = sb.begin_wait(sb.BATCH, 3.0)
    inner = sb.begin_wait(sb.SHARD, 4.0)
    (told,) = board.read()
    assert (told.phase, told.since, told.waits) == (sb.BATCH, 3.0, True)
    sb.end_wait(inner, 0.0)
    sb.waits_for(sb.CLOCKS)
    assert board.read()[0].phase == sb.CLOCKS
    sb.end_wait(outer, 0.0)
    sb.waits_for(sb.CLOCKS)
    assert (board.read()[0].phase, board.read()[0].since) == (sb.PULLING, 2.0)


def test_no_other_file_is_taken_for_words(tmp_path: Path) -> None:
    other = os.memfd_create(sb.NAME)
    os.ftruncate(other, 4096)
    with (tmp_path / "x").open("wb+") as file:
        for number in (file.fileno(), other):
            with pytest.raises(OSError, match="no words"):
                StatusBoard.open(os.getpid(), number)
    os.close(other)


def test_who_is_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    server = record(os.getpid(), 0, sb.SERVING)
    slow, waiting = record(sleeper.pid, 1), record(os.getpid(), 2, sb.ROUND)
    ranks = [server, slow, waiting]
    assert awaited(slow, ranks, 0) == []
    for phase, one in {sb.BATCH: server, sb.BUFFER: server, sb.CLOCKS: slow}.items():
        assert awaited(waiting._replace(phase=phase), ranks, 0) == [one]
    assert "waits for the round (ranks 0, 1)" in table(ranks, 0, "here", 3.0, whole=True)
    stop(slow)
    assert "computing and is stopped" in table(ranks, 0, "here", 3.0, whole=True)


def test_pushes_wait_for_a_server_that_lives(sleeper: subprocess.Popen[bytes]) -> None:
    def queue() -> str:
        return table(ranks, 0, "here", 3.0, whole=True).splitlines()[1].split()[-3]

    worker = record(os.getpid(), 1)._replace(clock=7)
    ranks = [record(sleeper.pid, 0, sb.SERVING)._replace(handled=4), worker]
    assert queue() == "3"
    sleeper.kill()
    sleeper.wait()
    assert trouble(ranks[0]) == GONE
    assert queue() == "-", "another one has its shard"


def test_who_stands_still(sleeper: subprocess.Popen[bytes]) -> None:
    asleep = record(sleeper.pid, 1)
    waits, computes = record(os.getpid(), 2, sb.ROUND), record(os.getpid(), 2)

    def hangs(*ranks: RankStatus) -> int:
        return found(HangDetector(LIMIT_S, 1.0), ranks, 1, 200)[0]

    assert hangs(asleep, waits) == LIMIT_S + 1
    judge = HangDetector(LIMIT_S, 1.0)
    assert found(judge, [asleep, waits], 1, 9) == []
    gets_on = asleep._replace(clock=1)
    assert found(judge, [gets_on, waits], 9, 100)[0] == 9 + LIMIT_S
    assert found(judge, [gets_on, computes], 100, 200) == [], "nobody waits"
    for since in (1.0, 50.0):  # however long it was in its phase before
        in_mpi = record(os.getpid(), 2)._replace(in_mpi=since)
        assert hangs(asleep, in_mpi) == since + LIMIT_S, "it waits, and is not at work"
    starts = asleep._replace(phase=sb.STARTING)
    assert hangs(starts, waits) == 12 * LIMIT_S + 1, "for ever is too long"
    stop(asleep)
    assert hangs(asleep, record(os.getpid(), 0, sb.SERVING)) == LIMIT_S + 1


PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17  # ptrace(2)


def test_a_debugger_may_take_its_time(sleeper: subprocess.Popen[bytes]) -> None:
    def ptrace(request: int) -> None:
        assert ctypes.CDLL(None, use_errno=True).ptrace(request, sleeper.pid, None, None) == 0

    held, judge = record(sleeper.pid, 1), HangDetector(LIMIT_S, 1.0)
    ranks = [held, record(os.getpid(), 2, sb.ROUND)]
    ptrace(PTRACE_SEIZE)
    ptrace(PTRACE_INTERRUPT)
    os.waitpid(sleeper.pid, 0)
    assert trouble(held) == TRACED
    assert found(judge, ranks, 1, 100) == []
    ptrace(PTRACE_DETACH)
    while trouble(held):
        time.sleep(0.01)
    assert found(judge, ranks, 100, 112)[0] == 100 + LIMIT_S, "from then on"


def test_a_pause_does_not_count(sleeper: subprocess.Popen[bytes]) -> None:
    ranks = [record(sleeper.pid, 1), record(os.getpid(), 2, sb.ROUND)]
    judge = HangDetector(LIMIT_S, 1.0)
    assert found(judge, ranks, 1, 2) == []
    assert found(judge, ranks, 1000, 1011) == [1000 + LIMIT_S]


def test_who_is_stopped_for_long(sleeper: subprocess.Popen[bytes]) -> None:
    """Not who only does not beat, nor who was seen to be stopped before this process itself was."""
    one = record(sleeper.pid, 1)._replace(beat=1.0)
    stopped = Stopped(LIMIT_S, 1.0)
    assert found(stopped, [one], 1, 100) == []
    stop(one)
    assert found(stopped, [one], 100, 110) == []
    assert found(stopped, [one._replace(beat=110.0)], 110, 111) == [], "it beats"
    assert found(stopped, [one], 111, 120) == []
    assert found(stopped, [one], 220, 231) == [220 + LIMIT_S]
    assert stopped.look([one], 231.0) == [one]


def test_what_is_no_running_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(code: int) -> str:
        assert command.main([str(tmp_path)]) == code
        return capsys.readouterr().err

    assert "expected the folder of a run" in told(2)
    (tmp_path / "config.toml").touch()
    assert "no job has begun" in told(1)
    write_ranks(tmp_path, [(platform.node(), os.getpid(), 0)])
    assert "has ended, expected one that runs; --resume goes on" in told(1)
    write_ranks(tmp_path, [("elsewhere", 1, 1)])
    assert "it has ended, or runs on elsewhere" in told(1)
    (tmp_path / "DONE").touch()
    assert "has ended, and is complete" in told(1)
    assert command.main([]) == 2


def test_who_is_given_up(board: StatusBoard) -> None:
    """Who is stopped or does nothing for so long; not who gets on, or is at work for longer."""
    sleeper = subprocess.Popen(["sleep", "600"], pass_fds=[board.file])
    ints, clock = board.record(0).cast("q"), itertools.count(1000)
    ints[sb.STARTED] = int(process.stat_of(sleeper.pid)[process.STARTED])
    ints[sb.PID], ints[sb.PHASE] = sleeper.pid, sb.EVALUATING
    sb.begin(1, sb.EVALUATOR, 1, -1, 0.0)

    def given_up(by: Deadline, works: Callable[[], object], seconds: int) -> dict[int, str]:
        by.expect()
        reasons = dict[int, str]()
        for now in itertools.islice(clock, seconds):
            works()
            reasons |= by.look([0, 1], float(now))
        return {rank: why.partition(" for ")[0] for rank, why in reasons.items()}

    def gets_on() -> None:
        ints[sb.CLOCK] += 1

    def works() -> None:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass

    where = [(platform.node(), sleeper.pid, board.file), ("elsewhere", 1, 1)]
    own = (platform.node(), os.getpid(), board.file)
    by, by_others = Deadline(where, LIMIT_S), Deadline(where, LIMIT_S, stopped=False)
    by_worker = Deadline([own, where[1]], 1.0)
    with contextlib.closing(by), contextlib.closing(by_others), contextlib.closing(by_worker):
        assert given_up(by, gets_on, 100) == {}, "of the second nothing is seen: 12 times as long"
        assert given_up(by, int, 100) == {0: "has done nothing"}
        assert given_up(by, gets_on, 130) == {1: "has not answered"}
        stop(board.read()[0])
        assert given_up(by, int, 100) == {0: "is stopped"}
        assert given_up(by_others, int, 100) == {}
        assert given_up(Deadline(where, 0.0), int, 200) == {}
        assert given_up(by_worker, works, 4) == {}, "it is at work"
    sleeper.kill()
    sleeper.wait()
