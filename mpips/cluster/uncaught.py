"""Exceptions that nothing catches: what is printed, the exit code, and the end of the job.

A mistake of the user's is one line, and its exit code is the trainer's. The other ranks would wait
for one that raises, in the collective calls with which a run begins, or in that which starts MPI:
the job ends. Once a run has begun it says itself how a job ends (`mpips.cluster.ending`).
"""

import atexit
import os
import signal
import stat
import sys
import time
from pathlib import Path
from types import TracebackType

from mpips.cluster import absent, process
from mpips.errors import UserError, complain

SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
PMI_FD = "PMI_FD"  # by which MPICH's mpirun and its ranks talk
TURN_S, TURNS_S = 2.0, 4.0
HEARD_S = 1.0
PACKAGE = str(Path(__file__).resolve().parent.parent)

_armed = False
_unheeded = ""


def arm() -> None:
    """Have an exception that nothing catches end the job, where this process is one of its ranks.

    A `UserError` is printed as one line, and its exit code is that of the process, in any process.
    """
    global _armed
    _armed, told = any(os.environ.get(name, "1") != "1" for name in SIZES), sys.excepthook
    if _armed:
        atexit.register(_leave)
    atexit.register(_warn)  # before

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        heed()
        if isinstance(error, UserError):
            _end_by(error, trace)
            return
        told(kind, error, of_others(trace))
        if _armed:
            _end_others(1)

    sys.excepthook = end


def disarm() -> None:
    """Leave exceptions that are no mistakes alone from now on: a run has begun."""
    global _armed
    _armed = False


def expect_code(warning: str) -> None:
    """Print a warning at the end of the program, unless it looks at the run's exit code before."""
    global _unheeded
    _unheeded = warning


def heed() -> None:
    """Do not warn: the program looks at the exit code of its last run, or ends by an exception."""
    expect_code("")


def _warn() -> None:
    if _unheeded:
        complain(f"warning: {_unheeded}")


def located(error: UserError, trace: TracebackType | None) -> str:
    """Return a mistake's message behind the line of the program that made it: ``own.py:7: ...``."""
    frames = [frame for frame in _frames(trace) if _is_program(frame)]
    if not frames or not str(error):
        return str(error)
    return f"{Path(frames[-1].tb_frame.f_code.co_filename).name}:{frames[-1].tb_lineno}: {error}"


def of_others(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of mpips, where the program raised in its own code."""
    frames = _frames(trace)
    own = [_is_own(frame) for frame in frames]
    if not any(map(_is_program, frames[len(own) - own[::-1].index(True) :] if any(own) else ())):
        return trace
    found = None
    for frame, ours in reversed(list(zip(frames, own, strict=True))):
        if not ours:
            found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _is_own(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}")


def _is_program(frame: TracebackType) -> bool:
    """Whether a frame is neither of mpips nor of a library."""
    import sysconfig

    file, paths = frame.tb_frame.f_code.co_filename, sysconfig.get_paths()
    libraries = tuple(f"{paths[name]}{os.sep}" for name in ("stdlib", "purelib", "platlib"))
    return not (_is_own(frame) or file.startswith(("<", *libraries)))


def _end_by(error: UserError, trace: TracebackType | None) -> None:
    """Print a mistake once, and end this process, and the job where others may wait for it.

    Raises:
        SystemExit: With the mistake's exit code; not where somebody types statements.
    """
    message = located(error, trace)
    if hasattr(sys, "ps1"):
        complain(message)
        return
    if error.speaks is None:
        _end_alone(message, error.code)
    elif error.speaks:
        complain(message)
    raise SystemExit(error.code)


def _end_alone(message: str, code: int) -> None:
    """Print what this rank alone may know, and end the job; do no more than print without one."""
    sys.stdout.flush()
    if _mpi_runs():
        from mpips.cluster import ending

        if ending.MPI.COMM_WORLD.size > 1:
            ending.abort(message, code)
    elif _armed:  # whoever speaks first ends the others
        time.sleep(min(TURN_S * _rank(), TURNS_S))
    complain(message)
    if _armed:
        _end_others(code)


def _rank() -> int:
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)


def _mpi_runs() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def _leave() -> None:
    """End the job if this rank's program ends before a run, and others wait for it for ever.

    Where MPI is started, they find that out by themselves (`mpips.cluster.agreement.await_ranks`).
    """
    mpi = sys.modules.get("mpi4py.MPI")
    waiting = absent.leave(may_wait=_armed and mpi is None and _is_rank())
    if waiting is None:
        return
    got = f"rank {_rank()} ended before the run began, and rank {waiting} waits for it"
    complain(UserError(got, "every rank", "begin the run on each of them"))
    if _is_rank_of_hydra():
        _end_others(2)
    os._exit(2)


def _is_rank() -> bool:
    """Whether this process is a rank itself, and not a child of one."""
    if PMI_FD in os.environ:
        return _is_rank_of_hydra()
    try:
        name = process.stat_of(os.getppid())[process.NAME]
    except OSError:  # a parent outside of this container
        return False
    return name.startswith(("prte", "orte", "mpirun", "mpiexec", "slurmstepd"))


def _end_others(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if _mpi_runs():
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
    elif _is_rank_of_hydra():
        # Who ends without a word to it, and has not started MPI, is waited for.
        os.write(int(os.environ[PMI_FD]), f"cmd=abort exitcode={code}\n".encode())
        time.sleep(HEARD_S)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not heard: nor is who is killed waited for
        os.kill(os.getpid(), signal.SIGTERM)


def _is_rank_of_hydra() -> bool:
    """Whether this process is a rank of MPICH's mpirun itself, and not a child of one."""
    try:
        return stat.S_ISSOCK(os.fstat(int(os.environ[PMI_FD])).st_mode)
    except (KeyError, ValueError, OSError):
        return False
