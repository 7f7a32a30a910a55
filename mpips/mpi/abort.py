"""End of a job, and ranks whose death others survive.

Ranks survive by MPI's User Level Failure Mitigation (ULFM). Where the launcher has switched it on
(Open MPI: ``mpirun --with-ft ulfm``), MPI ends nobody when a rank dies. A call that needs the dead
rank raises an error, and so does one that listens to all, until the death is acknowledged; messages
between the others get on, but no collective of a communicator with a dead rank does. What a dead
rank had in the shared memory of its node stays there, as it was after its last store.

A loop says which ranks it can do without (`Failures.spare`). The death of one of those is a message
of kind ``lost`` from it, which `mpips.mpi.world.Cluster.poll` returns. That of any other raises
`Lost` on each rank that sees it, and the job ends.

Reference: Bland et al., IJHPCA 2013.

Environment:
    OMPI_MCA_mpi_ft_enable: Open MPI's launcher sets it for ``--with-ft ulfm``: ranks survive the
        death of others.

Messages:
    rank 3 raised ...: An error in the model or in mpips. The traceback below
        it says where.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpips.errors import Exit, Failure, UserError, complain
from mpips.mpi import excepthook, segments
from mpips.mpi.process import mappings
from mpips.mpi.start import MPI, TAG_SPEAKS, Comm, Request
from mpips.mpi.waiting import all_done

FT_ENABLE = "OMPI_MCA_mpi_ft_enable"  # which mpirun sets
STDERR = 2
LOOK_S = 0.01
TURN_S, TURNS_S = 0.1, 2.0
CROSSING_S, REVOKED_S, HEARD_S = 0.3, 0.3, 0.5
KILLED_S, SPOKEN_S, LAST_S = 5.0, 5.0, 1.0

T = TypeVar("T")
_watched: list[Comm] = []  # of the jobs of this process
_dead: set[int] = set()  # ranks of them


def ulfm_is_on() -> bool:
    """Return whether MPI lets ranks go on when others die."""
    return os.environ.get(FT_ENABLE, "") in ("1", "true")


def any_died() -> bool:
    """Return whether a rank has died, as far as this process knows."""
    return bool(_dead)


class Lost(Failure):
    """A rank has died that the job cannot do without; each rank that sees it raises it.

    The message is empty where another rank says it.
    """


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
        self.on = ulfm_is_on()
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

    def living(self, ranks: Iterable[int]) -> list[int]:
        """Return those that are not left out, in their order."""
        return [rank for rank in ranks if rank not in self.left_out]

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
        """Return whether all operations are complete, or need a dead rank; make them get on.

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
    return Lost.__new__(Lost, "")


def _failed(comm: Comm) -> list[int]:
    """Acknowledge the deaths of ranks of `comm`; returns all that have died."""
    comm.Ack_failed()
    dead, everyone = comm.Get_failed(), comm.Get_group()
    found = dead.Translate_ranks(None, everyone)
    dead.Free()
    everyone.Free()
    return list(found)


def is_death(error: BaseException) -> bool:
    """Return whether MPI has raised an error as a rank has died, or as one ends the job."""
    if not ulfm_is_on() or not isinstance(error, MPI.Exception):
        return False
    # Open MPI may say ERR_OTHER in place of the first; ERR_IN_STATUS is of several requests.
    known = (
        MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_OTHER,
        MPI.ERR_IN_STATUS,
    )  # fmt: skip
    return error.Get_error_class() in known


# The end of the job --------------------------------------------------------------------------


def code_of(error: BaseException) -> int:
    """Return the exit code of a rank that an error ends: KILLED if that is another one's death."""
    if is_death(error) or isinstance(error, Lost):
        return Exit.KILLED
    return error.code if isinstance(error, UserError) else Exit.FAILED


def raised(error: BaseException) -> str:
    """Return the message for an exception that nothing catches: with this rank and a traceback.

    That of a mistake is its own, with the line of the program that made it. It is empty where
    another rank says what has happened.
    """
    if isinstance(error, MPI.Exception) and is_death(error):
        revoked = error.Get_error_class() == MPI.ERR_REVOKED
        world = MPI.COMM_WORLD
        error = _said_by_another() if revoked else _lost(world, set(_failed(world)))
    if isinstance(error, Lost):
        return str(error)
    if isinstance(error, UserError):
        return excepthook.located(error, error.__traceback__)
    what = traceback.format_exception_only(error)[-1].strip()
    got = f"rank {MPI.COMM_WORLD.rank} raised {what}"
    remedy = f"its traceback says where:\n{excepthook.text_of(error)}"
    return str(UserError(got, "no exception", remedy))


