"""Ranks that die while the others go on, by MPI's User Level Failure Mitigation (ULFM).

Where the launcher has switched it on (Open MPI: ``mpirun --with-ft ulfm``), MPI ends nobody when a
rank dies. A call that needs the dead rank raises an error, and so does one that listens to all,
until the death is acknowledged; messages between the others get on, but no collective of a
communicator with a dead rank does. What a dead rank had in the shared memory of its node stays
there, as it was after its last store.

A loop says which ranks it can do without (`Failures.spare`). The death of one of those is a message
of kind ``lost`` from it, which `mpips.mpi.world.Cluster.poll` returns. That of any other raises
`Lost` on each rank that sees it, and the job ends.

Reference: Bland et al., IJHPCA 2013.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from mpips.errors import UserError, complain
from mpips.mpi import segments
from mpips.mpi.start import MPI, Comm, Request
from mpips.mpi.waiting import all_done

FT_ENABLE = "OMPI_MCA_mpi_ft_enable"  # which mpirun sets
REVOKED_S = 0.3
HEARD_S = 0.5
SPOKEN_S = 5.0
DIED = 128 + signal.SIGKILL  # exit code of a rank that ends as another one has died

T = TypeVar("T")
_watched: list[Comm] = []  # of the jobs of this process
_dead: set[int] = set()  # ranks of them


def switched_on() -> bool:
    """Whether MPI lets ranks go on when others die."""
    return os.environ.get(FT_ENABLE, "") in ("1", "true")


def any_seen() -> bool:
    """Whether a rank has died, as far as this process knows."""
    return bool(_dead)


class Lost(UserError):
    """A rank has died that the job cannot do without; each rank that sees it raises it.

    The message is empty where another rank says it.
    """

    code = 1


class Failures:
    """The ranks of a job that have died. Collective: no. Blocks: no.

    Args:
        comms: Communicators of all ranks, in the same order, on which a rank listens to all.

    Attributes:
        on: Whether a job may go on without them.
        lost: Those that this rank knows of.
        survivable: Those that it goes on without if they die.
        left_out: Those without which the job comes to its end; a later death ends it at once.
    """

    def __init__(self, comms: Sequence[Comm]) -> None:
        self.on = switched_on()
        self._comms = list(comms)
        self._groups: list[frozenset[int]] = []
        self._news: list[int] = []
        self.lost: set[int] = set()
        self.survivable: frozenset[int] = frozenset()
        self.left_out: frozenset[int] = frozenset()
        if self.on:
            _watched.extend(self._comms)

    def spare(self, ranks: Iterable[int], groups: Iterable[Iterable[int]] = ()) -> None:
        """Go on without those of `ranks` that die from now on, but not without all of a group.

        Raises:
            Lost: If another has died before, or all of a group have.
        """
        self.survivable, self._groups = frozenset(ranks), [frozenset(group) for group in groups]
        self._check()

    def leave_out(self, ranks: Iterable[int]) -> None:
        """Come to the end without `ranks`, which the coordinator knows to have died.

        Raises:
            Lost: If another has died as well.
        """
        self.left_out = frozenset(ranks)
        self.lost |= self.left_out
        _dead.update(self.left_out)
        self.spare(self.left_out)

    def guard(self, call: Callable[..., T]) -> Callable[..., T | None]:
        """Return a function that calls `call`, and returns None where that needs a dead rank."""
        if not self.on:
            return call
        return lambda *args: self.attempt(call, *args)

    def attempt(self, call: Callable[..., T], *args: Any) -> T | None:
        """Call `call`; returns None where it needs, or listens to, a rank that has died.

        Raises:
            Lost: If that is one which the job cannot do without, or another rank ends the job.
        """
        try:
            return call(*args)
        except MPI.Exception as error:
            if not is_death(error):
                raise
            if error.Get_error_class() == MPI.ERR_REVOKED:
                raise _said_by_another() from error
            self._note()
            if not self.lost:
                raise
            return None

    def begin_send(
        self, begin: Callable[..., Request], what: Any, rank: int, tag: int
    ) -> Request | None:
        """Call ``begin(what, rank, tag)``; returns None where the rank has died.

        To one that is known to be dead nothing is sent: Open MPI 5.0 keeps the room that such a
        message takes for ever, and when there is no more of it, nothing leaves for anybody.
        """
        return None if rank in self.lost else self.attempt(begin, what, rank, tag)

    def done(self, requests: list[Request]) -> bool:
        """Whether all operations are complete, or need a rank that has died; makes them get on.

        Args:
            requests: Of them; where ranks may die, those that are over are taken out.
        """
        if not self.on:
            return all_done(requests)
        requests[:] = [r for r in requests if self.attempt(r.Test) is False]
        return not requests

    def news(self) -> list[tuple[int, str, Any]]:
        """Return a message of each rank that has died since the last call."""
        if not self._news:
            return []
        found, self._news = self._news, []
        return [(rank, "lost", None) for rank in found]

    def needed(self) -> Lost:
        """Return the error for ranks that have died, and that the job needs after all."""
        return _lost(self._comms[0], self.lost)

    def forget(self) -> None:
        """Watch the communicators no more: they are about to be freed."""
        for comm in self._comms:
            if comm in _watched:
                _watched.remove(comm)

    def _note(self) -> None:
        """Acknowledge all deaths, and note those that are new."""
        found: set[int] = set()
        for comm in self._comms:
            comm.Ack_failed()
            found.update(_failed(comm))
        self._news += sorted(found - self.lost)
        self.lost |= found
        _dead.update(found)
        self._check()

    def _check(self) -> None:
        if self.lost - self.survivable or any(group <= self.lost for group in self._groups):
            raise _lost(self._comms[0], self.lost)


def _lost(comm: Comm, dead: set[int]) -> Lost:
    """Return the error for ranks of `comm` that have died: the lowest of the others says it."""
    if comm.rank != min(set(range(comm.size)) - dead):
        return _said_by_another()
    names = ", ".join(map(str, sorted(dead)))
    got = f"rank {names} has died" if len(dead) == 1 else f"ranks {names} have died"
    return Lost(got, "all that this job needs", "it goes on by --resume")


def _said_by_another() -> Lost:
    error = Lost("", "")
    error.args = ("",)
    return error


def _failed(comm: Comm) -> list[int]:
    """Return the ranks of `comm` that have died."""
    dead, everyone = comm.Get_failed(), comm.Get_group()
    found = dead.Translate_ranks(None, everyone)
    dead.Free()
    everyone.Free()
    return list(found)


def is_death(error: BaseException) -> bool:
    """Whether MPI has raised an error because a rank has died, or because one ends the job."""
    if not switched_on() or not isinstance(error, MPI.Exception):
        return False
    # Open MPI may say ERR_OTHER in place of the first; ERR_IN_STATUS is of several requests.
    known = (
        MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_OTHER,
        MPI.ERR_IN_STATUS,
    )  # fmt: skip
    return error.Get_error_class() in known


def code_of(error: BaseException) -> int:
    """Return the exit code of a rank that an error ends: `DIED` if that is another one's death."""
    if is_death(error) or isinstance(error, Lost):
        return DIED
    return error.code if isinstance(error, UserError) else 1


