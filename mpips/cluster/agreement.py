"""Errors that every rank raises, so that a job ends with one message and nobody waits for ever."""

import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from mpips.cluster.collectives import begin_barrier, broadcast, gather_all
from mpips.cluster.start import Comm
from mpips.cluster.waiting import Backoff
from mpips.errors import UserError, complain
from mpips.layout import Layout, check_alike

T = TypeVar("T")


class Agreed(UserError):
    """An error that every rank raises, each with the same message."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


def tell_once(comm: Comm) -> None:
    """Have rank 0 alone tell of an `Agreed` that a program does not catch, and in one line."""
    before, first = sys.excepthook, comm.rank == 0
    if getattr(before, "tells_once", False):
        return

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Agreed):
            before(kind, error, trace)
        elif first:
            complain(error)

    tell.tells_once = True  # type: ignore[attr-defined]
    sys.excepthook = tell


def together(comm: Comm, error: Exception | None) -> None:
    """Raise the same `Agreed` on every rank of `comm` if any has an error. Collective: yes."""
    here, backoff = begin_barrier(comm), Backoff(ranks_per_core=2)
    while not here.Test():  # somebody may be reading a large file
        backoff.pause()
    found = [e for e in gather_all(comm, error and str(error)) if e]
    if found:
        raise Agreed(found[0])


def everywhere(comm: Comm, make: Callable[[], T]) -> T:
    """Call `make` on every rank; an error on any is raised on all. Collective: yes.

    The traceback of an error in the user's code goes with the message.
    """
    error: UserError | None = None
    try:
        value = make()
    except UserError as problem:
        error = problem
        if problem.__cause__ is not None:
            trace = "".join(traceback.format_exception(problem.__cause__))
            error = Agreed(f"{problem}\nrank {comm.rank}: {trace}".rstrip())
    together(comm, error)
    return value


def layouts_alike(comm: Comm, layout: Layout) -> None:
    """Check that all ranks have the same parameters and tables. Collective: yes."""
    layouts = gather_all(comm, layout)
    everywhere(comm, lambda: check_alike(layouts))


def on_root(comm: Comm, make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and share its value or its error. Collective: yes."""
    value: T | None = None
    error: UserError | None = None
    if comm.rank == 0:
        try:
            value = make()
        except UserError as problem:
            error = problem
    together(comm, error)
    shared: T = broadcast(comm, value)
    return shared
