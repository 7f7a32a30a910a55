"""Start of MPI, the loaded library, and a check of its launcher.

MPI is started by importing this module, the only one that imports mpi4py. It first sets environment
variables that MPI reads at its start, unless the user has set them: to yield if ranks outnumber
cores, and to leave out networks. The other modules of this room import `MPI` from here.

Environment:
    PMI_RANK, PMI_SIZE, PMI_JOBID: Rank, ranks and job, set by MPICH's launcher.
    PMIX_RANK, PMIX_NAMESPACE: Rank and job, set by a launcher with PMIx.
    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE: Rank and ranks, set by Open MPI's launcher.
    MPI_LOCALNRANKS, OMPI_COMM_WORLD_LOCAL_SIZE, SLURM_NTASKS_PER_NODE: Ranks of this host, which
        share its cores.
    SLURM_STEP_NUM_TASKS: Ranks of a step of SLURM. A world of one rank with more is refused.
    OMPI_MCA_btl: Set to ``^ofi`` while MPI starts on a single host, unless it is set: Open MPI
        starts a second sooner.
    MPIR_CVAR_CH4_CMA_ENABLE: Set to 0 if each rank has its own user namespace, unless it is set:
        MPICH could not copy between them.
    UCX_POSIX_USE_PROC_LINK: Set to n then, unless it is set: UCX could not open the memory of
        other ranks through /proc.
    MPIR_CVAR_ENABLE_HEAVY_YIELD, OMPI_MCA_mpi_yield_when_idle, I_MPI_THREAD_YIELD: Set if ranks
        outnumber cores, unless they are set: a rank that waits yields its core.

Messages:
    a world of 1 rank in ... of 8 tasks: The ``mpirun`` of another MPI started it, or ``srun``
        has the wrong ``--mpi``. The message names the right one.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import TypeAlias

from mpips.errors import UserError, complain
from mpips.mpi import segments, signals
from mpips.mpi.process import apart_from_launcher, cores, local_ranks, world_told

BTL = "OMPI_MCA_btl"
COPIES = "MPIR_CVAR_CH4_CMA_ENABLE"  # whether MPICH reads other ranks' memory through the kernel
LINKS = "UCX_POSIX_USE_PROC_LINK"  # whether UCX opens another rank's memory through /proc


def _copy_by_shared_memory() -> None:
    """Have MPICH copy through shared memory if each rank has its own user namespace; print so once.

    A rank may not read the memory of ranks in other namespaces. MPICH would die at its start, or at
    the first large message.
    """
    if not segments.is_by_mpich(os.environ) or local_ranks() < 2 or COPIES in os.environ:
        return
    if not apart_from_launcher():
        return
    os.environ[COPIES] = "0"
    os.environ.setdefault(LINKS, "n")
    if os.environ["PMI_RANK"] == "0":
        got = f"{COPIES}=0 is set, as MPICH cannot copy between containers"
        complain(f"{got}; if all ranks of a node share one (ch-run --join), export {COPIES}=1")


@contextlib.contextmanager
def unused_networks_left_out() -> Iterator[None]:
    """Leave out libfabric within the block on a single host, which saves a second.

    Open MPI's BTL over libfabric sleeps 1 s when it is closed. MPI_Init closes it if it is of no
    use.
    """
    alone = "" if "PMIX_RANK" in os.environ else "1"  # srun sets no size for its ranks
    ranks = os.environ.get("OMPI_COMM_WORLD_SIZE", alone)
    one_host = ranks == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if not one_host or BTL in os.environ:
        yield
        return
    os.environ[BTL] = "^ofi"
    try:
        yield
    finally:
        del os.environ[BTL]  # this process may start an mpirun on several hosts


if local_ranks() > 1 and local_ranks() > cores():
    os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("I_MPI_THREAD_YIELD", "2")  # sched_yield
segments.clean()
segments.require_room()
_copy_by_shared_memory()

with segments.noted(), unused_networks_left_out():
    from mpi4py import MPI  # starts MPI, with what was set above

if "Intel" in MPI.Get_library_version():
    signals.divert()

PR_SET_TIMERSLACK, TIMER_SLACK_NS = 29, 1000  # prctl(2)

MPI_OBJECTS = (MPI.Comm, MPI.Win, MPI.Request, MPI.Message, MPI.File)
Comm: TypeAlias = MPI.Intracomm
Request: TypeAlias = MPI.Request
Status: TypeAlias = MPI.Status


def whole_world() -> Comm:
    """Return the communicator of all ranks that were started.

    Raises:
        UserError: In a process that is no rank, such as a data loader's worker process.
    """
    if not MPI.Is_initialized():
        got = "a run that begins in a process that a rank has started, which imports its program"
        remedy = 'put the call behind if __name__ == "__main__":'
        raise UserError(got, "one that begins in ranks alone", remedy)
    return MPI.COMM_WORLD


def ranks_of(comm: Comm | None) -> Comm:
    """Return the communicator that a program passes, or that of all ranks.

    Args:
        comm: The program's communicator; None for all ranks.

    Raises:
        UserError: If `comm` is no communicator; see also `whole_world`.
    """
    if comm is None:
        return whole_world()
    if not isinstance(comm, MPI.Intracomm):
        got = f"comm of type {type(comm).__name__}"
        raise UserError(got, "a communicator of mpi4py", "leave it out for all ranks")
    return comm


def share_cores(oversubscribed: bool) -> None:
    """Set the scheduling of this process to fit the load of its host.

    If ranks outnumber cores, the policy is SCHED_BATCH (sched(7)), unless the user has set one: a
    rank then keeps its core until it waits, though another rank wakes up. If the system does not
    allow the policy, ranks interrupt each other, which only costs time. Otherwise a sleep of 20 us
    takes 25 us instead of 75: Linux delays timers by up to 50 us by default. MPICH's heavy yield
    depends on that delay.

    Args:
        oversubscribed: Whether ranks outnumber the host's cores.
    """
    if not oversubscribed:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)
    elif os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def library_text() -> str:
    """Return the library's own description, in several lines."""
    return MPI.Get_library_version().replace("\x00", "")


