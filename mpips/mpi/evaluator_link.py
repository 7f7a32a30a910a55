"""Link between the ranks that train and the ranks that evaluate.

The last ranks of the world evaluate. Each side has its own communicator, so training runs as if its
ranks were the whole world, with the same numbers. The link carries the messages between the sides,
and the errors that both raise.

The coordinator gives up evaluators that hang, or that die if ULFM is enabled; training continues
without them. At the end the coordinator tells all ranks which ones are missing (`Link.part`). Then
no collective over both sides works, and neither does MPI_Finalize: the processes end without it.
"""

import atexit
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from mpips.errors import complain
from mpips.health.hang_report import Deadline
from mpips.layout.roles import training
from mpips.mpi import abort
from mpips.mpi.abort import Failures
from mpips.mpi.collective_errors import CollectiveError, call_on_all, raise_on_all
from mpips.mpi.collectives import Mailbox, begin_barrier, gather_all
from mpips.mpi.process import send_signal
from mpips.mpi.start import Comm
from mpips.mpi.waiting import take_turns

POLL_S = 1e-3
HEARD_S, LEAVING_S = 0.5, 5.0

T = TypeVar("T")


class Link:
    """Messages and errors between the two sides of a job. Collective: construction and `free`.

    Args:
        comm: All ranks.
        evaluators: Number of evaluators, which are the last ranks.

    Attributes:
        everyone: Communicator of all ranks.
        side: Communicator of this rank's side.
        evaluators: Ranks that evaluate, increasing.
        evaluates: Whether this rank evaluates.
        coordinator: Rank of the coordinator, once the ranks have their roles.
        given_up: Evaluators that the job continues without.
        missing: Ranks without which the job has ended, on both sides; known after `part`.
        overdue: On the coordinator, detects evaluators that hang.

    Raises:
        CollectiveError: If no rank would be left to train, on every rank.
    """

    def __init__(self, comm: Comm, evaluators: int) -> None:
        first = raise_on_all(comm, lambda: training(comm.size, evaluators))
        self.everyone, self.evaluators = comm, tuple(range(first, comm.size))
        self.evaluates = comm.rank >= first
        self.side: Comm = comm.Split(int(self.evaluates), key=comm.rank)  # type: ignore[assignment]
        self._control = comm.Dup()
        self._failures = Failures([self._control])
        self.spare(())
        self._mailbox = Mailbox(self._control, self._failures)
        self._polled_s = 0.0
        self.overdue = Deadline((), 0.0)
        self.coordinator = 0
        self.given_up: set[int] = set()
        self.missing: set[int] = set()

    @property
    def survivable(self) -> tuple[int, ...]:
        """Evaluators whose death the job survives: all of them if ULFM is enabled."""
        return self.evaluators if self._failures.on else ()

    def spare(self, ranks: Iterable[int]) -> None:
        """Let the job survive the deaths of `ranks`, which train, and of evaluators.

        Raises:
            Lost: If another rank is dead already.
        """
        self._failures.spare((*self.survivable, *ranks))

    @property
    def living(self) -> tuple[int, ...]:
        """Evaluators that are not given up."""
        return tuple(rank for rank in self.evaluators if rank not in self.given_up)

    def give_up(self, rank: int) -> None:
        """Go on without an evaluator. On the coordinator only.

        If ULFM is enabled, an evaluator of this host is killed: its launcher would wait for it.
        Without ULFM it is left alone until the job ends, since its death would end the job.
        """
        self.given_up.add(rank)
        one = self.overdue.record(rank)
        if self._failures.on and one is not None:
            send_signal(one.pid)

    def agreed(self, make: Callable[[], T]) -> T:
        """Call `make` on every rank; raise a `CollectiveError` of one side on both sides.

        Collective: yes; both sides call it equally often. `make` may differ.
        """
        error: CollectiveError | None = None
        try:
            value = make()
        except CollectiveError as problem:
            error = problem
        try:
            call_on_all(self.everyone, error)
        except CollectiveError as shared:
            codes = gather_all(self.everyone, None if error is None else error.code)
            shared.code = next(code for code in codes if code is not None)
            raise
        return value

    def send(self, dest: int, kind: str, payload: Any = None) -> None:
        """Send a message to a rank of either side. Blocks: no."""
        if dest not in self.given_up:
            self._mailbox.send(dest, kind, payload)

    def poll(self) -> list[tuple[int, str, Any]]:
        """Return the messages that have come, as (source, kind, payload).

        It checks at most once a millisecond. An evaluator that has died sends ``lost``, if the job
        survives its death.

        Raises:
            Lost: If another rank has died.

        Blocks: no.
        """
        now = time.perf_counter()
        if now - self._polled_s < POLL_S:
            return []
        self._polled_s = now
        return self._mailbox.poll() + self._failures.news()

    def share(self, value: T) -> T:
        """Return the coordinator's value on evaluators, and each rank's own value on the others.

        Collective: yes. Blocks: on evaluators.
        """
        if not self.evaluates:
            for rank in self.living if self.everyone.rank == self.coordinator else ():
                self._mailbox.bring(rank, value)
            return value
        while not (values := self._mailbox.brought_by(self.coordinator)):
            time.sleep(POLL_S)
        return values[0]

    def part(self, code: int, lost: Iterable[int] = ()) -> None:
        """Meet at the end of the job, without the missing ranks, and tell all ranks who is missing.

        If a rank is missing, this process ends without MPI_Finalize.

        Args:
            code: Exit code of the job.
            lost: Dead ranks of the side that trains, as far as the coordinator knows.

        Collective: yes, after `share`. Blocks: until all living ranks have come.
        """
        if self._failures.on:
            self._failures.spare(range(self.everyone.size))  # ranks may leave before this one
        self.overdue.expect()
        if self.everyone.rank == self.coordinator:
            self._await_all("here")
            self.missing.update(self.given_up, self._failures.lost, lost)
            for rank in range(self.everyone.size):
                self.send(rank, "missing", sorted(self.missing))
            if self.missing and self._failures.on:
                self._await_all("known", LEAVING_S)
        else:
            self.send(self.coordinator, "here")
            self.missing.update(self._await_missing())
            self.send(self.coordinator, "known")
        if self.missing and self._failures.on:
            self._failures.leave_out(self.missing)
        elif self.missing:
            atexit.register(self._end_all, code)

    def _await_all(self, what: str, limit_s: float = math.inf) -> None:
        """Wait for a message `what` of every rank that is neither dead nor given up.

        On the coordinator only.
        """
        end = time.perf_counter() + limit_s
        awaited = set(range(self.everyone.size)) - {self.coordinator}
        while time.perf_counter() < end:
            awaited -= {source for source, kind, _ in self.poll() if kind == what}
            living = [rank for rank in self.living if rank in awaited]
            for rank, why in self.overdue.look(living, time.perf_counter()).items():
                complain(f"warning: rank {rank} {why}: the job ends without it")
                self.give_up(rank)
            self.given_up.update(self._failures.lost.intersection(self.evaluators))
            awaited -= self.given_up | self._failures.lost
            if not awaited:
                return
            time.sleep(POLL_S)

    def _await_missing(self) -> list[int]:
        """Wait for the coordinator's list of missing ranks, and return it.

        Raises:
            Lost: If the coordinator has died.
        """
        end = math.inf
        while time.perf_counter() < end:
            for _, kind, payload in self.poll():
                if kind == "missing":
                    return payload
            if self.coordinator in self._failures.lost:
                end = min(end, time.perf_counter() + HEARD_S)  # for its last messages
            time.sleep(POLL_S)
        raise self._failures.needed()

    def _end_all(self, code: int) -> None:
        """End the job with `code` once all living ranks are here. Missing ranks may wait in MPI."""
        sys.stdout.flush()
        if self.everyone.rank != self.coordinator:
            self.send(self.coordinator, "left")
            return
        self.overdue.close()
        self.overdue = Deadline((), 0.0)  # after the run, a program may take any time
        self._await_all("left")
        time.sleep(HEARD_S)
        abort.end_all(code)

    def free(self) -> None:
        """Free the communicators, and drop messages that were not received.

        If ranks are missing, nothing is freed.

        Collective: yes. Blocks: until all ranks have come.
        """
        if self.missing:
            return
        self.overdue.close()
        take_turns(self._mailbox.poll, self._mailbox.empty, ranks_per_core=2)
        take_turns(self._mailbox.poll, begin_barrier(self._control).Test, ranks_per_core=2)
        self._failures.forget()
        self._control.Free()
        self.side.Free()


def agreed(link: Link | None, make: Callable[[], T]) -> T:
    """Call `make`; with a link, as `Link.agreed`."""
    return make() if link is None else link.agreed(make)
