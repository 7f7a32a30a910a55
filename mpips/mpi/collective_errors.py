"""Collective errors: every rank raises, and one message ends the job."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from mpips.errors import Exit, UserError, complain
from mpips.layout import Layout, check_alike
from mpips.mpi import abort, signals
from mpips.mpi.collectives import begin_barrier, broadcast, gather_all, world_ranks
from mpips.mpi.excepthook import text_of
from mpips.mpi.process import MEETS, Absent, named
from mpips.mpi.start import MPI, Comm
from mpips.mpi.waiting import Backoff, attend, take_turns

SAVING_S = 10.0  # time for other ranks to save when the job is asked to stop

T = TypeVar("T")


class CollectiveError(UserError):
    """An error that every rank raises, each with the same message."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


@contextlib.contextmanager
def told_once(comm: Comm) -> Iterator[None]:
    """Turn a `CollectiveError` of the block into a `UserError` that only rank 0 prints.

    If `comm` lacks ranks of the world, which may wait for this one, the `UserError` ends the job
    when nothing catches it.
    """
    try:
        yield
    except CollectiveError as agreed:
        error = UserError.__new__(UserError, str(agreed))  # with the complete message
        error.code = agreed.code
        if comm.size == MPI.COMM_WORLD.size:
            error.speaks = comm.rank == 0
        raise error from None


def await_ranks(comm: Comm, limit_s: float) -> None:
    """Wait for every rank before a run begins.

    The job ends if the program of a missing rank of this host has ended. It also ends if the
    missing ranks use no CPU time for `PATIENCE` times the limit. After a request to stop, it ends a
    little later: other ranks may be saving another run.

    Args:
        comm: The ranks.
        limit_s: Seconds after which a warning names the missing ranks; 0 for no warning.

    Collective: yes. Blocks: until all ranks have come, but never inside MPI.
    """
    barrier, backoff = begin_barrier(comm), Backoff(ranks_per_core=2)
    rank, *others = world_ranks(comm)
    absent, ends = Absent(rank, others, limit_s), math.inf
    with named(MEETS):
        while not barrier.Test():
            attend()
            got, never = absent.look()
            if (name := signals.received()) is not None:
                now = time.perf_counter()
                ends = min(ends, now + SAVING_S)
                if never or now >= ends or signals.again(now):
                    told = f"{name} before the run began, so there is nothing to save; run me again"
                    abort.abort(told, Exit.SAVED)
            elif got:
                error = UserError(got, "every rank", "begin the run on each, or give it comm=")
                if never:
                    abort.abort(str(error), error.code)
                complain(f"warning: {error}")
            backoff.pause()


def call_on_all(comm: Comm, error: Exception | None) -> None:
    """Raise the same error on every rank of `comm` if any rank has one. Collective: yes."""
    arrived = begin_barrier(comm).Test  # another rank may be reading a large file
    take_turns(attend, arrived, ranks_per_core=2)
    messages = [e for e in gather_all(comm, error and str(error)) if e]
    if messages:
        raise CollectiveError(messages[0])


def raise_on_all(comm: Comm, make: Callable[[], T]) -> T:
    """Call `make` on every rank and return its value; raise an error of any rank on all.

    The message contains the traceback of an error in the user's code. Collective: yes.
    """
    error: UserError | None = None
    try:
        value = make()
    except UserError as problem:
        error = problem
        if problem.__cause__ is not None:
            error = CollectiveError(f"{problem}\nrank {comm.rank}: {text_of(problem.__cause__)}")
    call_on_all(comm, error)
    return value


def layouts_alike(comm: Comm, layout: Layout) -> None:
    """Check that all ranks have the same parameters and tables. Collective: yes.

    Raises:
        CollectiveError: If they differ, on every rank.
    """
    layouts = gather_all(comm, layout)
    raise_on_all(comm, lambda: check_alike(layouts))


def on_root(comm: Comm, make: Callable[[], T]) -> T:
    """Call `make` on rank 0; return its value, or raise its error, on all. Collective: yes."""
    return broadcast(comm, raise_on_all(comm, lambda: make() if comm.rank == 0 else None))
