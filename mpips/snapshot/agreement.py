"""Agreement of the servers on the pushes that a checkpoint contains.

All shards of a checkpoint have applied the same pushes:

1. The coordinator sends ``snapshot`` to all servers. Each server finishes the remote pushes that it
   has begun to receive, and takes no others. It then sends the coordinator ``applied``: its number
   of applied pushes of each worker.
2. When all have answered, the coordinator sends them the elementwise maximum, ``agreed``. Each
   server applies pushes up to it; all servers get every one of these pushes. Then the server copies
   its shard and takes pushes again.

With node aggregation, one message contains pushes of several workers, and a server may have to go
beyond the maximum. All servers then send ``applied`` again, until none had to. All remote servers
get the same messages, so this happens three times at most. If workers have state of their own, they
first say how many pushes the snapshot contains: see `mpips.snapshot.worker_state`.

A server that has sent ``applied`` applies nothing until the maximum comes. If it dies, its shard is
left out of the checkpoint. The server that takes over the shard sends the shard's ledger to the
coordinator again. If the coordinator dies, each server gives up the snapshot
(`mpips.failover.coordinator_failover`).
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

import numpy as np

from mpips.kernels.atomics import observe


class Phase(Enum):
    """Phase of a server in a snapshot."""

    FREE = auto()  # no snapshot: the server takes any push
    DRAIN = auto()  # it takes only the remote pushes that it has begun to receive
    AGREE = auto()  # it takes none until it knows the servers' maximum
    REACH = auto()  # it takes pushes up to the maximum
    LAST = auto()  # it takes any push: workers send none beyond the snapshot
    HOLD = auto()  # it takes none until the live shard is written (snapshot = "stall")


class SnapshotAgreement:
    """One server's part in the agreement. Collective: over the servers.

    Args:
        applied: The server's ledger, shape (workers,), dtype int64.
        empty: Whether its shard is empty.
        beyond: Whether servers may have to apply pushes beyond the maximum.
        tell: Sends the coordinator the number of applied pushes of each worker.

    Attributes:
        phase: Phase of this server.
        begun: Number of the last snapshot that this server has begun or left out.
        target: Pushes of each worker in the snapshot, shape (workers,), dtype int64, once they are
            known.
    """

    def __init__(
        self, applied: np.ndarray, empty: bool, beyond: bool, tell: Callable[[list[int]], object]
    ) -> None:
        self._applied, self._empty, self._beyond, self._tell = applied, empty, beyond, tell
        self._before, self.target = np.zeros((2, applied.size), "i8")
        self.phase, self.begun = Phase.FREE, 0

    def begin(self, number: int, target: Sequence[int] | None = None) -> None:
        """Begin a snapshot at the coordinator's request.

        Args:
            number: Number of the snapshot. The server leaves it out if it has begun it already, or
                if the snapshot began before the server took over the shard.
            target: Pushes of each worker, if they are known already.
        """
        if number <= self.begun:
            return
        assert self.phase is Phase.FREE, "a snapshot is under way"
        self.phase, self.begun = Phase.DRAIN, number
        if target is not None:
            self.target[:] = target
            self.phase = Phase.LAST

    def agree_on(self, target: Sequence[int]) -> None:
        """Note the servers' maximum, if this server waits for it."""
        if self.phase is Phase.AGREE:
            self.target[:] = target
            self.phase = Phase.REACH

    def give_up(self) -> None:
        """Leave the current snapshot, unless the live shard is being written."""
        if self.phase is not Phase.HOLD:
            self.phase = Phase.FREE

    def advance(self, bodies: int) -> bool:
        """Advance the snapshot; return whether it has been reached just now. Blocks: no.

        Args:
            bodies: Number of remote pushes received or being received.
        """
        if self.phase is Phase.DRAIN and bodies == 0:
            self._before[:] = -1
            self._agree()
        if self.phase is Phase.LAST and self._reached():
            exact = all(observe(self._applied, w) == n for w, n in enumerate(self.target))
            assert self._empty or exact, "a worker pushed beyond the snapshot"
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

    def _reached(self) -> bool:
        target = enumerate(self.target)
        return self._empty or all(observe(self._applied, w) >= n for w, n in target)
