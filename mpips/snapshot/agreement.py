"""Agreement of the servers on what a checkpoint holds.

All shards of a checkpoint have seen the same pushes:

1. The coordinator sends ``snapshot`` to all servers. Each finishes the remote pushes that it has
   begun to receive, takes no others, and sends the coordinator ``applied``: the number of pushes
   that it has applied of each worker.
2. When all have answered, the coordinator sends them the elementwise maximum, ``agreed``. Each
   server applies pushes up to it; every push in it was sent to every server. Then it copies its
   shard and takes pushes again.

With node aggregation one message holds pushes of several workers, and a server may have to go
beyond the maximum. It then sends ``applied`` again, until no server had to. All remote servers get
the same messages, so this happens three times at most. Where workers have state of their own, they
say first how many pushes are in the snapshot: see `mpips.snapshot.worker_state`.

A server that has sent ``applied`` applies nothing until the maximum comes. If it dies, its shard is
left out of the checkpoint, and its successor tells the coordinator the shard's ledger once more. If
the coordinator dies, each server gives the snapshot up (`mpips.failover.coordinator_failover`).
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

import numpy as np

from mpips.kernels.atomics import observe


class Phase(Enum):
    """Where a server is in a snapshot."""

    FREE = auto()  # no snapshot: takes any push
    DRAIN = auto()  # takes the remote pushes that it has begun to receive
    AGREE = auto()  # takes none, until the servers' maximum is known
    REACH = auto()  # takes pushes up to the maximum
    LAST = auto()  # takes any push: the workers announce none beyond the snapshot
    HOLD = auto()  # takes none, until the live shard is written (snapshot = "stall")


class SnapshotAgreement:
    """One server's part in agreeing on what a checkpoint holds. Collective: over the servers.

    Args:
        applied: The server's ledger, shape (workers,).
        empty: Whether its shard is.
        beyond: Whether servers may have to apply more than what was agreed on.
        tell: Tells the coordinator what is applied.

    Attributes:
        phase: Where this server is.
        begun: Number of the last snapshot that it has begun, or is not in.
        target: Pushes of each worker in the snapshot, shape (workers,), once they are agreed on.
    """

    def __init__(
        self, applied: np.ndarray, empty: bool, beyond: bool, tell: Callable[[list[int]], object]
    ) -> None:
        self._applied, self._empty, self._beyond, self._tell = applied, empty, beyond, tell
        self._before, self.target = np.zeros((2, applied.size), "i8")
        self.phase, self.begun = Phase.FREE, 0

    def begin(self, number: int, target: Sequence[int] | None = None) -> None:
        """Start, when the coordinator says so.

        Args:
            number: Of the snapshot. One that has begun, or that began before the shard was taken
                over, is left out.
            target: Pushes of each worker if these are agreed on.
        """
        if number <= self.begun:
            return
        assert self.phase is Phase.FREE, "a snapshot is under way"
        self.phase, self.begun = Phase.DRAIN, number
        if target is not None:
            self.target[:] = target
            self.phase = Phase.LAST

    def agree_on(self, target: Sequence[int]) -> None:
        """Learn the servers' maximum, if this one waits for it."""
        if self.phase is Phase.AGREE:
            self.target[:] = target
            self.phase = Phase.REACH

    def give_up(self) -> None:
        """Leave the snapshot under way, if the live shard is not being written."""
        if self.phase is not Phase.HOLD:
            self.phase = Phase.FREE

    def advance(self, bodies: int) -> bool:
        """Get on; returns whether the snapshot is reached just now. Blocks: no.

        Args:
            bodies: Remote pushes received or being received.
        """
        if self.phase is Phase.DRAIN and bodies == 0:
            self._before[:] = -1
            self._agree()
        if self.phase is Phase.LAST and self._reached():
            assert self._empty or self._passed() == 0, "a worker pushed beyond the snapshot"
            return True
        if self.phase is not Phase.REACH or not self._reached():
            return False
        if not self._beyond or np.array_equal(self.target, self._before):
            return True
        self._before[:] = self.target
        self._agree()
        return False

    def _agree(self) -> None:
        self.phase = Phase.AGREE
        self._tell([observe(self._applied, worker) for worker in range(self._applied.size)])

    def _passed(self) -> int:
        """Return how many pushes beyond the maximum are applied."""
        workers = range(self._applied.size)
        return sum(max(0, observe(self._applied, w) - int(self.target[w])) for w in workers)

    def _reached(self) -> bool:
        workers = range(self._applied.size)
        return self._empty or all(observe(self._applied, w) >= self.target[w] for w in workers)
