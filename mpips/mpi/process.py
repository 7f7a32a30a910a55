"""Processes of this host, and ranks that are late.

A rank sets its process name (proc(5)) while it waits for a run to begin, and when its program has
ended. The other ranks of its host read the name. Nothing is known about other hosts.

Loads no MPI.

Messages:
    not come to the run for 300 s: A warning: a rank is at work elsewhere in the program. The job
        ends if such ranks use no processor for 12 times as long.
"""

import contextlib
import os
import platform
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from mpips.errors import listed

NAME, STATE, PARENT, SESSION, USER, SYSTEM, STARTED = 0, 1, 2, 4, 12, 13, 20  # see `stat_of`
HOST_NAMESPACE = "user:[4026531837]"  # PROC_USER_INIT_INO of Linux
ANY_BYTES = "surrogateescape"  # a name is cut to 15 bytes, perhaps within a character
LAUNCHERS = ("hydra_pmi_proxy", "slurmstepd")  # parents of ranks, one process on each host
# Variables in which launchers pass a process its rank, and the number of ranks.
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

STOPPED, GONE, TRACED = "is stopped", "is gone", "is held by a debugger"


MEETS, LEFT = "mpips-meets", "mpips-left"  # names of processes, of at most 15 bytes
MPI4PY = "/mpi4py/MPI."  # in the path of the library that starts MPI
JOBS = ("PMIX_NAMESPACE", "PMI_JOBID")  # one launcher may start several jobs
LINGER_S = 10.0  # an ended rank checks for so long whether others start MPI
FIRST_S, LOOK_S, LOOK_MAX_S = 1.0, 0.2, 30.0
KILL_POLL_S = 0.01
PATIENCE = 12  # multiple of the limit for ranks at work

_ranks: dict[tuple[int, str], tuple[int | None, list[str | None]]] = {}  # by process id and start


def kill(pids: Collection[int], within_s: float) -> list[int]:
    """Kill processes; return those that still run after `within_s` seconds."""
    for pid in pids:
        send_signal(pid)
    deadline = time.monotonic() + within_s
    while (left := running(pids)) and time.monotonic() < deadline:
        time.sleep(KILL_POLL_S)
    return left


def trouble(pid: int, started: int) -> str:
    """Return why a process makes no progress now: STOPPED, GONE or TRACED; else empty.

    Args:
        pid: Process id.
        started: Start time of the process; a later process may have the same id.
    """
    try:
        known = stat_of(pid)
    except OSError:
        return GONE
    if int(known[STARTED]) != started or known[STATE] in "ZX":
        return GONE
    return {"T": STOPPED, "t": TRACED}.get(known[STATE], "")


def stat_of(pid: int) -> list[str]:
    """Return the name of a process, and the fields of ``/proc/PID/stat`` (proc(5)) after it.

    Among the fields are its state, such as ``T``, its parent and its session. Processor time in
    user and system mode, and start time since the boot, are in ticks.

    Raises:
        OSError: If there is no such process.
    """
    text = Path(f"/proc/{pid}/stat").read_text(errors=ANY_BYTES)
    head, _, tail = text.rpartition(")")
    return [head.partition("(")[2], *tail.split()]


def ids() -> list[int]:
    """Return the ids of all processes that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def running(pids: Iterable[int]) -> list[int]:
    """Return the processes that run. Zombies do not count: some containers never reap them."""
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
    """Yield id and name of a process's parent, of its parent, and so on.

    The last one is the first process of this container.
    """
    with contextlib.suppress(OSError):
        while pid := int(stat_of(pid)[PARENT]):
            yield pid, stat_of(pid)[NAME]


def ticks_used(pid: int) -> int:
    """Return the processor time that a process has used, in ticks; 0 if it is gone."""
    with contextlib.suppress(OSError):
        known = stat_of(pid)
        return int(known[USER]) + int(known[SYSTEM])
    return 0


def waits_for_files(pid: int) -> bool:
    """Return whether a thread of a process waits for a disk or a file server."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if path.read_bytes().rpartition(b")")[2].split()[0] == b"D":
                return True
    return False


