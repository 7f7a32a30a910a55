"""Start of MPI, the loaded library, and a check of its launcher.

MPI is started by importing this module, the only one that imports mpi4py.

What has to be set before MPI starts (yielding where ranks outnumber cores, which networks to leave
out) is set here first, if the user has not set it. The other modules of this room have `MPI` from
here.

Environment:
    PMI_RANK, PMI_SIZE, PMI_JOBID: Rank, ranks and job, as MPICH's launcher tells them.
    PMIX_RANK, PMIX_NAMESPACE: Rank and job, as a launcher with PMIx tells them.
    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE: Rank and ranks, as Open MPI's launcher tells them.
    MPI_LOCALNRANKS, OMPI_COMM_WORLD_LOCAL_SIZE, SLURM_NTASKS_PER_NODE: Ranks of this host, which
        share its cores.
    SLURM_STEP_NUM_TASKS: Ranks of a step of SLURM. A world of one rank with more is refused.
    OMPI_MCA_btl: Set to ``^ofi`` while MPI starts on a single host, unless it is set: Open MPI
        starts a second sooner.
    MPIR_CVAR_CH4_CMA_ENABLE: Set to 0 where each rank has a user namespace of its own, unless it is
        set: MPICH could not copy between them.
    UCX_POSIX_USE_PROC_LINK: Set to n there, unless it is set: UCX could not open the memory of
        other ranks through /proc.
    MPIR_CVAR_ENABLE_HEAVY_YIELD, OMPI_MCA_mpi_yield_when_idle, I_MPI_THREAD_YIELD: Set where ranks
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
COPIES = "MPIR_CVAR_CH4_CMA_ENABLE"  # whether MPICH copies from rank to rank by the kernel
LINKS = "UCX_POSIX_USE_PROC_LINK"  # whether UCX opens another rank's memory by its entry in /proc


def _copy_by_shared_memory() -> None:
    """Have MPICH copy as it may where a rank has a user namespace of its own, and say so once.

    Ranks of other namespaces may not read its memory: MPICH would die of that as it starts, or at
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
    """Start in a second less on one host, whose ranks need no network.

    Open MPI's BTL over libfabric sleeps 1 s when it is closed, as MPI_Init does where the BTL
    found nothing to use.
    """
    alone = "" if "PMIX_RANK" in os.environ else "1"  # srun, too, sets no size
    ranks = os.environ.get("OMPI_COMM_WORLD_SIZE", alone)
    one_host = ranks == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if not one_host or BTL in os.environ:
        yield
        return
    os.environ[BTL] = "^ofi"
    try:
        yield
    finally:
        del os.environ[BTL]  # an mpirun that this process starts may have more hosts


if local_ranks() > cores():
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
        UserError: In a process that is no rank, such as one that reads data for one.
    """
    if not MPI.Is_initialized():
        got = "a run that begins in a process that a rank has started, which imports its program"
        remedy = 'put the call behind if __name__ == "__main__":'
        raise UserError(got, "one that begins in ranks alone", remedy)
    return MPI.COMM_WORLD


def ranks_of(comm: Comm | None) -> Comm:
    """Return the communicator that a program gives, or that of all ranks.

    Raises:
        UserError: If it is none; as `whole_world`.
    """
    if comm is None:
        return whole_world()
    if not isinstance(comm, MPI.Intracomm):
        got = f"comm of type {type(comm).__name__}"
        raise UserError(got, "a communicator of mpi4py", "leave it out for all ranks")
    return comm


def share_cores(oversubscribed: bool) -> None:
    """Have this process waked and interrupted as suits its host.

    Where ranks outnumber cores, whoever has a core keeps it until it waits, though another rank of
    it wakes up: by policy SCHED_BATCH (sched(7)), unless somebody has chosen a policy. Where it may
    not be set, ranks interrupt each other, which costs time and nothing else. Elsewhere a sleep of
    20 us takes 25, not 75: Linux delays timers by up to 50 us unless told. MPICH's heavy yield
    lives on that slack.

    Args:
        oversubscribed: Whether ranks outnumber cores there.
    """
    if not oversubscribed:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)
    elif os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def library_text() -> str:
    """Return what the library says of itself, in several lines."""
    return MPI.Get_library_version().replace("\x00", "")


def mpi_name() -> str:
    """Return the MPI library and version in a few words."""
    words = library_text().split("\n")[0].replace("\t", " ")
    return " ".join(words.split(",")[0].split()[:4])


def is_open_mpi() -> bool:
    """Return whether the library that this process has loaded is Open MPI's, or one made from it.

    Whose `mpirun` is found is another question: see `mpips.launch.mpirun.is_open_mpi`.
    """
    return "Open MPI" in library_text()


def any_thread_may_call() -> bool:
    """Return whether MPI was started with MPI_THREAD_MULTIPLE."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def check_world(comm: Comm) -> None:
    """Refuse a world of one rank where the launcher started several.

    A wrong ``srun --mpi``, or the mpirun of another MPI, silently starts N worlds of one rank.

    Raises:
        UserError: If the launcher's variables tell of more tasks than the one rank that MPI sees.
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
# No two kinds of messages on one communicator have the same tag. MPI promises tags up to 32767
# (MPI-4.1, 9.1.2).

# Of control messages, which have a communicator of their own.
TAG_CONTROL = 1
TAG_GATHER = 2

# On `Cluster.comm`.
TAG_PARTIAL = 5  # a node's sum on its way to an owner, in a round
TAG_RESULT = 6  # an owner's parameters on their way back
TAG_START = 7  # an owner's parameters and slots before the first round of low rank
TAG_PROBE = 8  # measures links at the start of a job
TAG_CLOCK = 9  # compares the hosts' clocks
TAG_PLAIN = 10  # a plain send, to compare with
TAG_WANTED = 11  # which rows of a table a worker wants of a remote server
TAG_ROWS = 12  # these rows
TAG_ROW_SUMS = 13  # a worker's gradients of an owner's rows, in a round
TAG_APPLIED = 14  # which pushes a remote server has applied, where ranks may die
TAG_REPLICA = 15  # a node's replica, for a node that a death has kept in a round
TAG_SHARD = 16  # see `tag_of`
TAG_ERA = 20000  # and up: sums and results of rounds whose workers may die
TAG_NEVER = 32000  # of no message: looked for where MPI is to get on

# On the world's communicator, which is nobody's else.
TAG_SPEAKS = 31999

HEADERS, BODIES, REPLIES = range(3)  # of pushes to a shard, and of reads of it
SHARDS_MAX = 4096  # shards with tags of their own


def tag_of(server: int, what: int) -> int:
    """Return the tag of the HEADERS, BODIES or REPLIES of a server's shard, whoever serves it."""
    return TAG_SHARD + 3 * (server % SHARDS_MAX) + what
