"""The ranks of a job: their nodes, roles and communicators, and how they wait.

Importing this module starts MPI. What has to be set before that (yielding where ranks
outnumber cores) is set here first, if the user has not set it.
"""

import contextlib
import ctypes
import itertools
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from mpips.cluster import segments
from mpips.errors import UserError
from mpips.layout.roles import Roles


def cores() -> int:
    """Return the number of cores that this process may run on; affinity masks count."""
    return len(os.sched_getaffinity(0))


def _local_ranks() -> int:
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


def _yield_when_crowded() -> None:
    if _local_ranks() > cores():
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


_yield_when_crowded()
segments.clean()
segments.require_room()

with segments.noted():
    from mpi4py import MPI  # starts MPI, with what was set above

SPIN_S = 20e-6
PR_SET_TIMERSLACK, TIMER_SLACK_NS = 29, 1000  # prctl(2)
YIELD_S = 200e-6
SLEEP_S = 20e-6
SLEEP_MAX_S = 1e-3
IDLE_S = 1.0
BACKGROUND_S = 200e-6
TAG_NEVER = 32000
SIZES = ("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
TAG_CONTROL, TAG_GATHER = 1, 7


Comm: TypeAlias = MPI.Intracomm
Request: TypeAlias = MPI.Request


def _sharpen_timers() -> None:
    """Let a sleep of 20 us take 25, not 75: Linux delays timers by up to 50 us unless told."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)


def _take_turns() -> None:
    """Let whoever has the core keep it until it waits, though another rank of it wakes up.

    By policy SCHED_BATCH (sched(7)); a policy that somebody has chosen stays. Where it may not be
    set, ranks interrupt each other as before, which costs time and nothing else.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Backoff:
    """How a rank waits: it spins, then yields, then sleeps longer and longer.

    A sleep gives the core away, which ``sched_yield`` alone does not do under Linux's fair
    scheduler. Where ranks outnumber cores, spinning is left out, and the first sleep is the longer
    the more of them take turns: each look costs those that work 10 to 20 us.

    Args:
        crowding: Ranks for each core.
    """

    def __init__(self, crowding: float) -> None:
        crowded = crowding > 1
        self._spin_s = 0.0 if crowded else SPIN_S
        self._yield_s = SPIN_S if crowded else YIELD_S
        self._sleep_s = min(SLEEP_MAX_S, SLEEP_S * max(1.0, 2 * (crowding - 1)))
        self._since: float | None = None

    def reset(self) -> None:
        """Start over: something was done."""
        self._since = None

    def pause(self) -> None:
        """Wait a little; how little depends on the time since `reset`."""
        now = time.perf_counter()
        if self._since is None:
            self._since = now
        idle_s = now - self._since
        if idle_s < self._spin_s:
            return
        if idle_s < self._yield_s:
            os.sched_yield()
        else:
            more = SLEEP_MAX_S - self._sleep_s
            time.sleep(self._sleep_s + more * min(1.0, idle_s / IDLE_S))


class Background:
    """Calls `advance` from a thread of its own, now and then, within a ``with`` block.

    So MPI gets on while this rank computes. The thread and the rank never act at once: entering
    hands over to the thread, leaving waits for it. Without MPI_THREAD_MULTIPLE nothing is called.
    The thread begins with the first block, and ends by `end`.
    """

    def __init__(self, advance: Callable[[], object]) -> None:
        self._advance = advance
        self._wanted, self._turn = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def __enter__(self) -> None:
        if self._allowed and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()
        self._wanted.set()

    def __exit__(self, *_: object) -> None:
        self._wanted.clear()
        with self._turn:
            return

    def end(self) -> None:
        """End the thread, if there is one; no block may follow."""
        self._ended = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._wanted.wait() and not self._ended:
            with self._turn:
                if self._wanted.is_set():
                    self._advance()
            time.sleep(BACKGROUND_S)


class Cluster:
    """The job's ranks, where they are and what they do.

    Collective: yes, over `comm`, construction and `free` both.

    Args:
        comm: Communicator of the whole job; duplicated.
        node_size: Treat this many consecutive ranks as a node; 0 for the real nodes.

    Attributes:
        comm: Duplicate of the communicator; headers of pushes travel on it.
        bodies: Another one, for bodies of pushes, which are received from whoever is first.
        node: Communicator of this rank's node.
        hosts: Host name of each rank.
        node_of: Node number of each rank.
        cores_a_rank: Cores of this host, over its ranks.
        crowding: Its ranks, over its cores.
        crowded: Whether ranks outnumber cores there.
    """

    def __init__(self, comm: MPI.Intracomm, node_size: int = 0) -> None:
        self.comm = comm.Dup()
        self.bodies, self._control = comm.Dup(), comm.Dup()
        self.rank, self.world = comm.rank, comm.size
        real = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        color = comm.rank // node_size if node_size else 0
        self.node: MPI.Intracomm = real.Split(color, key=comm.rank)  # type: ignore[assignment]
        real.Free()
        leader = self.node.allgather(comm.rank)[0]
        leaders = comm.allgather(leader)
        order = sorted(set(leaders))
        self.node_of = [order.index(k) for k in leaders]
        self.hosts = comm.allgather(platform.node())
        masks = comm.allgather(os.sched_getaffinity(0))
        here = [m for m, host in zip(masks, self.hosts, strict=True) if host == platform.node()]
        self.cores_a_rank = len(set().union(*here)) / len(here)
        self.crowding = 1 / self.cores_a_rank
        self.crowded = self.crowding > 1
        self._sending: list[tuple[MPI.Request, bytes]] = []
        self._later: list[tuple[int, str, Any]] = []
        if self.crowded:
            _take_turns()
        else:  # where ranks outnumber cores, MPICH's heavy yield lives on the slack
            _sharpen_timers()
        self.threads = 0
        self.roles = Roles((), tuple(range(self.world)))

    @cached_property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(self.node_of) + 1

    @cached_property
    def my_node(self) -> list[int]:
        """Ranks of this rank's node, increasing."""
        return [r for r in range(self.world) if self.near(r)]

    @property
    def is_chief(self) -> bool:
        """Whether this rank hands out data, starts checkpoints and prints."""
        return self.rank == self.roles.chief

    def near(self, rank: int) -> bool:
        """Whether `rank` is on this rank's node, so that its memory can be read by loads."""
        return self.node_of[rank] == self.node_of[self.rank]

    def limit_threads(self, threads: int = 0) -> int:
        """Limit BLAS threads to `threads`, or to this rank's share of its node's cores."""
        from threadpoolctl import threadpool_limits

        share = threads or max(1, int(self.cores_a_rank))
        threadpool_limits(share)
        self.threads = share
        return share

    def progress(self) -> None:
        """Enter MPI, so that far reads and messages get on. Blocks: no."""
        self.comm.Iprobe(MPI.ANY_SOURCE, TAG_NEVER)

    def wait(self, ready: Callable[[], bool]) -> float:
        """Wait until `ready()`; the core is given away, MPI gets on, signals are noticed.

        Returns:
            The seconds waited.
        """
        if ready():
            return 0.0
        start = time.perf_counter()
        backoff = Backoff(self.crowding)
        while not ready():
            self.progress()
            backoff.pause()
        return time.perf_counter() - start

    def wait_request(self, request: MPI.Request) -> float:
        """Wait for a non-blocking operation; returns the seconds waited."""
        return self.wait(request.Test)

    def barrier(self) -> float:
        """Wait for every rank. Collective: yes. Returns the seconds waited."""
        return self.wait_request(self.comm.Ibarrier())

    def send(self, dest: int, kind: str, payload: Any = None) -> None:
        """Send a control message: rare and small. Blocks: no; `poll` receives it."""
        if dest == self.rank:
            self._later.append((dest, kind, payload))
        else:
            self._isend(dest, TAG_CONTROL, (kind, payload))

    def _isend(self, dest: int, tag: int, value: object) -> None:
        self._sending = [(r, m) for r, m in self._sending if not r.Test()]
        message = MPI.pickle.dumps(value)
        self._sending.append((self._control.Isend(message, dest, tag), message))

    def _receive(self, tag: int, source: int = MPI.ANY_SOURCE) -> Iterator[tuple[int, Any]]:
        """Yield (source, value) of the messages that have come."""
        status = MPI.Status()
        while (found := self._control.Improbe(source, tag, status)) is not None:
            body = bytearray(status.Get_count(MPI.BYTE))
            found.Recv(body)  # already here or on its way: does not wait for anybody's step
            yield status.Get_source(), MPI.pickle.loads(body)

    def poll(self) -> list[tuple[int, str, Any]]:
        """Return the control messages that have come, as (source, kind, payload).

        Messages of one source come in the order in which they were sent. Blocks: no.
        """
        messages, self._later = self._later, []
        messages += [(source, *value) for source, value in self._receive(TAG_CONTROL)]
        return messages

    def gather(self, value: object) -> list[Any] | None:
        """Bring every rank's value to the chief; returns them by rank there, None elsewhere.

        Collective: yes. Blocks: on the chief, but never inside MPI.
        """
        if not self.is_chief:
            self._isend(self.roles.chief, TAG_GATHER, value)
            return None
        values = {self.rank: value}

        def complete() -> bool:
            for rank in set(range(self.world)) - set(values):  # one each: others may run ahead
                values.update(itertools.islice(self._receive(TAG_GATHER, rank), 1))
            return len(values) == self.world

        self.wait(complete)
        return [values[rank] for rank in range(self.world)]

    def flush(self) -> None:
        """Wait until every control message has left; afterwards `free` is safe."""
        for request, _ in self._sending:
            self.wait_request(request)
        self._sending = []

    def free(self) -> None:
        """Free the communicators; may be called twice. Collective: yes."""
        if self.comm != MPI.COMM_NULL:
            self.flush()
            for comm in (self.node, self._control, self.bodies, self.comm):
                comm.Free()


def cluster_subset(cluster: Cluster, ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of `ranks`; COMM_NULL on the others. Collective: yes."""
    color = 0 if cluster.rank in ranks else MPI.UNDEFINED
    comm: MPI.Intracomm = cluster.comm.Split(color, key=cluster.rank)  # type: ignore[assignment]
    return comm


def all_done(requests: list[Request]) -> bool:
    """Whether all these operations are complete. Blocks: no; makes them get on."""
    return MPI.Request.Testall(requests)


def begin_sum(comm: Comm, values: np.ndarray) -> Request:
    """Begin to add up `values` over `comm`, in place. Collective: yes. Blocks: no."""
    return comm.Iallreduce(MPI.IN_PLACE, values)


def begin_maximum(comm: Comm, values: np.ndarray, out: np.ndarray) -> Request:
    """Begin to find the elementwise maximum over `comm`. Collective: yes. Blocks: no."""
    return comm.Iallreduce(values, out, MPI.MAX)


def free(comm: Comm) -> None:
    """Free a communicator that this rank may be outside of. Collective: over its ranks."""
    if comm != MPI.COMM_NULL:
        comm.Free()


def whole_world() -> Comm:
    """Return the communicator of all ranks that were started."""
    return MPI.COMM_WORLD


class Agreed(UserError):
    """An error that every rank raises, each with the same message."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


def together(comm: MPI.Comm, error: Exception | None) -> None:
    """Raise the same `Agreed` on every rank of `comm` if any has an error. Collective: yes."""
    here, backoff = comm.Ibarrier(), Backoff(crowding=2)
    while not here.Test():  # somebody may be reading a large file
        backoff.pause()
    found = [e for e in comm.allgather(error and str(error)) if e]
    if found:
        raise Agreed(found[0])


def check_world(comm: MPI.Comm) -> None:
    """Refuse a world of one rank where the launcher started several.

    A wrong ``srun --mpi``, or the mpirun of another MPI, silently starts N worlds of one rank.

    Raises:
        UserError: If the launcher's variables tell of more tasks than the one rank that MPI sees.
    """
    told = [os.environ.get(name, "") for name in SIZES]
    tasks = max((int(text) for text in told if text.isdigit()), default=1)
    if comm.size > 1 or tasks == 1:
        return
    library = MPI.Get_library_version()
    mine = ("Open MPI", "pmix") if "Open MPI" in library else ("MPICH", "pmi2")
    if "Intel" in library:
        mine = ("Intel MPI", "pmi2, and I_MPI_PMI_LIBRARY of SLURM's libpmi2.so")
    slurm = "SLURM_STEP_NUM_TASKS" in os.environ
    where = "a SLURM step" if slurm else "a launch"
    remedy = f"use srun --mpi={mine[1]}" if slurm else f"use the mpirun of {mine[0]}"
    raise UserError(f"a world of 1 rank in {where} of {tasks} tasks", f"a world of {tasks}", remedy)


def mpi_name() -> str:
    """Return the MPI library and version in a few words."""
    words = MPI.Get_library_version().replace("\x00", " ").split("\n")[0].replace("\t", " ")
    return " ".join(words.split(",")[0].split()[:4])