def is_caught(number: int) -> bool:
    """Return whether a signal has a handler in this process, be it one of C or of Python."""
    text = Path("/proc/self/status").read_text()
    return bool(int(text.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if this one may not read it."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_text(errors=ANY_BYTES).split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def rank_in(variables: Mapping[str, str]) -> int | None:
    """Return the rank that a launcher has set in an environment, or None."""
    told = (variables.get(name, "") for name in RANKS)
    return next((int(text) for text in told if text.isdigit()), None)


def world_told() -> int:
    """Return the number of ranks that the launcher has set; 1 if it has set none."""
    sizes = (os.environ.get(name, "") for name in SIZES)
    return max((int(text) for text in sizes if text.isdigit()), default=1)


def mappings(pid: int | None = None) -> Iterator[tuple[int, int, str, int, int, str]]:
    """Yield the memory mappings of a process, by default this one; none if it cannot be seen.

    Yields:
        First address and end, permissions, and the file's offset, inode and path.
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
    """Return whether this rank's user namespace differs from that of its launcher on this host.

    This is so if the launcher starts a container for each rank.
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


def cores() -> int:
    """Return the number of cores of this host's ranks, those of others if they have begun."""
    found = os.sched_getaffinity(0)
    for pid, _ in (ranks_here() if len(found) < (os.cpu_count() or 1) else {}).values():
        with contextlib.suppress(OSError):
            found |= os.sched_getaffinity(pid)
    return len(found)


def local_ranks() -> int:
    """Return the number of ranks on this host, as set by the launcher; 1 if it has set none."""
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


# Ranks that are late to a run, or gone -----------------------------------------------------------


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Rename this process within the block."""
    before = stat_of(os.getpid())[NAME]
    set_name(name)
    try:
        yield
    finally:
        set_name(before)


def set_name(name: str) -> None:
    """Set the name of this process, which other ranks of the host can read."""
    with contextlib.suppress(OSError):  # then other ranks do not see it
        Path("/proc/self/comm").write_text(name, errors=ANY_BYTES)


def ranks_here() -> dict[int, tuple[int, str]]:
    """Return the other ranks of this job that this host's launcher has started.

    Returns:
        Process id and name, by rank in the world.
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
    """Return the other children of this process's parent; if the kernel lists none, all."""
    found = _children(os.getppid())
    if os.getpid() not in found:  # a kernel without such a list
        found = set(ids())
    return found - {os.getpid()}


def _children(pid: int) -> set[int]:
    found = set[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def _rank_of(pid: int, started: str) -> tuple[int | None, list[str | None]]:
    """Return the rank and the job in a process's environment; rank None if it has none."""
    if (pid, started) in _ranks:
        return _ranks[pid, started]
    known = environment_of(pid)
    found = rank_in(known), [known.get(name) for name in JOBS]
    if found[0] is not None:  # else the process may not have begun its program yet
        _ranks[pid, started] = found
    return found


def leave_run(may_wait: bool) -> int | None:
    """Publish that this rank's program has ended; return a rank that waits for it forever, or None.

    Args:
        may_wait: Whether other ranks may wait for this one in the start of MPI, which it has not
            started. Then this waits a few seconds at most for the end of their programs.
    """
    set_name(LEFT)
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
    """Missing ranks of this host, as seen by a rank that waits for a run to begin.

    Args:
        rank: This rank in the world.
        others: The ranks that it waits for, in the world.
        limit_s: Seconds after which a warning names the missing ranks; 0 for no warning.
    """

    def __init__(self, rank: int, others: Collection[int], limit_s: float) -> None:
        self._rank, self._others, self._limit_s = rank, others, limit_s
        self._begun = time.monotonic()
        self._next, self._warned = self._begun + FIRST_S, False
        self._used: dict[int, tuple[int, float]] = {}  # by rank: ticks used, and since when

    def look(self) -> tuple[str, bool]:
        """Check the other ranks, if it is time to.

        Returns:
            A warning, mostly empty; and whether the missing ranks will never come.
        """
        now = time.monotonic()
        if now < self._next:
            return "", False
        waited_s = now - self._begun
        self._next = now + min(LOOK_MAX_S, max(LOOK_S, waited_s / 10))
        present = self._others_here()
        meets = [rank for rank, (_, name) in present.items() if name == MEETS]
        if self._rank > min(meets, default=self._rank):  # only the lowest waiting rank reports
            self._next = now + LOOK_MAX_S
            return "", False
        if left := [rank for rank, (_, name) in present.items() if name == LEFT]:
            who = f"rank {min(left)} ended before the run began"
            return f"{who}, and rank {self._rank} waits for it", True
        late = {rank: present[rank][0] for rank in sorted(set(present) - set(meets))}
        if not self._limit_s or not (late or self._rank < min(self._others, default=0)):
            return "", False
        never = bool(late) and self._idle_s(late, now) >= PATIENCE * self._limit_s
        if waited_s < self._limit_s or (self._warned and not never):
            return "", False
        self._warned = True
        return f"{_named(late)} not come to the run for {waited_s:.0f} s", never

    def _others_here(self) -> dict[int, tuple[int, str]]:
        """Return `ranks_here` of the others; empty if processes cannot be renamed here."""
        if stat_of(os.getpid())[NAME] != MEETS:
            return {}
        return {rank: found for rank, found in ranks_here().items() if rank in self._others}

    def _idle_s(self, late: dict[int, int], now: float) -> float:
        """Return the seconds since one of the late ranks, with their processes, was at work."""
        for rank, pid in late.items():
            used = _used(pid)
            if self._used.get(rank, (-1, now))[0] != used:
                self._used[rank] = used, now
        return min(now - self._used[rank][1] for rank in late)


def _named(late: dict[int, int]) -> str:
    names = listed([f"{rank} (process {pid})" for rank, pid in late.items()], most=4)
    if len(late) > 1:
        return f"ranks {names} have"
    return f"rank {names} has" if late else "a rank has"


def _used(pid: int) -> int:
    """Return the processor time of a process and its descendants, in ticks."""
    return ticks_used(pid) + sum(map(_used, _children(pid)))
