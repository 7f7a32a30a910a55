"""Consistency of reads in mode ssp and with backup workers.

In mode ssp, batches are numbered in the order of their assignment. With W workers, batch i has
**clock** ``i // W``. Its update has the same clock, and so has the worker while it computes it. A
server's clock is that of the first update that it has not applied. Before a worker reads at clock
c, it waits until each server's clock is at least c - s, where s is the staleness bound. It also
waits until its own pushes are applied. So a read at clock c contains all updates of clocks up to
c - s - 1, and all updates of the worker itself.

If all workers make equally many steps, this is the clock of Ho et al., a worker's number of steps.
If batches are assigned on request, a worker that is five times slower gets a fifth of them. It
delays the others only if one of its batches takes longer than they need for s clocks.

No worker waits forever: the one with the first batch that is not applied may always read. Local
servers publish their clocks in their headers. A request to a remote server contains the read's
requirement, and the server answers when that is met. Remote rows of tables are requested at the
same time with the same requirement, and are read after the shard (`VectorClock.lets`). So they are
at least as new as the shard's clock says.

In rounds with backup workers (`mpips.ps.first_n`), a worker waits until every shard has a later
version than its last gradient was computed from. It reads again until all shards have the same
version.

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
    """Updates that a server must have applied before a worker reads its shard.

    Attributes:
        clock: All updates of smaller clocks.
        own: Number of pushes of the worker that reads.
        version: Least version of the shard; a resumed run continues the versions.
    """

    clock: int = 0
    own: int = 0
    version: int = 0


NOTHING = ReadRequirement()


class Controller(ABC):
    """Consistency controller of a worker: decides when it may read. Collective: no.

    Args:
        worker: Worker number.
        local: Header and ledger of each local server with a shard.

    Attributes:
        distance_max: Largest difference so far between this worker's clock and a shard's clock in a
            read.
    """

    def __init__(self, worker: int, local: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._worker, self._local = worker, local
        self.distance_max = 0

    @abstractmethod
    def begin(self) -> None:
        """Note that a read begins."""

    @abstractmethod
    def needs(self) -> ReadRequirement:
        """Return the requirement of the current read."""

    def ready(self) -> bool:
        """Return whether all local servers meet the requirement now. Blocks: no."""
        needs = self.needs()
        return all(
            has_arrived(header, applied, self._worker, needs) for header, applied in self._local
        )

    @abstractmethod
    def accepts(self, clocks: Sequence[int], versions: Sequence[int], torn: int) -> bool:
        """Return whether the worker may use the parameters that it has read.

        Args:
            clocks: Clock of each server with a shard, when the read of the shard began.
            versions: Version of each shard, when its read began.
            torn: Number of shards whose reads are torn.

        Raises:
            UserError: If the read violates the bound that the controller guarantees.
        """


def has_arrived(
    header: np.ndarray, applied: np.ndarray, worker: int, needs: ReadRequirement
) -> bool:
    """Return whether a server, in memory of this node, meets the requirement of a worker's read."""
    return (
        observe(header, CLOCK) >= needs.clock
        and observe(applied, worker) >= needs.own
        and observe(header, COMMITTED) >= needs.version
    )


class RoundController(Controller):
    """Controller of rounds: each gradient is computed from the same version of all shards."""

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
        """See `Controller.accepts`; the next read requires a later version than an accepted one."""
        newest = max(versions)
        same = newest == min(versions) and not torn
        self._next = newest + same
        return same


