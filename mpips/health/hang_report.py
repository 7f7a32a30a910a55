"""Hang detection and hang report, from the status board of a node.

Loads no MPI.
"""

import contextlib
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpips.health import status_board
from mpips.health.status_board import Address, RankStatus, StatusBoard
from mpips.mpi import process
from mpips.mpi.process import STOPPED, TRACED, ticks_used, waits_for_files

NAMED = 4  # most ranks that the report names as awaited by one rank
HEADER = ("rank", "role", "host", "pid", "phase", "in", "since", "clock", "queue", "beat")
AT_WORK = 0.1  # a rank is at work if it does not wait, and uses at least this part of a core
PATIENCE = 12  # multiple of the limit for ranks at work
# Parts of a stack to leave out: addresses, and the frames below the program.
LEFT_OUT = re.compile(r' ?0x[0-9a-f]+|^  File "(<frozen runpy>|.*/mpips/launch/rank.py)".*\n', re.M)
LOOK_ON = re.compile(r" in (watch_over|report_and_check)\n")  # frames of mpips's own threads
TICKS_S = os.sysconf("SC_CLK_TCK")


def shown_stacks(text: str) -> str:
    """Return the stacks that faulthandler has written, without mpips's own threads."""
    threads = [thread for thread in text.split("\n\n") if not LOOK_ON.search(thread)]
    return LEFT_OUT.sub("", "\n\n".join(threads))


def alike_once(texts: Iterable[tuple[str, str]]) -> str:
    """Return texts with the names that they belong to; equal texts only once."""
    found: dict[str, list[str]] = {}
    for name, text in texts:
        found.setdefault(text, []).append(name)
    return "".join(f"{', '.join(names)}:\n{text}" for text, names in found.items())


def trouble(record: RankStatus) -> str:
    """Return why a rank's process makes no progress now; else empty."""
    return process.trouble(record.pid, record.started)


def awaited(status: RankStatus, ranks: Sequence[RankStatus], coordinator: int) -> list[RankStatus]:
    """Return the ranks of a node that one of them probably waits for, by the status board."""
    if not status.waits or status.role == status_board.EVALUATOR:
        return []
    others = [r for r in ranks if r.rank != status.rank and r.role != status_board.EVALUATOR]
    if status.phase == status_board.BATCH:
        return [r for r in others if r.rank == coordinator]
    if status.phase == status_board.SAVE and any(r.writing for r in others):
        return [r for r in others if r.writing]
    if status.phase in (status_board.BUFFER, status_board.SHARD):
        others = [r for r in others if r.role == status_board.SERVER]
    elif status.phase in (status_board.CLOCKS, status_board.END):
        others = [r for r in others if r.role != status_board.SERVER]
    behind = [r for r in others if not r.waits or trouble(r)]
    return behind or [r for r in others if r.phase != status.phase]


