"""How a job ends when one rank fails on its own: one message, and every rank is gone."""

import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from mpips.errors import UserError

TAG_SPEAKS = 31999
SHARED_MEMORY = "/dev/shm/"
TURN_S, TURNS_S = 0.1, 2.0
HEARD_S = 0.5
KILLED_S = 5.0


def abort(message: str, code: int) -> NoReturn:
    """Print a message and end the whole job with `code`.

    Where several ranks fail at once one of them speaks: each waits for its turn, lower ranks
    first, and keeps still if another has told it that it speaks. MPI_Abort comes a little after
    the message, because a launcher that is told to kill may not pass on what was printed.

    Collective: no. Blocks: for `TURNS_S` at most, or until the one who speaks ends the job.
    """
    if _is_first():
        print(f"mpips: {message}", file=sys.stderr, flush=True)
        time.sleep(HEARD_S)
    else:
        time.sleep(KILLED_S)
    _unlink_shared_memory()
    MPI.COMM_WORLD.Abort(code)
    raise SystemExit(code)


def _unlink_shared_memory() -> None:
    """Unlink the shared memory that this rank has mapped: MPICH's Abort leaves it for ever.

    The ranks of the node have mapped it too, and keep it until they are gone.
    """
    with open("/proc/self/maps") as file:
        names = {line.split(maxsplit=5)[5].strip() for line in file if SHARED_MEMORY in line}
    for name in names:
        Path(name).unlink(missing_ok=True)


def _is_first() -> bool:
    """Wait for this rank's turn; returns whether nobody spoke, and then tells the others."""
    comm = MPI.COMM_WORLD
    turn = time.monotonic() + min(TURN_S * comm.rank, TURNS_S)
    while True:
        if comm.Iprobe(MPI.ANY_SOURCE, TAG_SPEAKS):
            return False
        if time.monotonic() >= turn:
            break
        time.sleep(TURN_S / 10)
    nothing = np.zeros(0, "u1")
    for rank in set(range(comm.size)) - {comm.rank}:
        comm.Isend(nothing, rank, TAG_SPEAKS)
    return True


def raised(error: BaseException) -> str:
    """Return the message for an exception that nobody expected, with this rank and a traceback."""
    lines = "".join(traceback.format_exception(error)).rstrip()
    what = traceback.format_exception_only(error)[-1].strip()
    got = f"rank {MPI.COMM_WORLD.rank} raised {what}"
    return str(UserError(got, "no exception", f"its traceback says where:\n{lines}"))
