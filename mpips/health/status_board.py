"""Status board: each rank publishes its phase in node-shared memory.

A rank stores its phase, the time when the phase began, and its progress, without a message. Each
word has one writer and is stored atomically. But the words of a rank may be from different moments.
A thread adds a heartbeat once a second, and the function that the rank is in
(`mpips.health.watchdog`).

The memory has no name (memfd_create(2)). One rank of a node makes it. The other ranks, and tools in
other terminals, open it as ``/proc/PID/fd/NUMBER``. The memory is freed with the last of these
processes, however they end. Outside `mpips.health.watchdog.watched`, a rank writes to private
memory.

Loads no MPI.
"""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

# Phases of a rank; from WAITING on, the rank waits.
STARTING, SERVING, READING, PULLING, COMPUTING, PUSHING, SUMMING, BETWEEN, EVALUATING, ENDING = (
    range(10)
)
APPLYING, ANSWERING = 10, 12  # only in traces
LOADING = 11
WAITING = 16
OTHERS, BATCH, BUFFER, CLOCKS, ROUND, SHARD, SAVE, END, EVALUATION = range(WAITING, WAITING + 9)
PHASES = {
    STARTING: "starting", SERVING: "serving", READING: "reading data", PULLING: "pulling",
    COMPUTING: "computing", PUSHING: "pushing", SUMMING: "in a round", BETWEEN: "between steps",
    EVALUATING: "evaluating", ENDING: "ending", APPLYING: "applying",
    LOADING: "reading a checkpoint", ANSWERING: "answering a read",
    OTHERS: "waits for others", BATCH: "waits for a batch", BUFFER: "waits for a buffer",
    CLOCKS: "waits for a clock", ROUND: "waits for the round", SHARD: "waits for a shard",
    SAVE: "waits until it is saved", END: "waits for the end",
    EVALUATION: "waits for an evaluation",
}  # fmt: skip

RECORD = 256  # bytes of a rank's record; the first record of the memory has the job's words
TEXT = 128  # offset of the text in a record
(
    RANK, PID, STARTED, ROLE, NUMBER, STACKS, PHASE, SINCE, CLOCK, HANDLED, SAVED, WRITING, BEAT,
    IN_MPI,
) = range(14)  # fmt: skip
LAYOUT = struct.Struct("=7qd4q2d")  # format of these words
MAGIC, COUNT, COORDINATOR, ASKED, OVER = range(5)
IS_MPIPS = 0x6D70_6970_7331  # "mpips1"
SERVER, WORKER, EVALUATOR = 1, 2, 3  # values of ROLE
ROLES = {SERVER: "server", WORKER: "worker", EVALUATOR: "evaluator"}
WORDS = 32  # code in a trace of a change of word 0; phases have smaller codes
TRACED = (CLOCK, SAVED, WRITING)  # words in a trace; the trace itself adds BEAT
FETCH = WORDS + 13  # code in a trace: the rank has requested shards of other nodes
NAME = "mpips-words"
Address = tuple[str, int, int]  # host, process id, file descriptor (-1 for none) of a board


class RankStatus(NamedTuple):
    """Words of a rank, as read from the board.

    Attributes:
        rank: Rank in its world.
        pid: Process id on this host.
        started: Start time of the process, in ticks since the boot.
        role: Role, one of `ROLES`.
        number: Number within the role.
        stacks: File descriptor that the process writes its threads' stacks to at a signal; or -1.
        phase: Phase, one of `PHASES`.
        since: When the phase began, by `time.perf_counter`.
        clock: Number of a worker's pushes in this start, of a server's updates, of rounds, or of
            evaluations.
        handled: Number of pushes that a server has applied or dropped in this start.
        saved: On the coordinator, step of this job's newest checkpoint; -1 if there is none.
        writing: 1 while the rank writes a checkpoint, else 0.
        beat: Time of the last heartbeat.
        in_mpi: Since when the rank has been in an MPI call of its program; 0 if it is in none.
        call: Function that the rank was in at the last heartbeat.
    """

    rank: int
    pid: int
    started: int
    role: int
    number: int
    stacks: int
    phase: int
    since: float
    clock: int
    handled: int
    saved: int
    writing: int
    beat: float
    in_mpi: float
    call: str

    @property
    def waits(self) -> bool:
        """Whether the rank waits, or is in an MPI call of its program, which may wait."""
        return self.phase >= WAITING or self.in_mpi > 0

    @property
    def name(self) -> str:
        """Role and number, in words."""
        return f"{ROLES.get(self.role, '?')} {self.number}"


