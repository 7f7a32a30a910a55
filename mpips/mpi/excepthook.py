"""Uncaught exceptions: message, exit code and the end of the job.

A `UserError` is printed as one line and sets the exit code. An exception on one rank before a run
ends the job: the other ranks would wait for that rank in MPI_Init, or in the first collective calls
of the run. During a run `mpips.mpi.abort` ends the job.

Environment:
    PMI_FD: Socket to MPICH's launcher, for the request to end the job.
    SLURM_PROCID: Rank in a step of SLURM, if the launcher sets no other.

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

PMI_FD = "PMI_FD"  # names the socket between a rank and MPICH's launcher
STEP = "slurmstepd"  # name of the parent process of a task of srun
TURN_S, TURNS_S = 2.0, 4.0
HEARD_S, SPOKEN_S = 1.0, 0.3
RUNPY = "<frozen runpy>"  # file name in tracebacks of programs that a module of mpips runs
PACKAGE = str(Path(__file__).resolve().parent.parent)

_armed = False
_printed = False  # whether an exception was printed
_code = 2  # exit code, if other ranks wait for this one when its program has ended
_unheeded = ""  # warning to print at the end of the program


def arm() -> None:
    """Let an uncaught exception end the job, if this process is one of several ranks.

    In every process, a `UserError` is printed as one line and sets the exit code.
    """
    global _armed
    _armed, previous_hook = process.world_told() > 1, sys.excepthook
    if _armed:
        atexit.register(_leave)
    atexit.register(_warn)  # called before `_leave`

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _printed, _code
        heed()
        _printed, _code = True, error.code if isinstance(error, UserError) else 1
        if isinstance(error, UserError):
            _end_by(error, trace)
            return
        previous_hook(kind, error, of_others(trace))
        if _armed:
            _end_others(1)

    sys.excepthook = end


def disarm() -> None:
    """Let only a `UserError` end the job from now on: a run has begun."""
    global _armed
    _armed = False


def expect_code(warning: str) -> None:
    """Print a warning at the end of the program, unless it has read the run's exit code."""
    global _unheeded
    _unheeded = warning


def heed() -> None:
    """Cancel the warning: the program has read its exit code, or ends by an exception."""
    expect_code("")


def _warn() -> None:
    if _unheeded:
        complain(f"warning: {_unheeded}")


def located(error: UserError, trace: TracebackType | None) -> str:
    """Return an error's message after the line of the program that caused it: ``own.py:7: ...``."""
    frames = [frame for frame in _frames(trace) if _is_program(frame)]
    if not frames or not str(error):
        return str(error)
    return f"{Path(frames[-1].tb_frame.f_code.co_filename).name}:{frames[-1].tb_lineno}: {error}"


def of_others(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of mpips, if the program's own code raised."""
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
    """Return an exception with its traceback; see `of_others`."""
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
    """Return whether a frame belongs neither to mpips nor to a library."""
    import sysconfig

    file, paths = frame.tb_frame.f_code.co_filename, sysconfig.get_paths()
    libraries = tuple(f"{paths[name]}{os.sep}" for name in ("stdlib", "purelib", "platlib"))
    return not (_is_own(frame) or file.startswith(("<", *libraries)))


def _end_by(error: UserError, trace: TracebackType | None) -> None:
    """Print an error once, and end this process, and the job if other ranks may wait for it.

    Raises:
        SystemExit: With the error's exit code; not in an interactive interpreter.
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
    """Print an error that only this rank may know, and end the job; without a job, only print."""
    sys.stdout.flush()
    if _mpi_runs():
        from mpips.mpi import abort

        if abort.MPI.COMM_WORLD.size > 1:
            abort.abort(message, code)
    elif _armed:  # the first rank that prints ends the others
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
    """End the job if this rank's program ends before a run, and other ranks wait forever.

    If MPI is started, the other ranks detect this themselves
    (`mpips.mpi.collective_errors.await_ranks`). After an exception, Open MPI ends the job because
    of the exit code; srun may not.
    """
    ends = _printed and _parent() != STEP
    begun = "mpi4py.MPI" in sys.modules
    waiting = process.leave_run(may_wait=_armed and not begun and not ends and _is_rank())
    if waiting is None:
        return
    if not _printed:
        got = f"rank {_rank()} ended before the run began, and rank {waiting} waits for it"
        complain(UserError(got, "every rank", "begin the run on each of them"))
    if _is_rank_of_hydra():
        _end_others(_code)
    os._exit(_code)


def _is_rank() -> bool:
    """Return whether this process is a rank itself, and not the child of a rank."""
    if PMI_FD in os.environ:
        return _is_rank_of_hydra()
    return _parent().startswith(("prte", "orte", "mpirun", "mpiexec", STEP))


def _parent() -> str:
    """Return the name of the parent process; empty if it is outside of this container."""
    return next((name for _, name in process.ancestors(os.getpid())), "")


def _end_others(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    runs = _mpi_runs()
    if not (runs or _is_rank_of_hydra()):
        return
    time.sleep(SPOKEN_S)  # a launcher that is told to end the job may lose recent output
    if runs:
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
    else:
        # If a rank without MPI just ends, Hydra waits for the others. On this message it ends all
        # ranks at once.
        os.write(int(os.environ[PMI_FD]), f"cmd=abort exitcode={code}\n".encode())
        time.sleep(HEARD_S)
        if _parent() == STEP:  # srun --mpi=pmi2, which reports the exit code of each task
            os._exit(code)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # some versions ignore the message
        os.kill(os.getpid(), signal.SIGTERM)


def _is_rank_of_hydra() -> bool:
    """Return whether this process is a rank of MPICH's mpirun, and not the child of a rank."""
    try:
        return stat.S_ISSOCK(os.fstat(int(os.environ[PMI_FD])).st_mode)
    except (KeyError, ValueError, OSError):
        return False
