"""Link between the ranks that train and the ranks that evaluate.

The last ranks of the world evaluate. Each side has a communicator of its own, so that training
goes on as if its ranks were the whole world, with the same numbers; here are the messages between
the two, and the errors that both raise.

Training goes on without evaluators that the coordinator gives up: they get no further, or have died
where MPI lets the others go on. At the end the coordinator tells who is missing (`Link.part`). Then
nothing collective works that takes both sides, neither does MPI_Finalize: the processes end without
it.
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

POLL_S = 1e-3
HEARD_S, LEAVING_S = 0.5, 5.0

T = TypeVar("T")


class Link:
    """What joins the two sides of a job. Collective: yes, construction and `free`.

    Args:
        comm: All ranks.
        evaluators: How many of the last ones evaluate.

    Attributes:
        everyone: All ranks.
        side: Those of this rank's side.
        evaluators: The ranks that evaluate, increasing.
        evaluates: Whether this is one of them.
        coordinator: The rank that the evaluators work for, once the ranks have their roles.
        given_up: Evaluators that the job goes on without.
        missing: Ranks without which it has come to its end, evaluators or not, known behind `part`.
        overdue: By which the coordinator judges evaluators that it waits for.

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
        """Evaluators whose death does not end the job: all, where MPI lets it go on."""
        return self.evaluators if self._failures.on else ()

    def spare(self, ranks: Iterable[int]) -> None:
        """Go on without those of `ranks` that die from now on, which train, and evaluators.

        Raises:
            Lost: If another has died before.
        """
        self._failures.spare((*self.survivable, *ranks))

    @property
    def living(self) -> tuple[int, ...]:
        """The evaluators that are not given up."""
        return tuple(rank for rank in self.evaluators if rank not in self.given_up)

    def give_up(self, rank: int) -> None:
        """Go on without an evaluator. On the coordinator.

        It is killed where MPI lets the others go on, and it is of this host: its launcher would
        wait for it. Otherwise it is left as it is until the job ends: its death would end the job.
        """
        self.given_up.add(rank)
        one = self.overdue.record(rank)
        if self._failures.on and one is not None:
            send_signal(one.pid)

    def agreed(self, make: Callable[[], T]) -> T:
        """Call `make` on every rank; an error that one side has agreed on is raised on both.

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
        """Send a message to a rank, of all ranks. Blocks: no."""
        if dest not in self.given_up:
            self._mailbox.send(dest, kind, payload)

    def poll(self) -> list[tuple[int, str, Any]]:
        """Return the messages that have come, as (source, kind, payload); looks once a ms.

        From an evaluator that has died, and that the job can do without, comes ``lost``.

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
        """Return the coordinator's value on evaluators, and on the others their own.

        Collective: yes. Blocks: on evaluators.
        """
        if not self.evaluates:
            for rank in self.living if self.everyone.rank == self.coordinator else ():
                self._mailbox.bring(rank, value)
            return value
        while not (found := self._mailbox.brought_by(self.coordinator)):
            time.sleep(POLL_S)
        return found[0]

    def part(self, code: int, lost: Iterable[int] = ()) -> None:
        """Meet at the end of the job, but for those who are missing: all ranks know them then.

        If there are any, this process ends without MPI_Finalize.

        Args:
            code: The job's exit code.
            lost: Ranks that train and have died, as far as the coordinator knows.

        Collective: yes, behind `share`. Blocks: until all have come.
        """
        if self._failures.on:
            self._failures.spare(range(self.everyone.size))  # who knows the others' end may go
        self.overdue.expect()
        if self.everyone.rank == self.coordinator:
            self._hear("here")
            self.missing.update(self.given_up, self._failures.lost, lost)
            for rank in range(self.everyone.size):
                self.send(rank, "missing", sorted(self.missing))
            if self.missing and self._failures.on:
                self._hear("known", LEAVING_S)
        else:
            self.send(self.coordinator, "here")
            self.missing.update(self._missing())
            self.send(self.coordinator, "known")
        if self.missing and self._failures.on:
            self._failures.leave_out(self.missing)
        elif self.missing:
            atexit.register(self._end_all, code)

    def _hear(self, what: str, limit_s: float = math.inf) -> None:
        """Wait until all have sent a message that are neither dead nor given up.

        On the coordinator.
        """
        end = time.perf_counter() + limit_s
        awaited = set(range(self.everyone.size)) - {self.coordinator}
        while time.perf_counter() < end:
            awaited -= {source for source, kind, _ in self.poll() if kind == what}
            here = [rank for rank in self.living if rank in awaited]
            for rank, why in self.overdue.look(here, time.perf_counter()).items():
                complain(f"warning: rank {rank} {why}: the job ends without it")
                self.give_up(rank)
            self.given_up.update(self._failures.lost.intersection(self.evaluators))
            awaited -= self.given_up | self._failures.lost
            if not awaited:
                return
            time.sleep(POLL_S)

    def _missing(self) -> list[int]:
        """Wait until the coordinator has told which ranks are missing; returns them.

        Raises:
            Lost: If it has died.
        """
        end = math.inf
        while time.perf_counter() < end:
            for _, kind, payload in self.poll():
                if kind == "missing":
                    return payload
            if self.coordinator in self._failures.lost:
                end = min(end, time.perf_counter() + HEARD_S)  # its last messages may come
            time.sleep(POLL_S)
        raise self._failures.needed()

    def _end_all(self, code: int) -> None:
        """End the job with `code` when all have come here that can; others wait in MPI."""
        sys.stdout.flush()
        if self.everyone.rank != self.coordinator:
            self.send(self.coordinator, "left")
            return
        self.overdue.close()
        self.overdue = Deadline((), 0.0)  # a program may do what it likes
        self._hear("left")
        time.sleep(HEARD_S)
        abort.end_all(code)

    def free(self) -> None:
        """Free the communicators, and drop messages that nobody waits for any more.

        Nothing is freed where ranks are missing.

        Collective: yes. Blocks: until all have come.
        """
        if self.missing:
            return
        self.overdue.close()
        while not self._mailbox.empty():
            self._mailbox.poll()
            time.sleep(POLL_S)
        here = begin_barrier(self._control)
        while not here.Test():
            self._mailbox.poll()
            time.sleep(POLL_S)
        self._failures.forget()
        self._control.Free()
        self.side.Free()


def agreed(link: Link | None, make: Callable[[], T]) -> T:
    """Call `make`, with the other side where there is one; see `Link.agreed`."""
    return make() if link is None else link.agreed(make)