def abort(message: str, code: int) -> NoReturn:
    """Print a message and end the whole job with `code`.

    Where several ranks fail at once one of them speaks: each waits for its turn, lower ranks
    first, and keeps still if another has told it that it speaks. The end comes a little after
    the message, because a launcher that is told to kill may not pass on what was printed.

    Collective: no. Blocks: for some seconds at most, or until the one who speaks ends the job.
    """
    if ulfm_is_on():
        _end_revoked(message, code)
    if _is_first():
        complain(message)
        time.sleep(HEARD_S)
    else:
        time.sleep(KILLED_S)
    segments.remove_noted()  # MPICH's Abort leaves them for ever
    end_all(code)


def _is_first() -> bool:
    """Wait for this rank's turn, and tell the others; returns whether it is for this rank to speak.

    Of those who tell each other at the same time, the lowest speaks.
    """
    comm = MPI.COMM_WORLD
    if _wait(min(TURN_S * comm.rank, TURNS_S), another_speaks):
        return False
    nothing = np.zeros(0, "u1")
    for rank in set(range(comm.size)) - {comm.rank}:
        comm.Isend(nothing, rank, TAG_SPEAKS)
    below = range(comm.rank)
    return not _wait(CROSSING_S, lambda: any(comm.Iprobe(rank, TAG_SPEAKS) for rank in below))


def another_speaks() -> bool:
    """Return whether another rank ends the job, and prints the last message."""
    if ulfm_is_on():  # then whoever speaks has revoked
        return _revoked()
    return MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, TAG_SPEAKS)


def _revoked() -> bool:
    """Return whether a rank ends the job, as far as this one has heard."""
    return any(comm.Is_revoked() for comm in _watched)


def _wait(seconds: float, heard: Callable[[], bool] = lambda: False) -> bool:
    """Let MPI get on for so long, or until `heard()`; returns whether it was heard."""
    end = time.monotonic() + seconds
    while not heard():
        if time.monotonic() >= end:
            return False
        with contextlib.suppress(MPI.Exception):  # the dead are listened to as well
            MPI.COMM_WORLD.Iprobe()
        time.sleep(LOOK_S)
    return True


def _end_revoked(message: str, code: int) -> NoReturn:
    """Print a message, if there is one, and end this process and with it the job, under ULFM.

    The others see that they are to end by communicators that are revoked, or where they do not look
    at those, by the death of this process. So ranks are killed, but for one: where all are killed,
    the launcher's exit code is 0. That is the one who speaks, if all others go, or else the lowest;
    who ends by an exit code has not died.

    What is said is the last that is printed: who says it revokes first and speaks a little later,
    and whoever has heard of that keeps still. Of several who have something to say the lowest
    speaks: each waits for its turn. Who has nothing to say waits to hear, or for the death of all
    below it: a further death would be told of as well.

    Blocks: for a second and its turn, or some seconds until another rank has spoken.
    """
    sys.stdout.flush()
    if message:
        heard = _wait(min(TURN_S * MPI.COMM_WORLD.rank, TURNS_S), _revoked)
    else:
        heard = _wait(SPOKEN_S, lambda: _revoked() or not _living_below()) and _revoked()
        message = "" if heard else str(_lost(MPI.COMM_WORLD, set(_failed(MPI.COMM_WORLD))))
    if not heard:
        for comm in _watched:
            with contextlib.suppress(MPI.Exception):  # it may be revoked already
                comm.Revoke()
    _wait(REVOKED_S)
    if message and not heard:
        complain(message)
    _wait(HEARD_S)  # for who has heard too: Open MPI's launcher may end with one rank left
    segments.remove_noted()
    if heard and not _living_below():
        os._exit(Exit.FAILED)
    if not heard and _wait(LAST_S, _is_last):
        os._exit(code)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is killed")


def _living_below() -> set[int]:
    """Return the ranks below this one that have not died, as far as it knows."""
    return set(range(MPI.COMM_WORLD.rank)) - set(_failed(MPI.COMM_WORLD))


def _is_last() -> bool:
    """Return whether all other ranks have died, as far as this one knows."""
    return len(_failed(MPI.COMM_WORLD)) == MPI.COMM_WORLD.size - 1


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


def leave(code: int) -> NoReturn:
    """End this process, whose job has come to its end without some ranks.

    MPI_Finalize may wait for the dead for ever.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    segments.remove_noted()
    os._exit(code)
