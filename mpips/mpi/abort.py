"""End of a job, and deaths of ranks that it survives.

Ranks survive by MPI's User Level Failure Mitigation (ULFM), if the launcher has enabled it (Open
MPI: ``mpirun --with-ft ulfm``). Then MPI ends no other rank when a rank dies. A call that needs the
dead rank raises an error. So does a receive or a probe from any source, until this rank has
acknowledged the death. Messages between living ranks still arrive. Collectives of a communicator
with a dead rank do not work. A dead rank's part of the node's shared memory stays as it was after
its last store.

A loop names the ranks that it can go on without (`Failures.spare`). If one of these dies,
`mpips.mpi.world.Cluster.poll` returns a message of kind ``lost`` from it. If another rank dies,
each rank that detects the death raises `Lost`, and the job ends.

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

FT_ENABLE = "OMPI_MCA_mpi_ft_enable"  # set by mpirun
STDERR = 2
LOOK_S = 0.01
TURN_S, TURNS_S = 0.1, 2.0
CROSSING_S, REVOKED_S, HEARD_S = 0.3, 0.3, 0.5
KILLED_S, SPOKEN_S, LAST_S = 5.0, 5.0, 1.0

T = TypeVar("T")
_watched: list[Comm] = []  # communicators of this process's jobs
_dead: set[int] = set()  # dead ranks of these jobs


def ulfm_is_on() -> bool:
    """Return whether ULFM is enabled: ranks can go on when others die."""
    return os.environ.get(FT_ENABLE, "") in ("1", "true")


def any_died() -> bool:
    """Return whether this process knows of a dead rank."""
    return bool(_dead)


class Lost(Failure):
    """The death of a rank that the job needs; the message is empty if another rank prints it."""


class Failures:
    """Dead ranks of a job, and the ranks that it can go on without. Collective: no. Blocks: no.

    Args:
        comms: Communicators with the same ranks in the same order, on which a rank receives from
            any source.

    Attributes:
        on: Whether ULFM is enabled.
        lost: Ranks known to be dead.
        survivable: Ranks whose death the job survives.
        left_out: Dead ranks without which the job ends normally. Any further death then ends it at
            once.
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
        """Survive deaths of `ranks` from now on, unless all ranks of one of the groups are dead.

        Raises:
            Lost: If another rank is dead already, or all ranks of a group.
        """
        self.survivable, self._groups = frozenset(ranks), [frozenset(group) for group in groups]
        self._check()

    def leave_out(self, ranks: Iterable[int]) -> None:
        """End the job normally without `ranks`, which the coordinator knows to be dead.

        Raises:
            Lost: If another rank is dead, too.
        """
        self.left_out = frozenset(ranks)
        self.lost |= self.left_out
        _dead.update(self.left_out)
        self.spare(self.left_out)

    def living(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that are not left out, in the same order."""
        return [rank for rank in ranks if rank not in self.left_out]

    def guard(self, call: Callable[..., T]) -> Callable[..., T | None]:
        """Return a function that calls `call`, and returns None if a death prevents the call."""
        if not self.on:
            return call
        return lambda *args: self.attempt(call, *args)

    def attempt(self, call: Callable[..., T], *args: Any) -> T | None:
        """Call `call`; return None if the call needs a dead rank, or receives from any source.

        Raises:
            Lost: If the job needs the dead rank, or another rank ends the job.
        """
        try:
            return call(*args)
        except MPI.Exception as error:
            if not is_death(error):
                raise
            if error.Get_error_class() == MPI.ERR_REVOKED:
                raise _silent_error() from error
            self._note()
            if not self.lost:
                raise
            return None

    def begin_send(
        self, begin: Callable[..., Request], what: Any, rank: int, tag: int
    ) -> Request | None:
        """Call ``begin(what, rank, tag)``; return None if the rank is dead.

        Nothing is sent to a rank that is known to be dead. Open MPI 5.0 never releases the buffer
        of such a message. When its buffers are used up, it sends nothing to any rank.
        """
        return None if rank in self.lost else self.attempt(begin, what, rank, tag)

    def done(self, requests: list[Request]) -> bool:
        """Advance operations, and return whether each one is complete or has failed by a death.

        Args:
            requests: The operations. If ULFM is enabled, those that are over are removed from the
                list.
        """
        if not self.on:
            return all_done(requests)
        requests[:] = [r for r in requests if self.attempt(r.Test) is False]
        return not requests

    def news(self) -> list[tuple[int, str, Any]]:
        """Return a message ``lost`` from each rank whose death was detected since the last call."""
        if not self._news:
            return []
        found, self._news = self._news, []
        return [(rank, "lost", None) for rank in found]

    def needed(self) -> Lost:
        """Return the error for dead ranks that the job needs after all."""
        return _deaths_error(self._comms[0], self.lost)

    def forget(self) -> None:
        """Stop watching the communicators, before they are freed."""
        for comm in self._comms:
            if comm in _watched:
                _watched.remove(comm)

    def _note(self) -> None:
        """Acknowledge all deaths, and note the new ones."""
        dead: set[int] = set()
        for comm in self._comms:
            dead.update(_failed(comm))
        self._news += sorted(dead - self.lost)
        self.lost |= dead
        _dead.update(dead)
        self._check()

    def _check(self) -> None:
        if self.lost - self.survivable or any(group <= self.lost for group in self._groups):
            raise _deaths_error(self._comms[0], self.lost)


def _deaths_error(comm: Comm, dead: set[int]) -> Lost:
    """Return the error for dead ranks of `comm`; only the lowest living rank gets the message."""
    if comm.rank != min(set(range(comm.size)) - dead):
        return _silent_error()
    names = ", ".join(map(str, sorted(dead)))
    got = f"rank {names} has died" if len(dead) == 1 else f"ranks {names} have died"
    return Lost(got, "all that this job needs", "it goes on by --resume")


def _silent_error() -> Lost:
    return Lost.__new__(Lost, "")


def _failed(comm: Comm) -> list[int]:
    """Acknowledge the deaths of ranks of `comm`, and return all its dead ranks."""
    comm.Ack_failed()
    dead, everyone = comm.Get_failed(), comm.Get_group()
    ranks = dead.Translate_ranks(None, everyone)
    dead.Free()
    everyone.Free()
    return list(ranks)


def is_death(error: BaseException) -> bool:
    """Return whether MPI raised an error because a rank died, or because a rank ends the job."""
    if not ulfm_is_on() or not isinstance(error, MPI.Exception):
        return False
    # Open MPI may raise ERR_OTHER for PROC_FAILED; ERR_IN_STATUS comes from Testall.
    known = (
        MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_OTHER,
        MPI.ERR_IN_STATUS,
    )  # fmt: skip
    return error.Get_error_class() in known


# The end of the job --------------------------------------------------------------------------


def code_of(error: BaseException) -> int:
    """Return the exit code of a rank that an error ends: KILLED for the death of another rank."""
    if is_death(error) or isinstance(error, Lost):
        return Exit.KILLED
    return error.code if isinstance(error, UserError) else Exit.FAILED


def raised(error: BaseException) -> str:
    """Return the message for an uncaught exception: with this rank's number and a traceback.

    A `UserError` keeps its own message, after the line of the program that caused it. The message
    is empty if another rank prints it.
    """
    if isinstance(error, MPI.Exception) and is_death(error):
        revoked = error.Get_error_class() == MPI.ERR_REVOKED
        world = MPI.COMM_WORLD
        error = _silent_error() if revoked else _deaths_error(world, set(_failed(world)))
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

    If several ranks fail at once, only one prints. Each rank waits for its turn, lower ranks first.
    It prints nothing if another rank has announced that it prints. The job ends a little after the
    message: a launcher that is told to kill may lose recent output.

    Collective: no. Blocks: for some seconds at most, or until another rank ends the job.
    """
    if ulfm_is_on():
        _end_revoked(message, code)
    if _may_print():
        complain(message)
        time.sleep(HEARD_S)
    else:
        time.sleep(KILLED_S)
    segments.remove_noted()  # MPICH's Abort leaves them for ever
    end_all(code)


def _may_print() -> bool:
    """Wait for this rank's turn, announce that it prints, and return whether it may.

    If several ranks announce themselves at the same time, the lowest one prints.
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
    if ulfm_is_on():  # the rank that prints revokes the communicators
        return _revoked()
    return MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, TAG_SPEAKS)


def _revoked() -> bool:
    """Return whether this rank knows that another one ends the job."""
    return any(comm.Is_revoked() for comm in _watched)


def _wait(seconds: float, heard: Callable[[], bool] = lambda: False) -> bool:
    """Let MPI progress for `seconds`, or until `heard()`; return whether `heard()` was true."""
    end = time.monotonic() + seconds
    while not heard():
        if time.monotonic() >= end:
            return False
        with contextlib.suppress(MPI.Exception):  # the probe fails if a rank is dead
            MPI.COMM_WORLD.Iprobe()
        time.sleep(LOOK_S)
    return True


def _end_revoked(message: str, code: int) -> NoReturn:
    """Print a message, if there is one, and end this process and with it the job, under ULFM.

    A rank ends the job by revoking the communicators. The other ranks see that, or the death of
    this process. All ranks but one are killed by a signal; if all were, the launcher's exit code
    would be 0. The exception is the rank that prints, if all others die within a second, or else
    the lowest rank. A process that ends with an exit code does not count as dead.

    The message must be the last output. So the rank that prints revokes first and prints a little
    later, and a rank that has seen this prints nothing. If several ranks have a message, the lowest
    one prints, since each waits for its turn. A rank without a message waits until another rank
    prints, or until all lower ranks are dead. It then prints about the deaths.

    Blocks: for a second and the rank's turn, or for some seconds until another rank has printed.
    """
    sys.stdout.flush()
    world = MPI.COMM_WORLD
    if message:
        heard = _wait(min(TURN_S * world.rank, TURNS_S), _revoked)
    else:
        heard = _wait(SPOKEN_S, lambda: _revoked() or not _living_below()) and _revoked()
        message = "" if heard else str(_deaths_error(world, set(_failed(world))))
    if not heard:
        for comm in _watched:
            with contextlib.suppress(MPI.Exception):  # it may be revoked already
                comm.Revoke()
    _wait(REVOKED_S)
    if message and not heard:
        complain(message)
    _wait(HEARD_S)  # all ranks wait: Open MPI's launcher may end when only one rank is left
    segments.remove_noted()
    if heard and not _living_below():
        os._exit(Exit.FAILED)
    if not heard and _wait(LAST_S, lambda: len(_failed(world)) == world.size - 1):
        os._exit(code)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is killed")


def _living_below() -> set[int]:
    """Return the lower ranks that are not known to be dead."""
    return set(range(MPI.COMM_WORLD.rank)) - set(_failed(MPI.COMM_WORLD))


def end_all(code: int) -> NoReturn:
    """End the job as MPI_Abort does, but silently, and run no more code in this process.

    MPICH's MPI_Abort calls `exit`, which unloads libraries. Other threads of this rank may still
    use them, such as one that writes a checkpoint or one in MPI. The rank would die by SIGSEGV, and
    the job's exit code would be 139.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # only glibc has it; it calls the newest function first
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
    for library in {path for *_, path in mappings() if "/libpmix.so" in path}:
        # Open MPI's MPI_Abort does the same and prints a message.
        if ctypes.CDLL(library).PMIx_Abort(code, None, None, ctypes.c_size_t(0)) == 0:
            os._exit(code)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def leave(code: int) -> NoReturn:
    """End this process without MPI_Finalize, at the end of a job that has left out dead ranks.

    MPI_Finalize may wait forever for the dead ranks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    segments.remove_noted()
    os._exit(code)
