"""Processes of this host, and ranks that are late.

A rank tells the others of its host by the name of its process (proc(5)) that it waits for a run to
begin, or that its program has ended. Nothing is known of other hosts.

Loads no MPI.

Messages:
    not come to the run for 300 s: A warning: a rank is at work elsewhere in the program. The job
        ends if such ranks use no processor for 12 times as long.
"""

import contextlib
import os
import platform
import re
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

NAME, STATE, PARENT, SESSION, USER, SYSTEM, STARTED = 0, 1, 2, 4, 12, 13, 20  # of `stat_of`

HOST_NAMESPACE = "user:[4026531837]"  # PROC_USER_INIT_INO of Linux
ANY_BYTES = "surrogateescape"  # a name of at most 15 bytes may end inside of a letter
LAUNCHERS = ("hydra_pmi_proxy", "slurmstepd")  # of ranks, one on each host
# By which launchers tell a process its rank, and the number of ranks.
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

STOPPED, GONE, TRACED = "is stopped", "is gone", "is held by a debugger"

# Of a stack: what differs from rank to rank, and how Python got to the first line of a program.
LEFT_OUT = re.compile(r' ?0x[0-9a-f]+|^  File "(<frozen runpy>|.*/mpips/launch/rank.py)".*\n', re.M)
LOOK_ON = re.compile(r" in (watch_over|report_and_check)\n")  # threads that are of no interest

KEPT_BYTES = (1 << 25) - (1 << 16)  # a little less than glibc's DEFAULT_MMAP_THRESHOLD_MAX

MEETS, LEFT = "mpips-meets", "mpips-left"  # names of processes, of at most 15 bytes
MPI4PY = "/mpi4py/MPI."  # the library whose import starts MPI
JOBS = ("PMIX_NAMESPACE", "PMI_JOBID")  # one launcher may start several jobs
LINGER_S = 10.0  # how long a rank that has ended looks for others that start MPI
FIRST_S, LOOK_S, LOOK_MAX_S = 1.0, 0.2, 30.0
KILL_POLL_S = 0.01
PATIENCE = 12  # times the limit, as for a rank that is at work

_ranks: dict[tuple[int, str], tuple[int | None, list[str | None]]] = {}  # by process id and start


def shown_stacks(text: str) -> str:
    """Return the stacks that faulthandler has written, without what nobody wants to see."""
    threads = [thread for thread in text.split("\n\n") if not LOOK_ON.search(thread)]
    return LEFT_OUT.sub("", "\n\n".join(threads))


def alike_once(texts: Iterable[tuple[str, str]]) -> str:
    """Return texts behind the names of whose they are, those that are alike once."""
    found: dict[str, list[str]] = {}
    for name, text in texts:
        found.setdefault(text, []).append(name)
    return "".join(f"{', '.join(names)}:\n{text}" for text, names in found.items())


def kill(pids: Collection[int], within_s: float) -> list[int]:
    """Kill processes, and wait for their end; returns those that are still there then."""
    for pid in pids:
        send_signal(pid)
    deadline = time.monotonic() + within_s
    while (left := running(pids)) and time.monotonic() < deadline:
        time.sleep(KILL_POLL_S)
    return left


def trouble(pid: int, started: int) -> str:
    """Return why a process gets no further now: STOPPED, GONE or TRACED; else empty.

    Args:
        pid: Its process id.
        started: When it started, which tells it from another process of that id.
    """
    try:
        known = stat_of(pid)
    except OSError:
        return GONE
    if int(known[STARTED]) != started or known[STATE] in "ZX":
        return GONE
    return {"T": STOPPED, "t": TRACED}.get(known[STATE], "")