class StatusBoard:
    """Words of a node's ranks, in shared memory.

    Args:
        file: File descriptor of the memory; closed with the board.
        writes: Whether this process is one of the ranks.

    Raises:
        OSError: If the file cannot be mapped, or is not a status board.
    """

    def __init__(self, file: int, writes: bool = False) -> None:
        self.file = file
        access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
        try:
            self._memory = mmap.mmap(file, 0, access=access)
            first = memoryview(self._memory)[:RECORD]
            self.job = first.cast("q")
            if len(first) < RECORD or self.job[MAGIC] != IS_MPIPS:
                raise ValueError("another file")
        except (OSError, TypeError, ValueError):
            os.close(file)
            raise OSError("no words of mpips") from None

    @classmethod
    def make(cls, ranks: int, coordinator: int) -> "StatusBoard":
        """Make the memory for the ranks of a node.

        Args:
            ranks: Number of the node's ranks.
            coordinator: Rank of the coordinator.
        """
        file = os.memfd_create(NAME)
        os.ftruncate(file, RECORD * (1 + ranks))
        first = memoryview(bytearray(RECORD)).cast("q")
        first[MAGIC], first[COUNT], first[COORDINATOR] = IS_MPIPS, ranks, coordinator
        os.pwrite(file, first.cast("B"), 0)
        return cls(file, writes=True)

    @classmethod
    def open(cls, pid: int, number: int, writes: bool = False) -> "StatusBoard":
        """Open the board of another process.

        Args:
            pid: Process id of the other process.
            number: Number of its file descriptor.
            writes: Whether this process is one of the ranks.

        Raises:
            OSError: If there is no board, or the process belongs to another user.
        """
        path = f"/proc/{pid}/fd/{number}"
        if f"memfd:{NAME}" not in os.readlink(path):
            raise OSError("no words of mpips")
        return cls(os.open(path, os.O_RDWR if writes else os.O_RDONLY), writes)

    def record(self, index: int) -> memoryview:
        """Return the record of a rank of the node, as bytes."""
        return memoryview(self._memory)[RECORD * (1 + index) : RECORD * (2 + index)]

    def read(self) -> list[RankStatus]:
        """Return the words of all ranks of the node that have begun to write."""
        records = (_read(bytes(self.record(k))) for k in range(self.job[COUNT]))
        return [record for record in records if record.pid]

    def is_first(self) -> bool:
        """Return whether this process was the first one of its node to call this."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the file. The memory is freed when no process uses it."""
        os.close(self.file)


def _read(record: bytes) -> RankStatus:
    text = record[TEXT:].partition(b"\0")[0].decode(errors="replace")
    return RankStatus._make((*LAYOUT.unpack_from(record), text))


# Words of this process ------------------------------------------------------------------------

Note = Callable[[int, float, int], object]
_note: Note | None = None
_alone = memoryview(bytearray(RECORD))
_ints, _times = _alone.cast("q"), _alone.cast("d")
_text = _alone[TEXT:]
_job = memoryview(bytes(RECORD)).cast("q")


def write_to(record: memoryview, job: memoryview = _job) -> None:
    """Write this process's words into a record of a board from now on; read its job's words."""
    global _ints, _times, _text, _job
    _ints, _times, _text, _job = record.cast("q"), record.cast("d"), record[TEXT:], job


def write_to_own() -> None:
    """Write this process's words into private memory again."""
    write_to(_alone, memoryview(bytes(RECORD)).cast("q"))


def is_shown() -> bool:
    """Return whether other processes can see this one's words."""
    return not _job.readonly