def lost_by(error: BaseException) -> Lost:
    """Return what a death that MPI has told of comes to, on a rank that was not prepared for it."""
    if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_REVOKED:
        return _said_by_another()
    MPI.COMM_WORLD.Ack_failed()
    return _lost(MPI.COMM_WORLD, set(_failed(MPI.COMM_WORLD)))


def end_all(message: str) -> NoReturn:
    """Print a message, if there is one, and end this process and with it the job.

    MPI_Abort ends nobody here, and who ends by an exit code is waited for: this process is killed,
    when its communicators are revoked, by which the others see that they are to end. Who has
    nothing to say waits for that: a further death would be told of as well. What is said is the
    last that is printed: who says it revokes first and speaks a little later, and whoever has
    heard of that keeps still.

    Blocks: for half a second, or some seconds until another rank has spoken.
    """
    sys.stdout.flush()
    if message and not revoked():
        for comm in _watched:
            with contextlib.suppress(MPI.Exception):  # it may be revoked already
                comm.Revoke()
        _listen(REVOKED_S, lambda: False)
        complain(message)
    if message:
        _listen(HEARD_S, lambda: False)
    else:
        _listen(SPOKEN_S, revoked)
    segments.remove_noted()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is killed")


def revoked() -> bool:
    """Whether a rank ends the job, as far as this one has heard."""
    return any(comm.Is_revoked() for comm in _watched)


def _listen(seconds: float, heard: Callable[[], bool]) -> None:
    """Let MPI get on for so long, or until what is waited for has been heard."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not heard():
        with contextlib.suppress(MPI.Exception):  # the dead are listened to as well
            MPI.COMM_WORLD.Iprobe()
        time.sleep(HEARD_S / 100)


def leave(code: int) -> NoReturn:
    """End this process, whose job has come to its end without some ranks.

    MPI_Finalize may wait for the dead for ever.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    segments.remove_noted()
    os._exit(code)