def table(ranks: Sequence[RankStatus], coordinator: int, host: str, now: float, whole: bool) -> str:
    """Return the table of a hang report, with a line for each rank of a node.

    Args:
        ranks: Status of the ranks.
        coordinator: Rank of the coordinator.
        host: Name of the node.
        now: Time of `time.perf_counter`.
        whole: Whether these are all ranks of the job, so that the number of waiting pushes is
            known.
    """
    pushed = sum(r.clock for r in ranks if r.role == status_board.WORKER)
    rows: list[tuple[str, ...]] = [HEADER]
    for one in ranks:
        serves = one.role == status_board.SERVER and trouble(one) != process.GONE
        queue = f"{max(0, pushed - one.handled)}" if serves and whole else "-"
        since, beat = (f"{max(0.0, now - at):.1f} s" for at in (one.since, one.beat))
        phase = " ".join(
            [status_board.PHASES.get(one.phase, "?"), *_remark(one, ranks, coordinator)]
        )
        row = (one.name, host, one.pid, phase, one.call or "-", since, one.clock, queue, beat)
        rows.append((f"{one.rank}", *map(str, row)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _remark(status: RankStatus, ranks: Sequence[RankStatus], coordinator: int) -> list[str]:
    """Return the words after a phase in the table."""
    if why := trouble(status):
        return [f"and {why}"]
    names = [f"{r.rank}" for r in awaited(status, ranks, coordinator)]
    more = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
    how = ["in a call of MPI by the program"] if status.in_mpi else []
    who = [f"(rank{'s' if len(names) > 1 else ''} {', '.join(names[:NAMED])})"] if names else []
    return [*how, *who, *more, *(["and writes"] if status.writing else [])]


class Quiet:
    """Time since the last change of several states, which an observer looks at repeatedly.

    If the observer has not looked for a while, the time starts anew: it may have been stopped
    together with the others.

    Args:
        pause_s: Longest time between two looks, in seconds.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s, self._looked = pause_s, 0.0
        self._known: dict[Any, tuple[object, float]] = {}

    def look(self, states: Mapping[Any, object], now: float) -> dict[Any, float]:
        """Return the seconds since the last change of each state; forget states not given.

        Args:
            states: Present states, by key.
            now: The present time, in seconds.
        """
        before = self._known if now - self._looked <= self._pause_s else {}
        self._looked = now
        self._known = {}
        for key, state in states.items():
            old, since = before.get(key, (state, now))
            self._known[key] = state, since if old == state else now
        return {key: now - since for key, (_, since) in self._known.items()}

    def forget(self) -> None:
        """Start all times anew."""
        self._known = {}


def _pause_s(look_s: float) -> float:
    """Return the longest time between two looks that are due every `look_s` seconds."""
    return 10 * look_s + 5


class HangDetector:
    """Detects that a job hangs, from the status of a node's ranks.

    A job hangs if no rank's words have changed for `limit_s`, and one of the ranks has waited or
    been stopped for that time. If another rank is at work, the limit is `PATIENCE` times as long. A
    rank is at work if it does not wait, and has used a tenth of a core or waits for files. A job
    whose ranks compute while no rank waits does not hang. Neither does one with a rank held by a
    debugger.

    Args:
        limit_s: Longest time without a change, in seconds.
        look_s: Time between two looks, in seconds.
    """

    def __init__(self, limit_s: float, look_s: float) -> None:
        self._limit_s, self._quiet = limit_s, Quiet(_pause_s(look_s))
        self._used: tuple[float, dict[int, int]] | None = None

    def look(self, ranks: Sequence[RankStatus], now: float) -> float:
        """Check the ranks; return for how many seconds the job has hung, 0 if it does not hang.

        Args:
            ranks: Status of the node's ranks.
            now: Time of `time.perf_counter`.
        """
        state = [(r.phase, r.since, r.clock, r.handled, r.saved, r.writing) for r in ranks]
        quiet_s = self._quiet.look({"job": state}, now)["job"]
        if not quiet_s:
            self._used = None
        if self._used is None and quiet_s >= self._limit_s / 2:
            self._used = now, {r.pid: ticks_used(r.pid) for r in ranks}
        if quiet_s < self._limit_s:
            return 0.0
        states = {r.rank: trouble(r) for r in ranks}
        if TRACED in states.values():
            self._quiet.forget()
            return 0.0
        if STOPPED not in states.values():
            waited_s = [now - max(r.since, r.in_mpi) for r in ranks if r.waits]
            quiet_s = min(quiet_s, max(waited_s, default=0.0))
        if quiet_s < self._limit_s:
            return 0.0
        free = [r for r in ranks if not states[r.rank]]
        patient = quiet_s < PATIENCE * self._limit_s
        return 0.0 if patient and self._at_work(free, now) else quiet_s

    def _at_work(self, ranks: Iterable[RankStatus], now: float) -> bool:
        """Return whether a rank makes progress that its words do not show."""
        assert self._used is not None, "noted when half the time was over"
        begun, before = self._used
        after = {r.pid: ticks_used(r.pid) for r in ranks}
        enough = AT_WORK * (now - begun) * TICKS_S
        if now - begun > self._limit_s:
            self._used = None
        return any(
            r.phase == status_board.STARTING
            or ((not r.waits or r.writing) and waits_for_files(r.pid))
            or (not r.waits and r.phase != status_board.SERVING
                and after[r.pid] - before.get(r.pid, 0) >= enough)
            for r in ranks
        )  # fmt: skip


class Stopped:
    """Detects ranks of a host that have been stopped for `limit_s`.

    Args:
        limit_s: Time in seconds.
        look_s: Time between two looks, in seconds; running ranks publish a heartbeat in each.
    """

    def __init__(self, limit_s: float, look_s: float) -> None:
        self._limit_s, self._look_s, self._quiet = limit_s, look_s, Quiet(_pause_s(look_s))

    def look(self, ranks: Sequence[RankStatus], now: float) -> list[RankStatus]:
        """Check the ranks at a time of `time.perf_counter`; return the stopped ones."""
        silent = [r for r in ranks if now - r.beat > 2 * self._look_s]
        by_pid = {r.pid: r for r in silent if trouble(r) == STOPPED}
        since = self._quiet.look(dict.fromkeys(by_pid, STOPPED), now)
        return [status for pid, status in by_pid.items() if since[pid] >= self._limit_s]


class Deadline:
    """Detects that ranks make no progress while another rank waits for them.

    A rank makes no progress if its words have not changed for `limit_s`, and it is stopped or not
    at work (see `HangDetector`). The limit is `PATIENCE` times as long for a rank at work, and for
    a rank of another host, whose words cannot be read.

    Args:
        where: Address of each rank's status board.
        limit_s: Longest time without a change, in seconds; 0 for no limit.
        stopped: Whether to check stopped ranks here; if False, another detector does.
    """

    def __init__(self, where: Sequence[Address], limit_s: float, stopped: bool = True) -> None:
        self._limit_s, self._stopped = limit_s, stopped
        self._boards: dict[int, tuple[StatusBoard, int]] = {}
        for rank, (host, pid, file) in enumerate(where if limit_s else ()):
            if host == platform.node() and file >= 0:
                with contextlib.suppress(OSError):
                    self._boards[rank] = StatusBoard.open(pid, file), pid
        self._every_s, self._looked = min(1.0, limit_s / 10), 0.0
        self._quiet, self._used = Quiet(_pause_s(self._every_s)), dict[int, int]()

    def expect(self) -> None:
        """Begin a new wait: the times start anew."""
        self._quiet.forget()

    def look(self, ranks: Iterable[int], now: float) -> dict[int, str]:
        """Check the ranks that this one waits for, at most once per interval.

        Args:
            ranks: Numbers of the ranks.
            now: Time of `time.perf_counter`.

        Returns:
            Reason for each rank that makes no progress, by rank.
        """
        if not self._limit_s or now - self._looked < self._every_s:
            return {}
        self._looked = now
        known = {rank: self.record(rank) for rank in ranks}
        states = {rank: status and self._state(status, now) for rank, status in known.items()}
        quiet = self._quiet.look(states, now)
        reasons = {rank: self._why(rank, status, quiet[rank]) for rank, status in known.items()}
        return {rank: why for rank, why in reasons.items() if why}

    def _state(self, status: RankStatus, now: float) -> tuple[object, ...]:
        """Return words that change while a rank progresses, or while a debugger holds it."""
        what = trouble(status)
        return what, status.phase, status.since, status.clock, what == TRACED and now

    def _why(self, rank: int, status: RankStatus | None, quiet_s: float) -> str:
        """Return the reason if a rank makes no progress; else empty.

        Args:
            rank: Number of the rank.
            status: Its status; None if it is on another host.
            quiet_s: Seconds since its last change.
        """
        if not quiet_s:
            self._used[rank] = ticks_used(status.pid) if status else 0
        what = trouble(status) if status else ""
        if quiet_s < self._limit_s or (what and not self._stopped):
            return ""
        works = status is None or (
            ticks_used(status.pid) - self._used[rank] >= AT_WORK * quiet_s * TICKS_S
            or waits_for_files(status.pid)
        )
        if not what and works and quiet_s < PATIENCE * self._limit_s:
            return ""
        silent = "has not answered" if status is None else "has done nothing"
        return f"{what or silent} for {quiet_s:.0f} s"

    def record(self, rank: int) -> RankStatus | None:
        """Return the status of a rank of this host; None for others."""
        board, pid = self._boards.get(rank, (None, 0))
        found = [] if board is None else [status for status in board.read() if status.pid == pid]
        return found[0] if found else None

    def close(self) -> None:
        """Close the status boards."""
        while self._boards:
            self._boards.popitem()[1][0].close()