def mpi_name() -> str:
    """Return the MPI library and version in a few words."""
    words = library_text().split("\n")[0].replace("\t", " ")
    return " ".join(words.split(",")[0].split()[:4])


def is_open_mpi() -> bool:
    """Return whether the loaded library is Open MPI, or derived from it.

    The `mpirun` on the path may be another one's: see `mpips.launch.mpirun.is_open_mpi`.
    """
    return "Open MPI" in library_text()


def any_thread_may_call() -> bool:
    """Return whether MPI was started with MPI_THREAD_MULTIPLE."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def check_world(comm: Comm) -> None:
    """Refuse a world of one rank if the launcher has started several.

    With a wrong ``srun --mpi``, or the mpirun of another MPI, N worlds of one rank start silently.

    Raises:
        UserError: If the launcher's variables contain more tasks than the one rank that MPI sees.
    """
    tasks = world_told()
    if comm.size > 1 or tasks == 1:
        return
    mine = ("Open MPI", "pmix") if is_open_mpi() else ("MPICH", "pmi2")
    if "Intel" in library_text():
        mine = ("Intel MPI", "pmi2")
    slurm = "SLURM_STEP_NUM_TASKS" in os.environ
    where = "a SLURM step" if slurm else "a launch"
    remedy = f"use srun --mpi={mine[1]}" if slurm else f"use the mpirun of {mine[0]}"
    raise UserError(f"a world of 1 rank in {where} of {tasks} tasks", f"a world of {tasks}", remedy)


# Tags of messages -------------------------------------------------------------------------------
#
# No two kinds of messages on one communicator have the same tag. MPI guarantees tags up to 32767
# (MPI-4.1, 9.1.2).

# Control messages, on their own communicator.
TAG_CONTROL = 1
TAG_GATHER = 2

# On `Cluster.comm`.
TAG_PARTIAL = 5  # a node's sum to an owner, in a round
TAG_RESULT = 6  # an owner's parameters back to a node
TAG_START = 7  # an owner's parameters and slots before the first round of low rank
TAG_PROBE = 8  # measures links at the start of a job
TAG_CLOCK = 9  # compares the hosts' clocks
TAG_PLAIN = 10  # a plain send, for comparison
TAG_WANTED = 11  # a worker's request for rows of a remote server
TAG_ROWS = 12  # these rows
TAG_ROW_SUMS = 13  # a worker's gradients of an owner's rows, in a round
TAG_APPLIED = 14  # pushes that a remote server has applied, if ranks may die
TAG_REPLICA = 15  # a node's replica, for a node that a death has stopped in a round
TAG_SHARD = 16  # see `tag_of`
TAG_ERA = 20000  # and up: sums and results of rounds if workers may die
TAG_NEVER = 32000  # tag of no message; a probe for it lets MPI progress

# On the communicator of the world.
TAG_SPEAKS = 31999

HEADERS, BODIES, REPLIES = range(3)  # kinds of messages of a shard: pushes, and replies to reads
SHARDS_MAX = 4096  # shards with tags of their own


def tag_of(server: int, what: int) -> int:
    """Return the tag of a shard's HEADERS, BODIES or REPLIES; any rank may serve the shard."""
    return TAG_SHARD + 3 * (server % SHARDS_MAX) + what