def asked_to_save() -> bool:
    """Return whether ranks must save their state now, since the job is about to end."""
    return bool(_job[ASKED])


def tell_coordinator(rank: int) -> None:
    """Publish the rank of the new coordinator, after the death of the old one."""
    if not _job.readonly:
        _job[COORDINATOR] = rank


def begin(rank: int, role: int, number: int, stacks: int, now: float) -> None:
    """Publish rank and role of this process; its process id comes last and makes it visible.

    Args:
        rank: See `RankStatus`.
        role: See `RankStatus`.
        number: See `RankStatus`.
        stacks: See `RankStatus`.
        now: Time of `time.perf_counter`.
    """
    from mpips.mpi import process

    pid = os.getpid()
    values = {RANK: rank, ROLE: role, NUMBER: number, STACKS: stacks, SAVED: -1, CLOCK: 0}
    values |= {HANDLED: 0, WRITING: 0, STARTED: int(process.stat_of(pid)[process.STARTED])}
    for word, value in values.items():
        _ints[word] = value
    set_phase(STARTING, now)
    beat(now, "")
    _ints[PID] = pid


def set_phase(phase: int, now: float) -> None:
    """Publish this rank's phase, which began at `now` of `time.perf_counter`. Takes 0.1 us."""
    _times[SINCE] = now
    _ints[PHASE] = phase
    if _note is not None:
        _note(phase, now, 0)


def begin_wait(what: int, now: float) -> tuple[int, float] | None:
    """Publish a waiting phase; return the argument of `end_wait`."""
    before = _ints[PHASE]
    if before >= WAITING:  # a wait within a wait: keep the outer phase
        return None
    since = _times[SINCE]
    set_phase(what, now)
    return before, since


def end_wait(before: tuple[int, float] | None, now: float) -> None:
    """Publish that the rank continues its earlier phase from `now` on."""
    if before is not None:
        _ints[PHASE], _times[SINCE] = before
        if _note is not None:
            _note(before[0], now, 0)


def waits_for(what: int) -> None:
    """Publish a more precise waiting phase, if the rank waits."""
    if _ints[PHASE] >= WAITING and _ints[PHASE] != what:
        _ints[PHASE] = what
        if _note is not None:
            _note(what, time.perf_counter(), 0)


def report(word: int, value: int) -> None:
    """Publish this rank's progress.

    Args:
        word: CLOCK, HANDLED, SAVED or WRITING.
        value: See `RankStatus`.
    """
    _ints[word] = value
    if _note is not None and word in TRACED:
        _note(WORDS + word, time.perf_counter(), value)


def is_traced() -> bool:
    """Return whether a trace records this rank."""
    return _note is not None


def trace_by(note: Note | None) -> None:
    """Call `note` with each phase or word, its time and its value from now on; None ends that."""
    global _note
    _note = note


def applied(start: float, end: float, pushes: Iterable[tuple[int, int]]) -> None:
    """Record in the trace that this rank has applied pushes.

    Args:
        start: When it began, by `time.perf_counter`.
        end: When it ended.
        pushes: Worker and number of each push.
    """
    if (note := _note) is None:  # a full disk has ended the trace
        return
    for worker, seq in pushes:
        note(APPLYING, start, worker << 32 | seq)
    note(SERVING, end, 0)


def fetched() -> None:
    """Record in the trace that this rank has requested shards of other nodes."""
    if _note is not None:
        _note(FETCH, time.perf_counter(), 0)


def answered(rank: int, start: float) -> None:
    """Record in the trace that from `start` until now this rank began to answer a rank's read."""
    if _note is not None:
        _note(ANSWERING, start, rank << 32)
        _note(_ints[PHASE], time.perf_counter(), 0)


def beat(now: float, call: str, in_mpi: bool = False) -> None:
    """Publish a heartbeat, and the function that this process is in; see `RankStatus`."""
    _times[IN_MPI] = (_times[IN_MPI] or now) if in_mpi else 0.0
    text = call.encode()[: len(_text) - 1]
    _text[: len(text) + 1] = text + b"\0"
    _times[BEAT] = now
