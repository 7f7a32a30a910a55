"""What becomes of a job in which a rank raises before it has begun a run: it ends.

The others would wait for that rank, in the collective calls with which a run begins, or in that
which starts MPI. Once a run has begun it says itself how a job ends (`mpips.cluster.ending`).
"""

import os
import signal
import stat
import sys
from types import TracebackType

SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
PMI_FD = "PMI_FD"  # by which MPICH's mpirun and its ranks talk

_armed = False


def arm() -> None:
    """Have an exception that nothing catches end the job, where this process is one of its ranks.

    It does nothing where it is none.
    """
    global _armed
    if _armed or not any(os.environ.get(name, "1") != "1" for name in SIZES):
        return
    _armed, told = True, sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told(kind, error, trace)
        if _armed:
            _end_others()

    sys.excepthook = end


def disarm() -> None:
    """Leave exceptions alone from now on: a run has begun."""
    global _armed
    _armed = False


def _end_others() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(1)
    elif _is_rank_of_hydra():
        # Who ends without a word to it, and has not started MPI, is waited for; not who is killed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _is_rank_of_hydra() -> bool:
    """Whether this process is a rank of MPICH's mpirun itself, and not a child of one."""
    try:
        return stat.S_ISSOCK(os.fstat(int(os.environ[PMI_FD])).st_mode)
    except (KeyError, ValueError, OSError):
        return False
