"""What bounds the distance of clocks in mode ssp: a worker's half and a server's half.

A worker's **clock** is the number of pushes that it has made in this run; a server's clock is the
smallest number that it has applied of any worker's. Before a worker reads at clock c it waits
until each server's clock is c - s or more, and until its own pushes are applied. So a read at
clock c holds every update of clock c - s - 1 and before of every worker (the update of clock k is
push k + 1), and all of its own. Near servers say their clocks in their headers; to far ones the
request says what is needed, and they answer when that holds. A worker that has finished, and
whose pushes are all applied, is for ever ahead, so that nobody waits for it.

Reference: Ho et al., NeurIPS 2013, section 3.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpips.errors import UserError
from mpips.far import CLOCK
from mpips.kernels import observe, publish

FOREVER = 1 << 62  # the clock of a worker that has finished


class Needs(NamedTuple):
    """What a server has to have applied before it is read.

    Attributes:
        clock: Pushes of every worker that has not finished.
        own: Pushes of the worker that reads.
    """

    clock: int = 0
    own: int = 0


NOTHING = Needs()


class Gate:
    """A worker's half. Collective: no.

    Args:
        worker: Worker number.
        bound: The staleness bound s.
        clock: Returns the pushes that this worker has made.
        near: Header and ledger of each near server with a shard.

    Attributes:
        distance_max: The largest distance of this worker's clock to that of a shard read.
    """

    def __init__(
        self,
        worker: int,
        bound: int,
        clock: Callable[[], int],
        near: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self._worker, self._bound, self._clock, self._near = worker, bound, clock, near
        self.distance_max = 0

    def needs(self) -> Needs:
        """Return what a read now has to hold."""
        own = self._clock()
        return Needs(own - self._bound, own)

    def open(self) -> bool:
        """Whether every near server may be read now. Blocks: no."""
        needs = self.needs()
        return all(
            observe(applied, self._worker) >= needs.own and observe(header, CLOCK) >= needs.clock
            for header, applied in self._near
        )

    def passed(self, clocks: Sequence[int]) -> None:
        """Check what a read holds, by the clocks that the servers had when it began.

        Raises:
            UserError: If the distance of clocks exceeds the bound.
        """
        own = self._clock()
        distance = max((own - clock for clock in clocks), default=0)
        self.distance_max = max(self.distance_max, distance)
        if distance > self._bound:
            got = f"a read of worker {self._worker} at clock {own} with clock distance {distance}"
            raise UserError(got, f"a distance of at most {self._bound}, the staleness bound")


class Clocks:
    """A server's half: the smallest clock, and the far reads that wait for it. Collective: no.

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
        self._clocks = [0] * len(workers)
        self._last = [FOREVER] * len(workers)  # pushes that each worker will have made
        self._held: list[tuple[int, bool, Needs]] = []

    def finished(self, rank: int, pushes: int) -> None:
        """Note that a worker will have made so many pushes, and no more."""
        worker = self._workers[rank]
        self._last[worker] = pushes
        self.advance(worker)
        self.publish()

    def advance(self, worker: int) -> None:
        """Note what the ledger has of a worker."""
        seq = observe(self._applied, worker)
        self._clocks[worker] = seq if seq < self._last[worker] else FOREVER

    def publish(self) -> None:
        """Show the smallest clock to all who read, after the parameters that it is about."""
        publish(self._header, CLOCK, min(self._clocks))

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
