"""Status board: each rank publishes its phase in node-shared memory.

A rank stores what it does and since when, and what it has done, without asking anybody: each word
has one writer and is stored whole, but those of one rank may be of different moments. A thread adds
once a second that the rank lives, and in which call it is (`mpips.health.watchdog`).

The memory has no name (memfd_create(2)): one rank of a node makes it, and the others, or whoever
looks on from another terminal, open it as ``/proc/PID/fd/NUMBER``. It is gone with the last of
them, however they end. Outside `mpips.health.watchdog.watched` a rank writes to memory of its own.

Loads no MPI.
"""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

# What a rank does; from WAITING on, what it waits for.
STARTING, SERVING, READING, PULLING, COMPUTING, PUSHING, SUMMING, BETWEEN, EVALUATING, ENDING = (
    range(10)
)
APPLYING, ANSWERING = 10, 12  # told to a trace alone
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

RECORD = 256  # bytes of a rank; of the memory's first record the first words are the job's
TEXT = 128  # where the text of a record begins
(
    RANK, PID, STARTED, ROLE, NUMBER, STACKS, PHASE, SINCE, CLOCK, HANDLED, SAVED, WRITING, BEAT,
    IN_MPI,
) = range(14)  # fmt: skip
LAYOUT = struct.Struct("=7qd4q2d")  # of these words
MAGIC, COUNT, COORDINATOR, ASKED, OVER = range(5)
IS_MPIPS = 0x6D70_6970_7331  # "mpips1"
SERVER, WORKER, EVALUATOR = 1, 2, 3  # of ROLE
ROLES = {SERVER: "server", WORKER: "worker", EVALUATOR: "evaluator"}
WORDS = 32  # in a trace, what is behind the phases: changes of a word, and of which
TRACED = (CLOCK, SAVED, WRITING)  # and BEAT, by the trace itself
FETCH = WORDS + 13  # a mark of a trace: shards of other nodes were asked for
NAME = "mpips-words"
Address = tuple[str, int, int]  # host, process id, file descriptor; -1 where there are none


class RankStatus(NamedTuple):
    """The words of a rank, as they were read.

    Attributes:
        rank: In its world; `role` is one of `ROLES`, `number` the one in that role.
        pid: Its process on this host, which started in tick `started` since the boot.
        stacks: The file descriptor that it writes the stacks of its threads to at a signal; or -1.
        phase: One of `PHASES`; `since` when, by `time.perf_counter`.
        clock: Pushes made in this start, updates applied by a server, rounds, evaluations.
        handled: Pushes that a server has applied or dropped in this start.
        saved: The step of the newest checkpoint of this job, on the coordinator; -1 where there is
            none.
        writing: 1 while it writes a checkpoint, else 0.
        beat: When it was last seen to live.
        in_mpi: Since when it has been in a call of MPI by its program; 0 if it is in none.
        call: The call that it was in when it was last seen to live.
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
        """Whether it waits for something, or stands in MPI where nobody knows for what."""
        return self.phase >= WAITING or self.in_mpi > 0

    @property
    def name(self) -> str:
        """Its number in its role, in words."""
        return f"{ROLES.get(self.role, '?')} {self.number}"


class StatusBoard:
    """The words of a node's ranks, in memory that they share.

    Args:
        file: A file descriptor of that memory, which is closed with the board.
        writes: Whether this process is one of the ranks.

    Raises:
        OSError: If it cannot be mapped, or is something else.
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
        """Make the memory for so many ranks of a node."""
        file = os.memfd_create(NAME)
        os.ftruncate(file, RECORD * (1 + ranks))
        first = memoryview(bytearray(RECORD)).cast("q")
        first[MAGIC], first[COUNT], first[COORDINATOR] = IS_MPIPS, ranks, coordinator
        os.pwrite(file, first.cast("B"), 0)
        return cls(file, writes=True)

    @classmethod
    def open(cls, pid: int, number: int, writes: bool = False) -> "StatusBoard":
        """Open that of another process, in which it has this number.

        Raises:
            OSError: If there is none, or the process is somebody else's.
        """
        path = f"/proc/{pid}/fd/{number}"
        if f"memfd:{NAME}" not in os.readlink(path):
            raise OSError("no words of mpips")
        return cls(os.open(path, os.O_RDWR if writes else os.O_RDONLY), writes)

    def record(self, index: int) -> memoryview:
        """Return the memory of a rank of the node, as bytes."""
        return memoryview(self._memory)[RECORD * (1 + index) : RECORD * (2 + index)]

    def read(self) -> list[RankStatus]:
        """Return the words of all ranks of the node that have begun to write."""
        records = (_read(bytes(self.record(k))) for k in range(self.job[COUNT]))
        return [record for record in records if record.pid]

    def is_first(self) -> bool:
        """Return whether this process is the first of its node to call this; it stays that."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the file; the memory goes when nobody uses it."""
        os.close(self.file)