def stat_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` (proc(5)) behind the process id.

    Among them are its name, its state, such as ``T``, its parent and session, what it has used of
    processors in user and system mode, and when it started, in ticks since the boot.

    Raises:
        OSError: If there is none.
    """
    text = Path(f"/proc/{pid}/stat").read_text(errors=ANY_BYTES)
    head, _, tail = text.rpartition(")")
    return [head.partition("(")[2], *tail.split()]


def ids() -> list[int]:
    """Return the ids of all processes that are seen from here."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def running(pids: Iterable[int]) -> list[int]:
    """Return those of some processes that run; where nobody reaps the dead, zombies stay."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if stat_of(pid)[STATE] not in "ZX":
                found.append(pid)
    return found


def send_signal(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def ancestors(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the id and the name of a process's parent, of its parent, and so on.

    They end at the first process of this container.
    """
    with contextlib.suppress(OSError):
        while pid := int(stat_of(pid)[PARENT]):
            yield pid, stat_of(pid)[NAME]


def ticks_used(pid: int) -> int:
    """Return how many ticks of processors a process has used; 0 if it is gone."""
    try:
        known = stat_of(pid)
    except OSError:
        return 0
    return int(known[USER]) + int(known[SYSTEM])


def waits_for_files(pid: int) -> bool:
    """Return whether a thread of a process waits for a disk, or for a server of files."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if path.read_bytes().rpartition(b")")[2].split()[0] == b"D":
                return True
    return False


def is_caught(number: int) -> bool:
    """Return whether a signal has a handler in this process, also one that Python does not know."""
    text = Path("/proc/self/status").read_text()
    return bool(int(text.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be seen."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_text(errors=ANY_BYTES).split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def rank_in(variables: Mapping[str, str]) -> int | None:
    """Return the rank in its world that a launcher has told a process, or None."""
    told = (variables.get(name, "") for name in RANKS)
    return next((int(text) for text in told if text.isdigit()), None)


def world_told() -> int:
    """Return the number of ranks that this process's launcher has told it of; 1 if it has not."""
    sizes = (os.environ.get(name, "") for name in SIZES)
    return max((int(text) for text in sizes if text.isdigit()), default=1)


def mappings(pid: int | None = None) -> Iterator[tuple[int, int, str, int, int, str]]:
    """Yield what a process has mapped, by default this one; nothing if it cannot be seen.

    Yields:
        First address and end, permissions, and of the file offset, inode and path.
    """
    path = Path(f"/proc/{pid or 'self'}/maps")
    with contextlib.suppress(OSError), path.open(errors="replace") as lines:
        for line in lines:
            bounds, permissions, offset, _, inode, *name = line.rstrip("\n").split(None, 5)
            begin, end = (int(bound, 16) for bound in bounds.split("-"))
            yield begin, end, permissions, int(offset, 16), int(inode), "".join(name)


def namespace_of(pid: int) -> str:
    """Return the user namespace of a process; empty if it cannot be seen."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/user")
    return ""


def apart_from_launcher() -> bool:
    """Return whether this rank is in a user namespace that its launcher on this host is not in.

    Such as that of a container which the launcher starts for each rank.
    """
    mine = namespace_of(os.getpid())
    if mine in ("", HOST_NAMESPACE):
        return False
    for pid, name in ancestors(os.getpid()):
        if name in LAUNCHERS:
            return namespace_of(pid) != mine
    return True


def cpu_name() -> str:
    """Return the model name of the processor, or of its architecture."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def keep_freed_memory() -> None:
    """Have this process keep what it frees of arrays of up to 32 MiB, at most 64 MiB of it.

    Else a step that makes such arrays, and frees them, gives pages back to the kernel, which clears
    them again for the next step. By glibc's malloc: who frees a block of that size once has more of
    the kind (mallopt(3), M_MMAP_THRESHOLD). Of another library it takes and gives back memory that
    is never touched.
    """
    import numpy as np

    np.empty(KEPT_BYTES, np.uint8)


def cores() -> int:
    """Return the number of cores that this process may run on; affinity masks count."""
    return len(os.sched_getaffinity(0))


def local_ranks() -> int:
    """Return the number of ranks on this host, as far as the launcher tells; 1 if it does not."""
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


# Ranks that are late to a run, or gone -----------------------------------------------------------


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Have this process called so within the block."""
    before = stat_of(os.getpid())[NAME]
    _call_process(name)
    try:
        yield
    finally:
        _call_process(before)


def _call_process(name: str) -> None:
    with contextlib.suppress(OSError):  # then nobody knows
        Path("/proc/self/comm").write_text(name, errors=ANY_BYTES)


def ranks_here() -> dict[int, tuple[int, str]]:
    """Return the ranks of this job that this host's launcher has started, without this one.

    Returns:
        Process ids and names, by rank in the world.
    """
    found, mine = {}, [os.environ.get(name) for name in JOBS]
    for pid in _siblings():
        with contextlib.suppress(OSError):
            known = stat_of(pid)
            if int(known[PARENT]) == os.getppid() and known[STATE] not in "ZX":
                rank, job = _rank_of(pid, known[STARTED])
                if rank is not None and job == mine:
                    found[rank] = pid, known[NAME]
    return found


def _siblings() -> set[int]:
    """Return the processes of this one's parent, without this one; where it cannot say, all."""
    found = _children(os.getppid())
    if os.getpid() not in found:  # the kernel has no such list
        found = set(ids())
    return found - {os.getpid()}


def _children(pid: int) -> set[int]:
    found = set[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def _rank_of(pid: int, started: str) -> tuple[int | None, list[str | None]]:
    """Return the rank and the job in a process's environment; the rank is None if it is none."""
    if (pid, started) in _ranks:
        return _ranks[pid, started]
    known = environment_of(pid)
    found = rank_in(known), [known.get(name) for name in JOBS]
    if found[0] is not None:  # else it may not have begun its program yet
        _ranks[pid, started] = found
    return found


def leave_run(may_wait: bool) -> int | None:
    """Say that this rank's program has ended; return a rank that waits for it for ever, or None.

    Args:
        may_wait: Whether others may wait for it in the start of MPI, which it has not started. Then
            this waits until their programs have ended as well, at most for a few seconds.
    """
    _call_process(LEFT)
    deadline = time.monotonic() + LINGER_S
    while may_wait and time.monotonic() < deadline:
        others = {rank: pid for rank, (pid, name) in ranks_here().items() if name != LEFT}
        if not others:
            return None
        for rank in sorted(others):
            if any(MPI4PY in path for *_, path in mappings(others[rank])):
                return rank
        time.sleep(LOOK_S)
    return None


class Absent:
    """Tells a rank that waits for others, before a run begins, of those of its host.

    Args:
        rank: This one, in the world.
        others: Those that it waits for, in the world.
        limit_s: After how long a warning names them; 0 for never.
    """

    def __init__(self, rank: int, others: Collection[int], limit_s: float) -> None:
        self._rank, self._others, self._limit_s = rank, others, limit_s
        self._begun = time.monotonic()
        self._next, self._told = self._begun + FIRST_S, False
        self._used: dict[int, tuple[int, float]] = {}  # of processors, by rank, and since when

    def look(self) -> tuple[str, bool]:
        """Look at the others, now and then.

        Returns:
            What is to be told, mostly nothing; and whether they will never come.
        """
        now = time.monotonic()
        if now < self._next:
            return "", False
        waited_s = now - self._begun
        self._next = now + min(LOOK_MAX_S, max(LOOK_S, waited_s / 10))
        here = self._others_here()
        meets = [rank for rank, (_, name) in here.items() if name == MEETS]
        if self._rank > min(meets, default=self._rank):  # the lowest rank that waits looks often
            self._next = now + LOOK_MAX_S
            return "", False
        if left := [rank for rank, (_, name) in here.items() if name == LEFT]:
            who = f"rank {min(left)} ended before the run began"
            return f"{who}, and rank {self._rank} waits for it", True
        late = {rank: here[rank][0] for rank in sorted(set(here) - set(meets))}
        if not self._limit_s or not (late or self._rank < min(self._others, default=0)):
            return "", False
        never = bool(late) and self._idle_s(late, now) >= PATIENCE * self._limit_s
        if waited_s < self._limit_s or (self._told and not never):
            return "", False
        self._told = True
        return f"{_named(late)} not come to the run for {waited_s:.0f} s", never

    def _others_here(self) -> dict[int, tuple[int, str]]:
        """Return what `ranks_here` does of the others; nothing where names cannot be given."""
        if stat_of(os.getpid())[NAME] != MEETS:
            return {}
        return {rank: found for rank, found in ranks_here().items() if rank in self._others}

    def _idle_s(self, late: dict[int, int], now: float) -> float:
        """Return for how long none of some ranks, given with their processes, has been at work."""
        for rank, pid in late.items():
            used = _used(pid)
            if self._used.get(rank, (-1, now))[0] != used:
                self._used[rank] = used, now
        return min(now - self._used[rank][1] for rank in late)


def _named(late: dict[int, int]) -> str:
    *most, last = [f"{rank} (process {pid})" for rank, pid in late.items()] or [""]
    if not last:
        return "a rank has"
    return f"ranks {', '.join(most)} and {last} have" if most else f"rank {last} has"


def _used(pid: int) -> int:
    """Return how many ticks of processors a process and those that it has started have used."""
    return ticks_used(pid) + sum(map(_used, _children(pid)))
