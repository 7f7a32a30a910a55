"""Uncaught exceptions: message, exit code and the end of the job.

A `UserError` is printed as one line and sets the exit code. An exception on one rank before a run
ends the job: the other ranks would wait for that rank in MPI_Init, or in the first collective calls
of the run. During a run `mpips.mpi.abort` ends the job.

Environment:
    PMI_FD: Socket to MPICH's launcher, which is told to end the job.
    SLURM_PROCID: Rank in a step of SLURM, where the launcher tells no other.

Messages:
    rank 3 ended before the run began, and rank 0 waits for it: The program of rank 3 has ended
        before ``mpips.run``. Have every rank of the communicator begin the run.
"""

import atexit
import os
import signal
import stat
import sys
import time
from pathlib import Path
from types import TracebackType

from mpips.errors import UserError, complain
from mpips.mpi import process

PMI_FD = "PMI_FD"  # by which MPICH's mpirun and its ranks talk
STEP = "slurmstepd"  # the parent of a task of srun
TURN_S, TURNS_S = 2.0, 4.0
HEARD_S, SPOKEN_S = 1.0, 0.3
RUNPY = "<frozen runpy>"  # by which a module of mpips runs a program
PACKAGE = str(Path(__file__).resolve().parent.parent)

_armed = False
_told = False  # whether an exception was printed
_code = 2  # of this rank, if others wait for it when its program has ended
_unheeded = ""


def arm() -> None:
    """Have an exception that nothing catches end the job, where this process is one of its ranks.

    A `UserError` is printed as one line and sets the exit code, also where this process is no rank.
    """
    global _armed
    _armed, told = process.world_told() > 1, sys.excepthook
    if _armed:
        atexit.register(_leave)
    atexit.register(_warn)  # called before `_leave`

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _told, _code
        heed()
        _told, _code = True, error.code if isinstance(error, UserError) else 1
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


def text_of(error: BaseException) -> str:
    """Return an exception with its traceback, see `of_others`."""
    import traceback

    trace = of_others(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _is_own(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith((f"{PACKAGE}{os.sep}", RUNPY))


def _is_program(frame: TracebackType) -> bool:
    """Return whether a frame is neither of mpips nor of a library."""
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
        from mpips.mpi import abort

        if abort.MPI.COMM_WORLD.size > 1:
            abort.abort(message, code)
    elif _armed:  # whoever speaks first ends the others
        time.sleep(min(TURN_S * _rank(), TURNS_S))
    complain(message)
    if _armed:
        _end_others(code)


def _rank() -> int:
    rank = process.rank_in(os.environ)
    return int(os.environ.get("SLURM_PROCID", 0)) if rank is None else rank


def _mpi_runs() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def _leave() -> None:
    """End the job if this rank's program ends before a run, and others wait for it for ever.

    Where MPI is started, they find that out by themselves
    (`mpips.mpi.collective_errors.await_ranks`). Behind an exception Open MPI ends the job because
    of the exit code; srun may not.
    """
    ends = _told and _parent() != STEP
    begun = "mpi4py.MPI" in sys.modules
    waiting = process.leave_run(may_wait=_armed and not begun and not ends and _is_rank())
    if waiting is None:
        return
    if not _told:
        got = f"rank {_rank()} ended before the run began, and rank {waiting} waits for it"
        complain(UserError(got, "every rank", "begin the run on each of them"))
    if _is_rank_of_hydra():
        _end_others(_code)
    os._exit(_code)


def _is_rank() -> bool:
    """Return whether this process is a rank itself, and not a child of one."""
    if PMI_FD in os.environ:
        return _is_rank_of_hydra()
    return _parent().startswith(("prte", "orte", "mpirun", "mpiexec", STEP))


def _parent() -> str:
    """Return the name of the parent's process; empty where it is outside of this container."""
    return next((name for _, name in process.ancestors(os.getpid())), "")


def _end_others(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    runs = _mpi_runs()
    if not (runs or _is_rank_of_hydra()):
        return
    time.sleep(SPOKEN_S)  # a launcher that is told to end all may lose what was just printed
    if runs:
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
    else:
        # Hydra waits for the others where a rank just ends that has not started MPI. On the word it
        # ends all at once.
        os.write(int(os.environ[PMI_FD]), f"cmd=abort exitcode={code}\n".encode())
        time.sleep(HEARD_S)
        if _parent() == STEP:  # srun --mpi=pmi2, which tells the exit code of each task
            os._exit(code)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a version that has not acted on the word
        os.kill(os.getpid(), signal.SIGTERM)


def _is_rank_of_hydra() -> bool:
    """Return whether this process is a rank of MPICH's mpirun itself, and not a child of one."""
    try:
        return stat.S_ISSOCK(os.fstat(int(os.environ[PMI_FD])).st_mode)
    except (KeyError, ValueError, OSError):
        return False
