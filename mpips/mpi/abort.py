"""Abort: the end of a job in which one rank fails."""

import ctypes
import os
import time
import traceback
from collections.abc import Iterable
from typing import NoReturn

import numpy as np

from mpips.errors import UserError, complain
from mpips.mpi import excepthook, failures, segments
from mpips.mpi.process import mappings
from mpips.mpi.start import MPI
from mpips.mpi.tags import TAG_SPEAKS

STDERR = 2
TURN_S, TURNS_S = 0.1, 2.0
CROSSING_S = 0.3
HEARD_S = 0.5
KILLED_S = 5.0


def abort(message: str, code: int) -> NoReturn:
    """Print a message and end the whole job with `code`.

    Where several ranks fail at once one of them speaks: each waits for its turn, lower ranks
    first, and keeps still if another has told it that it speaks. The end comes a little after
    the message, because a launcher that is told to kill may not pass on what was printed.

    Collective: no. Blocks: for some seconds at most, or until the one who speaks ends the job.
    """
    if failures.switched_on():
        failures.end_all(message)
    if _is_first():
        complain(message)
        time.sleep(HEARD_S)
    else:
        time.sleep(KILLED_S)
    segments.remove_noted()  # MPICH's Abort leaves them for ever
    end_all(code)


def end_all(code: int) -> NoReturn:
    """Do what MPI_Abort does, silently and without running anything more in this process.

    MPICH's ends in `exit`, which takes down libraries that other threads of this rank (one that
    writes a checkpoint, one that is in MPI) still use: it may die by SIGSEGV there, and the job's
    code is 139.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc's; the last one is called first
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
    for library in {path for *_, path in mappings() if "/libpmix.so" in path}:
        # As Open MPI's MPI_Abort, but for a message.
        if ctypes.CDLL(library).PMIx_Abort(code, None, None, ctypes.c_size_t(0)) == 0:
            os._exit(code)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _is_first() -> bool:
    """Wait for this rank's turn, and tell the others; returns whether it is for this rank to speak.

    Of those who tell each other at the same time, the lowest speaks.
    """
    comm = MPI.COMM_WORLD
    if _heard(range(comm.size), min(TURN_S * comm.rank, TURNS_S)):
        return False
    nothing = np.zeros(0, "u1")
    for rank in set(range(comm.size)) - {comm.rank}:
        comm.Isend(nothing, rank, TAG_SPEAKS)
    return not _heard(range(comm.rank), CROSSING_S)


def _heard(ranks: Iterable[int], seconds: float) -> bool:
    """Wait until one of `ranks` has told that it speaks, but no longer than `seconds`."""
    ends = time.monotonic() + seconds
    while True:
        if any(MPI.COMM_WORLD.Iprobe(rank, TAG_SPEAKS) for rank in ranks):
            return True
        if time.monotonic() >= ends:
            return False
        time.sleep(TURN_S / 10)


def another_speaks() -> bool:
    """Whether another rank ends the job, and what it says is to be the last that is printed."""
    if failures.switched_on():  # then whoever speaks has revoked
        return failures.revoked()
    return MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, TAG_SPEAKS)


def raised(error: BaseException) -> str:
    """Return the message for an exception that nothing catches: with this rank and a traceback.

    That of a mistake is its own, with the line of the program that made it. It is empty where
    another rank says what has happened.
    """
    if isinstance(error, failures.Lost):
        return str(error)
    if failures.is_death(error):
        return str(failures.lost_by(error))
    if isinstance(error, UserError):
        return excepthook.located(error, error.__traceback__)
    trace = excepthook.of_others(error.__traceback__)
    lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    what = traceback.format_exception_only(error)[-1].strip()
    got = f"rank {MPI.COMM_WORLD.rank} raised {what}"
    return str(UserError(got, "no exception", f"its traceback says where:\n{lines}"))
