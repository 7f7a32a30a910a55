"""Consistency of reads in mode ssp and with backup workers.

In mode ssp, batches are numbered in the order in which they are assigned; number i of W workers
has **clock** i // W, and so has the update made of it, and the worker while it is at it. A server's
clock is that of the first update that it has not applied. Before a worker reads at clock c it waits
until each server's clock is c - s or more, and until its own pushes are applied. So a read at clock
c holds every update of clock c - s - 1 and before, whoever makes it, and all of the worker's own.

Where each worker makes as many steps as the others, this is the clock of Ho et al., the number of
a worker's own steps. Where batches go to who asks, a worker that is five times slower takes a fifth
of them, and holds the others up only if a batch of its takes longer than they need for s clocks.

Nobody waits for ever: the worker that has the first batch not applied may always read. Local
servers say their clocks in their headers; to remote ones the request says what is needed, and they
answer when that holds. Remote rows of tables are asked for at the same time, with the same needs,
and not read before the shard is (`VectorClock.lets`): they are as new, and no farther behind than
its clock says.

In rounds (`mpips.ps.first_n`), a worker waits until every shard has a later version than the one
that its last gradient was computed from, and reads again unless it has got the same one of all.

Reference: Ho et al., NeurIPS 2013, section 3.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mpips.errors import UserError
from mpips.kernels.atomics import observe, publish
from mpips.transport.remote_reads import CLOCK, COMMITTED


class ReadRequirement(NamedTuple):
    """What a server has to have applied before it is read.

    Attributes:
        clock: All updates of a smaller clock.
        own: Pushes of the worker that reads.
        version: Updates, in resumed runs too.
    """

    clock: int = 0
    own: int = 0
    version: int = 0


NOTHING = ReadRequirement()


class Controller(ABC):
    """A worker's half, what the field calls a consistency controller. Collective: no.

    Args:
        worker: Worker number.
        local: Header and ledger of each local server with a shard.

    Attributes:
        distance_max: The largest distance of this worker's clock to that of a shard read.
    """

    def __init__(self, worker: int, local: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._worker, self._local = worker, local
        self.distance_max = 0

    @abstractmethod
    def begin(self) -> None:
        """Note that a read begins."""

    @abstractmethod
    def needs(self) -> ReadRequirement:
        """Return what a read now has to hold."""

    def ready(self) -> bool:
        """Return whether every local server may be read now. Blocks: no."""
        needs = self.needs()
        return all(
            has_arrived(header, applied, self._worker, needs) for header, applied in self._local
        )

    @abstractmethod
    def accepts(self, clocks: Sequence[int], versions: Sequence[int], torn: int) -> bool:
        """Return whether a read may be used.

        Args:
            clocks: Of each server with a shard, when the read of it began.
            versions: Of each shard, likewise.
            torn: Number of shards whose reads are torn.

        Raises:
            UserError: If the read is none that the controller should have let pass.
        """


def has_arrived(
    header: np.ndarray, applied: np.ndarray, worker: int, needs: ReadRequirement
) -> bool:
    """Return whether a server has what a read of a worker needs; of local memory, or its own."""
    return (
        observe(header, CLOCK) >= needs.clock
        and observe(applied, worker) >= needs.own
        and observe(header, COMMITTED) >= needs.version
    )


class RoundController(Controller):
    """The controller of rounds: each gradient is computed from one version of all shards."""

    def __init__(self, worker: int, local: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        super().__init__(worker, local)
        self._next = self._wanted = 0

    def begin(self) -> None:
        """See `Controller.begin`."""
        self._wanted = self._next

    def needs(self) -> ReadRequirement:
        """See `Controller.needs`."""
        return ReadRequirement(version=self._wanted)

    def accepts(self, clocks: Sequence[int], versions: Sequence[int], torn: int) -> bool:
        """See `Controller.accepts`; what is read after this has to be a later version."""
        newest = max(versions)
        same = newest == min(versions) and not torn
        self._next = newest + same
        return same


class ClockController(Controller):
    """The controller of mode ssp.

    Args:
        worker: Worker number.
        local: See `Controller`.
        bound: The staleness bound s.
        clock: Returns the clock of the next batch, when a read for it begins.
        own: Returns the pushes that this worker has made.
    """

    def __init__(
        self,
        worker: int,
        local: Sequence[tuple[np.ndarray, np.ndarray]],
        bound: int,
        clock: Callable[[], int],
        own: Callable[[], int],
    ) -> None:
        super().__init__(worker, local)
        self._bound, self._next_clock, self._own = bound, clock, own
        self._clock = 0  # of the read under way

    def begin(self) -> None:
        """See `Controller.begin`."""
        self._clock = self._next_clock()

    def needs(self) -> ReadRequirement:
        """See `Controller.needs`."""
        return ReadRequirement(self._clock - self._bound, self._own())

    def accepts(self, clocks: Sequence[int], versions: Sequence[int], torn: int) -> bool:
        """See `Controller.accepts`; it is an error if the distance of clocks exceeds the bound."""
        distance = max((self._clock - clock for clock in clocks), default=0)
        self.distance_max = max(self.distance_max, distance)
        if distance > self._bound:
            where = f"a read of worker {self._worker} at clock {self._clock}"
            expected = f"a distance of at most {self._bound}, the staleness bound"
            raise UserError(f"{where} with clock distance {distance}", expected)
        return True


class VectorClock:
    """A server's half: its clock, and the remote reads that wait for it. Collective: no.

    Args:
        header: Of the server, shape (8,), dtype int64; the clock is published there.
        applied: Its ledger, shape (workers,), dtype int64; written by the store.
        workers: Rank of each worker.
        ask: Takes the rank of a remote worker that may be answered, and whether it wants a copy.

    Attributes:
        held: Rank of each remote reader that waits, whether it wants a copy, and what it needs.
    """

    def __init__(
        self,
        header: np.ndarray,
        applied: np.ndarray,
        workers: Sequence[int],
        ask: Callable[[int, bool], None],
    ) -> None:
        self._header, self._applied, self._ask = header, applied, ask
        self._workers = {rank: worker for worker, rank in enumerate(workers)}
        self._first = 0  # number of the first update that is not applied
        self._shown = 0  # the clock in the header
        self._later: set[int] = set()  # those applied beyond it
        self._last: dict[int, int] = {}  # pushes in all of each worker that has finished
        self._learned: tuple[int, set[int], list[int]] | None = None
        self.held: list[tuple[int, bool, ReadRequirement]] = []
        self._let: dict[int, ReadRequirement] = {}  # what the last read of a rank has needed

    def advance(self, *numbers: int) -> None:
        """Note that the updates of batches are applied."""
        for number in numbers:
            if number == self._first:
                self._first += 1
            elif number > self._first:
                self._later.add(number)
            while self._first in self._later:
                self._later.remove(self._first)
                self._first += 1

    def finished(self, rank: int, pushes: int) -> None:
        """Note that a worker will have made so many pushes, and no more."""
        self._last[self._workers[rank]] = pushes

    def take_over(self, other: "VectorClock") -> None:
        """Begin where a server has ended: its clock stays as it was shown, until `learn`.

        Args:
            other: Clocks of another server: which workers have finished.
        """
        self._last = dict(other._last)
        self._shown = observe(self._header, CLOCK)
        self._first = self._shown * len(self._workers)

    def learn(self, issued: int, missing: Iterable[int], ledger: list[int]) -> None:
        """Learn which batches there are, of a shard that was taken over.

        Args:
            issued: How many were assigned.
            missing: The numbers of those that were neither applied here when this was asked for,
                nor to the shard whose ledger is told.
            ledger: Pushes of each worker: when these are applied here, the others are as well.
        """
        self._learned = issued, set(missing), ledger
        self.publish()

    def _use_learned(self, issued: int, missing: set[int], ledger: list[int]) -> None:
        if any(observe(self._applied, worker) < count for worker, count in enumerate(ledger)):
            return
        self._learned = None
        left = {number for number in missing - self._later if number >= self._first}
        self._first = max(self._first, min(left, default=issued))
        later = {number for number in self._later if number >= self._first}
        self._later = later | set(range(self._first, issued)) - left
        self.advance(-1)

    def live(self) -> set[int]:
        """Return the workers that may still push."""
        ended = {w for w, last in self._last.items() if observe(self._applied, w) >= last}
        return set(self._workers.values()) - ended

    def publish(self) -> None:
        """Show the clock to all who read, after the parameters that it is about."""
        if self._learned is not None:
            self._use_learned(*self._learned)
        clock = self._first // len(self._workers)
        if clock > self._shown:
            self._shown = clock
            publish(self._header, CLOCK, clock)

    def cancel_wait(self, rank: int) -> None:
        """Let a remote worker read whether its needs are met or not. Blocks: no."""
        self._let_those(lambda reader, _: reader == rank)

    def let(self) -> None:
        """Let those read whose needs are met; call it between two updates. Blocks: no."""
        header, applied, worker = self._header, self._applied, self._workers
        self._let_those(lambda rank, needs: has_arrived(header, applied, worker[rank], needs))

    def _let_those(self, lets: Callable[[int, ReadRequirement], bool]) -> None:
        held, self.held = self.held, []
        for rank, consistent, needs in held:
            if lets(rank, needs):
                self._let[rank] = needs
                self._ask(rank, consistent)
            else:
                self.held.append((rank, consistent, needs))

    def lets(self, rank: int, clock: int, own: int) -> bool:
        """Return whether a remote worker may read rows that need so much.

        Its read of the shard has begun.
        """
        let = self._let.get(rank, NOTHING)
        return clock <= max(0, let.clock) and own <= let.own