def _read(record: bytes) -> RankStatus:
    text = record[TEXT:].partition(b"\0")[0].decode(errors="replace")
    return RankStatus._make((*LAYOUT.unpack_from(record), text))


# Those of this process ------------------------------------------------------------------------

Note = Callable[[int, float, int], object]
_note: Note | None = None
_alone = memoryview(bytearray(RECORD))
_ints, _times = _alone.cast("q"), _alone.cast("d")
_text = _alone[TEXT:]
_job = memoryview(bytes(RECORD)).cast("q")


def write_to(record: memoryview, job: memoryview = _job) -> None:
    """Write this process's words into a record of a board from now on; read those of its job."""
    global _ints, _times, _text, _job
    _ints, _times, _text, _job = record.cast("q"), record.cast("d"), record[TEXT:], job


def write_to_own() -> None:
    """Write them into memory of this process's own again."""
    write_to(_alone, memoryview(bytes(RECORD)).cast("q"))


def is_shown() -> bool:
    """Return whether others see this process's words."""
    return not _job.readonly


def asked_to_save() -> bool:
    """Return whether what can be saved is to be saved: the job is about to end."""
    return bool(_job[ASKED])


def tell_coordinator(rank: int) -> None:
    """Say that a rank is the coordinator from now on, as the one before has died."""
    if not _job.readonly:
        _job[COORDINATOR] = rank


def begin(rank: int, role: int, number: int, stacks: int, now: float) -> None:
    """Say who this process is; with its process id last, it is seen."""
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
    """Say what this rank does from `now` on, a time of `time.perf_counter`. Costs 0.1 us."""
    _times[SINCE] = now
    _ints[PHASE] = phase
    if _note is not None:
        _note(phase, now, 0)


def begin_wait(what: int, now: float) -> tuple[int, float] | None:
    """Say what this rank waits for; returns what `end_wait` is given."""
    before = _ints[PHASE]
    if before >= WAITING:  # the outer wait is the one to be told of
        return None
    since = _times[SINCE]
    set_phase(what, now)
    return before, since


def end_wait(before: tuple[int, float] | None, now: float) -> None:
    """Say that it goes on from `now` on with what it did before."""
    if before is not None:
        _ints[PHASE], _times[SINCE] = before
        if _note is not None:
            _note(before[0], now, 0)


def waits_for(what: int) -> None:
    """Say more closely what it waits for, if it waits."""
    if _ints[PHASE] >= WAITING and _ints[PHASE] != what:
        _ints[PHASE] = what
        if _note is not None:
            _note(what, time.perf_counter(), 0)


def report(word: int, value: int) -> None:
    """Say how far this rank is: CLOCK, HANDLED, SAVED or WRITING."""
    _ints[word] = value
    if _note is not None and word in TRACED:
        _note(WORDS + word, time.perf_counter(), value)


def is_traced() -> bool:
    """Return whether somebody notes what this rank does."""
    return _note is not None


def trace_by(note: Note | None) -> None:
    """Have a function told what this rank does, from when on, and a value; None ends it."""
    global _note
    _note = note


def applied(start: float, end: float, pushes: Iterable[tuple[int, int]]) -> None:
    """Tell a trace that this rank has applied pushes of workers, by their numbers."""
    if (note := _note) is None:  # a full disk has ended the trace
        return
    for worker, seq in pushes:
        note(APPLYING, start, worker << 32 | seq)
    note(SERVING, end, 0)


def fetched() -> None:
    """Tell a trace that this rank has asked the owners on other nodes for their shards."""
    if _note is not None:
        _note(FETCH, time.perf_counter(), 0)


def answered(rank: int, start: float) -> None:
    """Tell a trace that from `start` until now this rank has begun to answer another one's read."""
    if _note is not None:
        _note(ANSWERING, start, rank << 32)
        _note(_ints[PHASE], time.perf_counter(), 0)


def beat(now: float, call: str, in_mpi: bool = False) -> None:
    """Say that this process lives, and the call that it is in; see `RankStatus`."""
    _times[IN_MPI] = (_times[IN_MPI] or now) if in_mpi else 0.0
    text = call.encode()[: len(_text) - 1]
    _text[: len(text) + 1] = text + b"\0"
    _times[BEAT] = now
