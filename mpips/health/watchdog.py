"""Watchdog: a thread of each rank that detects a hung job.

Each rank has a thread that publishes a heartbeat once a second, and never calls MPI. On each node,
the thread of the first rank with a recent heartbeat reads the status board and detects hangs
(`mpips.health.hang_report.HangDetector`). It reports a hang with the stacks of all ranks and then
ends the job; no other rank has to answer. It kills a stopped rank of its host if the job survives
that (`mpips.mpi.abort`).

Messages:
    no progress for 300 s, and ranks wait: Ranks waited for one that is stopped, sleeps or is in an
        MPI call of the program. The table and the stacks below it show which.
"""

import ast
import contextlib
import faulthandler
import linecache
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType

from mpips.errors import Exit, UserError, complain
from mpips.health import status_board
from mpips.health.hang_report import HangDetector, Stopped, alike_once, shown_stacks, table, trouble
from mpips.health.status_board import Address, RankStatus, StatusBoard
from mpips.mpi import abort, process, segments, signals
from mpips.mpi.abort import Failures
from mpips.mpi.collectives import broadcast, free, gather_all, host_subset
from mpips.mpi.evaluator_link import Link
from mpips.mpi.start import MPI_OBJECTS
from mpips.mpi.waiting import take_turns
from mpips.mpi.world import Cluster

BEAT_S = 1.0
SILENT_S = 5.0  # after so long without a heartbeat, the next rank detects hangs
DETECTORS = 2  # ranks that measure how long a job hangs; the second replaces a stopped first
SAVING_S = 10.0  # time for the servers to save
STACKS_S = 1.5
FIRST_S = 5.0  # time for the reporting rank to end the job, before the others end themselves
# Multiples of the limit: on nodes without the coordinator, since other nodes may progress; and for
# stopped ranks, so that they are killed before the job hangs.
REMOTE_FACTOR, STOPPED_FACTOR = 2, 0.5
DUMP = signal.SIGUSR2  # the same signal as under a supervisor
PACKAGE = f"{Path(__file__).resolve().parent.parent}{os.sep}"
WAITS = (Cluster.wait.__code__, take_turns.__code__)


@contextlib.contextmanager
def watched(
    cluster: Cluster,
    timeout_s: float,
    link: Link | None = None,
    ends_job: bool = True,
    saves: bool = True,
) -> Iterator[list[Address]]:
    """Publish the ranks' status within the block, and end the job if it hangs.

    Args:
        cluster: The job's ranks, or those of this side, with their roles.
        timeout_s: Longest time without progress, in seconds; 0 for no limit. It is not for
            evaluators: they have phases of their own, and the coordinator detects their hangs
            (`mpips.mpi.evaluator_link`).
        link: Link between the ranks that train and those that evaluate; None without evaluators.
        ends_job: Whether the watchdog ends a hung job; if False, a supervisor does.
        saves: Whether the servers save their state before that.

    Yields:
        Address of each rank's status board.

    Collective: yes, at the beginning of the block; with a link, over both sides.
    """
    board, index = _board(cluster)
    everyone = cluster.comm if link is None else link.everyone
    if link is not None:
        link.coordinator = broadcast(everyone, cluster.roles.coordinator)  # of those that train
    thread = None
    if board is not None:
        status_board.write_to(board.record(index), board.job)
        role = status_board.SERVER if cluster.rank in cluster.roles.servers else status_board.WORKER
        ranks = cluster.roles.servers if role == status_board.SERVER else cluster.roles.workers
        number = ranks.index(cluster.rank)
        if link is not None and link.evaluates:
            role, timeout_s = status_board.EVALUATOR, 0.0
        status_board.begin(everyone.rank, role, number, _stacks_file(), time.perf_counter())
        factor = ends_job * (1 if cluster.is_local(cluster.roles.coordinator) else REMOTE_FACTOR)
        thread = _Thread(board, cluster.failures, timeout_s, factor * timeout_s, saves)
    try:
        yield gather_all(
            everyone, (platform.node(), os.getpid(), board.file if board is not None else -1)
        )
    finally:
        if thread is not None:
            thread.end()


