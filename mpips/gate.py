"""What bounds the distance of clocks in mode ssp: a worker's half and a server's half.

Batches are numbered in the order in which they are handed out; number i of W workers has **clock**
i // W, and so has the update made of it, and the worker while it is at it. A server's clock is that
of the first update that it has not applied. Before a worker reads at clock c it waits until each
server's clock is c - s or more, and until its own pushes are applied. So a read at clock c holds
every update of clock c - s - 1 and before, whoever makes it, and all of the worker's own.

Where each worker makes as many steps as the others, this is the clock of Ho et al., the number of
a worker's own steps. Where batches go to who asks, a worker that is five times slower takes a fifth
of them, and holds the others up only if a batch of its takes longer than they need for s clocks.

Nobody waits for ever: the worker that has the first batch not applied may always read. Near servers
say their clocks in their headers; to far ones the request says what is needed, and they answer when
that holds.

Reference: Ho et al., NeurIPS 2013, section 3.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpips.errors import UserError
from mpips.far import CLOCK
from mpips.kernels import observe, publish


class Bound(NamedTuple):
    """A bound on what a worker's reads may lack.

    Attributes:
        staleness: The staleness bound s.
        clock: Returns the clock of the next batch, when a read for it begins.
        own: Returns the pushes that this worker has made.
    """

    staleness: int
    clock: Callable[[], int]
    own: Callable[[], int]


class Needs(NamedTuple):
    """What a server has to have applied before it is read.

    Attributes:
        clock: All updates of a smaller clock.
        own: Pushes of the worker that reads.
    """

    clock: int = 0
    own: int = 0


NOTHING = Needs()


class Gate:
    """A worker's half. Collective: no.

    Args:
        worker: Worker number.
        bound: What its reads may lack.
        near: Header and ledger of each near server with a shard.

    Attributes:
        distance_max: The largest distance of this worker's clock to that of a shard read.
    """

    def __init__(
        self, worker: int, bound: Bound, near: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        self._worker, self._bound, self._near = worker, bound, near
        self._clock = self.distance_max = 0

    def begin(self) -> None:
        """Note the clock of the read that begins."""
        self._clock = self._bound.clock()

    def needs(self) -> Needs:
        """Return what the read has to hold, as far as this worker has pushed by now."""
        return Needs(self._clock - self._bound.staleness, self._bound.own())

    def open(self) -> bool:
        """Whether every near server may be read now. Blocks: no."""
        needs = self.needs()
        return all(
            observe(applied, self._worker) >= needs.own and observe(header, CLOCK) >= needs.clock
            for header, applied in self._near
        )

    def passed(self, clocks: Sequence[int]) -> None:
        """Check what the read holds, by the clocks that the servers had when it began.

        Raises:
            UserError: If the distance of clocks exceeds the bound.
        """
        distance = max((self._clock - clock for clock in clocks), default=0)
        self.distance_max = max(self.distance_max, distance)
        if distance > self._bound.staleness:
            where = f"a read of worker {self._worker} at clock {self._clock}"
            expected = f"a distance of at most {self._bound.staleness}, the staleness bound"
            raise UserError(f"{where} with clock distance {distance}", expected)


class Clocks:
    """A server's half: its clock, and the far reads that wait for it. Collective: no.

    Args:
        header: Of the server, shape (8,), dtype int64; the clock is published there.
        applied: Its ledger, shape (workers,), dtype int64; written by the store.
        workers: Rank of each worker.
        ask: Takes the rank of a far worker that may be answered, and whether it wants a copy.
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
        self._later: set[int] = set()  # those applied beyond it
        self._held: list[tuple[int, bool, Needs]] = []

    def advance(self, number: int) -> None:
        """Note that the update of a batch is applied."""
        if number >= self._first:
            self._later.add(number)
        while self._first in self._later:
            self._later.remove(self._first)
            self._first += 1

    def publish(self) -> None:
        """Show the clock to all who read, after the parameters that it is about."""
        publish(self._header, CLOCK, self._first // len(self._workers))

    def want(self, rank: int, consistent: bool, needs: Needs) -> None:
        """Note that a far worker asked to read; call it between two updates. Blocks: no."""
        self._held.append((rank, consistent, needs))
        self.let()

    def hurry(self, rank: int) -> None:
        """Let a far worker read whether its needs are met or not. Blocks: no."""
        self._held = [(r, c, NOTHING if r == rank else needs) for r, c, needs in self._held]
        self.let()

    def let(self) -> None:
        """Let those read whose needs are met; call it between two updates. Blocks: no."""
        held, self._held = self._held, []
        for rank, consistent, needs in held:
            if self._meet(self._workers[rank], needs):
                self._ask(rank, consistent)
            else:
                self._held.append((rank, consistent, needs))

    def _meet(self, worker: int, needs: Needs) -> bool:
        clock, own = observe(self._header, CLOCK), observe(self._applied, worker)
        return clock >= needs.clock and own >= needs.own
