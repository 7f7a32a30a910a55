"""Agreement of the servers on what a checkpoint holds.

The coordinator says "snapshot"; each server finishes the remote pushes that it has begun to receive
and takes no others; they find the elementwise maximum of the servers' ``applied``; each applies
exactly up to it (every push in it was sent to every server), copies its shard and goes on. So all
shards of a checkpoint have seen the same pushes. Where one message holds the pushes of several
workers, a server may have to go beyond the maximum; then they agree again, until none had to: as
all remote servers get the same messages, that is after three times at most. Where workers have
state of their own, they come first, and say how many pushes are in the snapshot: see
`mpips.snapshot.worker_state`.

The maximum is found by an Allreduce; or, where a job goes on without a server that dies, in shared
memory: a server posts its ``applied`` beside the number of the snapshot, and reads the others' when
all have posted. The next snapshot comes when all have answered for this one, and so have read.
Servers of other nodes are told by message what was posted: who goes on for a dead one tells them
once more, and as it lies in memory it is the same.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

import numpy as np

from mpips.kernels.atomics import observe, publish
from mpips.mpi.collectives import begin_maximum
from mpips.mpi.start import Comm, Request


class Reduced:
    """Finds the maximum of what servers say by an Allreduce. Collective: over them. Blocks: no.

    Args:
        servers: The communicator of all servers.
    """

    def __init__(self, servers: Comm) -> None:
        self._servers = servers
        self._request: Request | None = None

    def begin(self, values: np.ndarray, out: np.ndarray) -> None:
        """Say `values`, shape (workers,), dtype int64; `out` is left alone until `done`."""
        self._request = begin_maximum(self._servers, values, out)

    def done(self) -> bool:
        """Return whether the maximum is in `out`."""
        return self._request is not None and self._request.Test()


class Posted:
    """Finds the maximum as `Reduced` does, by what each server posts in the memory of its node.

    Args:
        posts: Of each server, shape (1 + workers,), dtype int64: a number, and its values. Those
            of other nodes are copies, which `hear` writes.
        own: Number of the server.
        tell: Tells servers of other nodes what is posted.

    Attributes:
        number: Of the maxima begun so far.
    """

    def __init__(
        self,
        posts: Sequence[np.ndarray],
        own: int,
        tell: Callable[[int, list[int]], object] = lambda own, post: None,
    ) -> None:
        self._posts, self._post, self._own, self._tell = posts, posts[own], own, tell
        self._out = np.zeros(0)
        self.number = 0

    def begin(self, values: np.ndarray, out: np.ndarray) -> None:
        """See `Reduced.begin`."""
        self.catch_up(self.number + 1, values)
        self._out = out

    def catch_up(self, number: int, values: Sequence[int] | np.ndarray) -> None:
        """Have taken part in so many, and say `values` unless something is said in the last."""
        self.number = number
        if observe(self._post, 0) < number:
            self._post[1:] = values
            publish(self._post, 0, number)
        if number:
            self._tell(self._own, [self.posted, *self._post[1:].tolist()])

    @property
    def posted(self) -> int:
        """The number of what is posted last, perhaps by one that has died."""
        return observe(self._post, 0)

    def done(self) -> bool:
        """See `Reduced.done`."""
        if any(observe(post, 0) < self.number for post in self._posts):
            return False
        np.max([post[1:] for post in self._posts], axis=0, out=self._out)
        return True


def hear(copies: Sequence[np.ndarray], server: int, said: Sequence[int]) -> None:
    """Note what a server of another node has posted, perhaps once more."""
    if said[0] > copies[server][0]:
        copies[server][:] = said


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
        maximum: Finds the servers' maximum.
        applied: The server's ledger, shape (workers,).
        empty: Whether its shard is.
        beyond: Whether servers may have to apply more than what was agreed on.

    Attributes:
        phase: Where this server is.
        begun: How many snapshots have been begun.
    """

    def __init__(
        self, maximum: Reduced | Posted, applied: np.ndarray, empty: bool, beyond: bool
    ) -> None:
        self._maximum, self._applied, self._empty = maximum, applied, empty
        self._beyond = beyond
        self._mine = np.zeros(applied.size, "i8")
        self._before = np.zeros(applied.size, "i8")
        self.target = np.zeros(applied.size, "i8")
        self.phase, self.begun = Phase.FREE, 0

    def begin(self, target: Sequence[int] | None = None) -> None:
        """Start, when the coordinator says so.

        With the pushes of each worker if these are agreed on.
        """
        assert self.phase is Phase.FREE, "a cut is under way"
        self.phase = Phase.DRAIN
        self.begun += 1
        if target is not None:
            self.target[:] = target
            self.phase = Phase.LAST

    def catch_up(self, number: int) -> None:
        """Have taken part in so many snapshots, or in all that its dead server has posted for."""
        assert isinstance(self._maximum, Posted), "no server dies without an end"
        self.begun = number = max(number, self._maximum.posted)
        self._maximum.catch_up(number, [observe(self._applied, w) for w in range(self._mine.size)])

    def advance(self, bodies: int) -> bool:
        """Get on; returns whether the snapshot is reached just now. Blocks: no.

        Args:
            bodies: Remote pushes received or being received.
        """
        if self.phase is Phase.DRAIN and bodies == 0:
            self._before[:] = -1
            self._agree()
        if self.phase is Phase.AGREE and self._maximum.done():
            self.phase = Phase.REACH
        if self.phase is Phase.LAST and self._reached():
            assert self._empty or self._passed() == 0, "a worker pushed beyond the cut"
            return True
        if self.phase is not Phase.REACH or not self._reached():
            return False
        if not self._beyond or np.array_equal(self.target, self._before):
            return True
        self._before[:] = self.target
        self._agree()
        return False

    def _agree(self) -> None:
        for worker in range(self._applied.size):
            self._mine[worker] = observe(self._applied, worker)
        self._maximum.begin(self._mine, self.target)
        self.phase = Phase.AGREE

    def _passed(self) -> int:
        """Return how many pushes beyond the maximum are applied."""
        workers = range(self._applied.size)
        return sum(max(0, observe(self._applied, w) - int(self.target[w])) for w in workers)

    def _reached(self) -> bool:
        workers = range(self._applied.size)
        return self._empty or all(observe(self._applied, w) >= self.target[w] for w in workers)