def _board(cluster: Cluster) -> tuple[StatusBoard | None, int]:
    """Return the status board of this host's ranks, or None, and this rank's index on it.

    Collective: yes.
    """
    host = host_subset(cluster)
    board: StatusBoard | None = None
    if host.rank == 0:
        with contextlib.suppress(OSError, AttributeError):  # a kernel without memfd_create
            board = StatusBoard.make(host.size, cluster.roles.coordinator)
    pid, file = broadcast(host, (os.getpid(), board.file if board is not None else -1))
    if host.rank and file >= 0:
        with contextlib.suppress(OSError):  # the first rank is in another container
            board = StatusBoard.open(pid, file, writes=True)
    index = host.rank
    free(host)
    return board, index


@cache
def _stacks_file() -> int:
    """Let this process write its threads' stacks at a signal; return the file descriptor, or -1."""
    if signal.getsignal(DUMP) != signal.SIG_DFL or process.is_caught(DUMP):
        return -1
    file = os.memfd_create("mpips-stacks")  # for the whole life of this process
    faulthandler.register(DUMP, file)
    return file


class _Thread:
    """Thread that publishes heartbeats, detects hangs, and ends this process with the job.

    Args:
        board: Status board of this host's ranks.
        deaths: Ranks whose death the job survives.
        timeout_s: Longest time without progress.
        limit_s: Time without progress after which this thread ends the job; 0 for never.
        saves: See `watched`.
    """

    def __init__(
        self, board: StatusBoard, deaths: Failures, timeout_s: float, limit_s: float, saves: bool
    ) -> None:
        self._board, self._deaths, self._limit_s, self._saves = board, deaths, limit_s, saves
        self._period_s = min(BEAT_S, timeout_s / 10) if timeout_s else BEAT_S
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._detector = HangDetector(limit_s, self._period_s)
        self._stopped = Stopped(timeout_s * STOPPED_FACTOR, self._period_s) if timeout_s else None
        self._at: object = None  # instruction of the main thread at the last heartbeat
        self._thread = threading.Thread(target=self.report_and_check, name="words", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread, and close the board."""
        self._ended.set()
        self._thread.join()
        status_board.write_to_own()
        self._board.close()

    def report_and_check(self) -> None:
        """Publish heartbeats and check all ranks, until `end`."""
        board = self._board
        while not self._ended.wait(self._period_s):
            now = time.perf_counter()
            frame, at = sys._current_frames().get(self._main or 0), self._at
            self._at = (frame.f_code, frame.f_lasti) if frame is not None else None
            status_board.beat(now, _call(frame), self._at == at and _is_in_mpi(frame))
            if (name := signals.again(now)) is not None:
                self._end_asked(name)
            if board.job[status_board.OVER] and not self._ended.wait(FIRST_S):
                _end_process()  # the reporting rank ends first, and the launcher ends the others
            ranks = board.read()
            detectors = [status.pid for status in ranks if now - status.beat < SILENT_S][:DETECTORS]
            stopped = self._stopped.look(ranks, now) if self._stopped else []
            if not detectors:  # this process writes to the board of another job
                continue
            if os.getpid() == detectors[0]:
                self._end_stopped(stopped)
            if self._limit_s and os.getpid() in detectors:
                quiet_s = self._detector.look(ranks, now)
                if quiet_s and os.getpid() == detectors[0] and board.is_first():
                    self._end_job(ranks, quiet_s)

    def _end_stopped(self, ranks: Sequence[RankStatus]) -> None:
        """Kill those of the stopped ranks whose death the job survives."""
        for one in ranks:
            if one.rank in self._deaths.survivable:
                where = f"process {one.pid} on {platform.node()}"
                complain(f"warning: {one.name} (rank {one.rank}, {where}) is stopped: ending it")
                process.send_signal(one.pid)

    def _end_asked(self, name: str) -> None:
        """End the job at once: a second request to end has come while the job still saves."""
        sys.stdout.flush()
        if self._board.is_first():
            after = f"second {name} after {signals.AGAIN_S:g} s or more"
            complain(f"{after}: the job ends without saving")
        time.sleep(abort.HEARD_S)
        _end_process()

    def _end_job(self, ranks: Sequence[RankStatus], quiet_s: float) -> None:
        board, coordinator = self._board, self._board.job[status_board.COORDINATOR]
        lines = table(ranks, coordinator, platform.node(), time.perf_counter(), whole=False)
        stacks = _stacks_of(ranks)
        saved = self._save(coordinator) if self._saves else ""
        if self._ended.is_set():
            return
        got = f"no progress for {quiet_s:.0f} s, and ranks wait"
        remedy = f"see where they are; --timeout is for longer steps, 0 for none\n{lines}{stacks}"
        text = UserError(got, f"some within --timeout {self._limit_s:g}", remedy + saved)
        sys.stdout.flush()
        complain(text)
        board.job[status_board.OVER] = 1
        time.sleep(abort.HEARD_S)
        if abort.ulfm_is_on():  # MPI would not end the others
            for status in ranks:
                if status.pid != os.getpid() and trouble(status):
                    process.send_signal(status.pid)
        _end_process()

    def _save(self, coordinator: int) -> str:
        """Have the servers save their state, if they can; return what is saved, as text."""
        deadline = time.monotonic() + SAVING_S
        self._board.job[status_board.ASKED] = 1
        while found := [r for r in self._board.read() if r.rank == coordinator]:
            (status,) = found
            serves = status.phase == status_board.SERVING and not trouble(status)
            if not serves or status.saved >= status.clock or time.monotonic() > deadline:
                saved = f"step {status.saved} is saved" if status.saved >= 0 else "nothing is saved"
                return f"{saved}: --resume goes on from the newest checkpoint"
            time.sleep(BEAT_S / 20)
        return "--resume goes on from the newest checkpoint"


def _end_process() -> None:
    """End this process, and with it the job, whatever its other threads do."""
    segments.remove_noted()
    with open(os.devnull, "w") as nothing:  # faulthandler ends the process if MPI does not
        faulthandler.dump_traceback_later(FIRST_S, exit=True, file=nothing)
        if abort.ulfm_is_on():
            os.kill(os.getpid(), signal.SIGKILL)
        abort.end_all(Exit.FAILED)


def _stacks_of(ranks: Sequence[RankStatus]) -> str:
    """Return the stacks of the ranks' threads; equal stacks only once."""
    asked = [r for r in ranks if r.stacks >= 0 and not trouble(r)]
    for status in asked:
        process.send_signal(status.pid, DUMP)
    time.sleep(STACKS_S)
    return alike_once((f"rank {status.rank}", _written(status)) for status in asked)


def _written(status: RankStatus) -> str:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{status.pid}/fd/{status.stacks}").read_text(errors="replace")
        return shown_stacks(text)
    return "  does not answer\n"


def _is_in_mpi(frame: FrameType | None) -> bool:
    """Return whether a program's frame is in a method call of an MPI object, by its source."""
    if frame is None or frame.f_code.co_filename.startswith(PACKAGE):
        return False
    places = list(frame.f_code.co_positions())
    first, last, begin, end = places[frame.f_lasti // 2]
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    if first is None or first != last or first > len(lines):
        return False
    try:
        call = ast.parse(lines[first - 1].encode()[begin:end].decode(), mode="eval").body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    return isinstance(_value(call.func.value, frame), MPI_OBJECTS)


def _value(node: ast.expr, frame: FrameType) -> object:
    """Return the value of a name or an attribute, without running code of the program."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if not isinstance(node, ast.Attribute):
        return None
    return getattr(_value(node.value, frame), "__dict__", {}).get(node.attr)


def _call(frame: FrameType | None) -> str:
    """Return the function of a frame; if the rank waits in mpips, the caller of the wait."""
    found = frame
    while frame is not None:
        if frame.f_code in WAITS:
            found = frame.f_back
        frame = frame.f_back
    return "" if found is None else found.f_code.co_qualname.partition(".<locals>")[0]