class ClockController(Controller):
    """Controller of mode ssp.

    Args:
        worker: Worker number.
        local: See `Controller`.
        bound: Staleness bound s, in clocks.
        clock: Returns the clock of the next batch; called when a read for it begins.
        own: Returns the number of pushes that this worker has made.
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
        """See `Controller.accepts`; raises if a difference of clocks exceeds the bound."""
        distance = max((self._clock - clock for clock in clocks), default=0)
        self.distance_max = max(self.distance_max, distance)
        if distance > self._bound:
            where = f"a read of worker {self._worker} at clock {self._clock}"
            expected = f"a distance of at most {self._bound}, the staleness bound"
            raise UserError(f"{where} with clock distance {distance}", expected)
        return True


class VectorClock:
    """Clock of a server, and the remote reads that wait for it. Collective: no.

    Args:
        header: Header of the server, shape (8,), dtype int64; the clock is published there.
        applied: Ledger of the server, shape (workers,), dtype int64; the store writes it.
        workers: Rank of each worker.
        ask: Called with the rank of a remote worker whose read may be answered, and whether it
            wants a consistent copy.

    Attributes:
        held: Rank of each remote reader that waits, whether it wants a consistent copy, and its
            requirement.
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
        self._published = 0  # the clock in the header
        self._later: set[int] = set()  # numbers of updates applied beyond `_first`
        self._learned: tuple[int, set[int], list[int]] | None = None
        self.held: list[tuple[int, bool, ReadRequirement]] = []
        self._answered: dict[int, ReadRequirement] = {}  # last requirement, by rank
        self._cancelled: set[int] = set()  # ranks whose open read waits no longer

    def advance(self, *numbers: int) -> None:
        """Note that the updates of these batches are applied.

        Args:
            numbers: Numbers of the batches.
        """
        for number in numbers:
            if number == self._first:
                self._first += 1
            elif number > self._first:
                self._later.add(number)
        while self._first in self._later:
            self._later.remove(self._first)
            self._first += 1

    def take_over(self) -> None:
        """Continue the clock of a dead server, whose shard this server takes over.

        The clock stays at the value in the header until `learn`.
        """
        self._published = observe(self._header, CLOCK)
        self._first = self._published * len(self._workers)

    def learn(self, issued: int, missing: Iterable[int], ledger: list[int]) -> None:
        """Learn which batches were applied to a shard that was taken over.

        Args:
            issued: Number of batches that were assigned.
            missing: Numbers of batches applied neither to this shard, when the question was asked,
                nor to the shard of `ledger`.
            ledger: Number of pushes of each worker applied to another shard. Once this shard has
                applied as many, it has applied all batches but those of `missing`.
        """
        self._learned = issued, set(missing), ledger
        self.publish()

    def _use_learned(self, issued: int, missing: set[int], ledger: list[int]) -> None:
        if any(observe(self._applied, worker) < count for worker, count in enumerate(ledger)):
            return
        self._learned = None
        # All batches before `issued` are applied, but the missing ones that have not come since.
        not_applied = {n for n in missing - self._later if n >= self._first}
        self._first = max(self._first, min(not_applied, default=issued))
        known = {*self._later, *range(self._first, issued)} - not_applied
        self._later = {n for n in known if n >= self._first}
        self.advance()

    def publish(self) -> None:
        """Publish the clock in the header, after the parameters that it describes."""
        if self._learned is not None:
            self._use_learned(*self._learned)
        clock = self._first // len(self._workers)
        if clock > self._published:
            self._published = clock
            publish(self._header, CLOCK, clock)

    def cancel_wait(self, rank: int) -> None:
        """Have `let` answer a remote worker's open read even if its requirement is not met."""
        self._cancelled |= {reader for reader, *_ in self.held if reader == rank}

    def let(self, first: int = 0) -> None:
        """Answer reads whose requirements are met. Call it between two updates. Blocks: no.

        Args:
            first: Index in `held` of the first read to check.
        """
        header, applied, worker = self._header, self._applied, self._workers
        checked, self.held[first:] = self.held[first:], []
        for rank, consistent, needs in checked:
            if rank in self._cancelled or has_arrived(header, applied, worker[rank], needs):
                self._cancelled.discard(rank)
                self._answered[rank] = needs
                self._ask(rank, consistent)
            else:
                self.held.append((rank, consistent, needs))

    def lets(self, rank: int, clock: int, own: int) -> bool:
        """Return whether a remote worker may read rows, whose read of the shard has begun.

        Args:
            rank: Rank of the worker.
            clock: See `ReadRequirement.clock`.
            own: See `ReadRequirement.own`.
        """
        let = self._answered.get(rank, NOTHING)
        return clock <= max(0, let.clock) and own <= let.own
