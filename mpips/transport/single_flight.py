"""Single-flight reads of remote shards: one worker fetches, others copy.

Where workers of a node keep their replicas in shared memory, a worker that wants the remote shards
first looks at its neighbours. If one of them has a fetch under way that began when this worker knew
the versions of its last read, so that versions never go back, it waits for that and copies what
came; if not, it fetches them itself, and says so. Nobody leads, every word has one writer, and a
link that is the bottleneck brings the workers into step, so that a node takes each shard once: of
two fetches under way at once, whoever ends first begins another, which the other can join. A joined
read is older than one of its own by one transfer at most, and carries the versions of the fetch, so
that staleness stays exact. Whoever waits longer than a read should take (its neighbour may be
stopped), or copies so late that the neighbour's next read is coming into the same place, fetches
for itself: MPI may write half an element.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpips.kernels.atomics import observe, publish
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster
from mpips.transport.push_sender import Owner
from mpips.transport.remote_reads import RemoteReads

BEGUN, DONE = range(2)  # words: REPLICAS x number of the fetch + number of its replica
WRITES = 2  # and a word a replica: times that it was written, by reads that join another too
REPLICAS = 2  # at most: the one in use, and the one ahead
PATIENCE = 4.0  # times the longest read so far
PATIENCE_S = 0.05  # and at least this


def fields(n: int, servers: int, workers: int, dtype: str, replicas: int) -> tuple[Field, ...]:
    """Return the fields of a worker's segment by which others join its reads.

    Args:
        n: Number of parameters.
        servers: Number of servers.
        workers: Number of workers on the node that share.
        dtype: Of the parameters.
        replicas: That each worker has, 1 or 2.
    """
    return (
        Field("fetches", "i8", (8,)),
        Field("fetched", "i8", (REPLICAS, servers + 2)),
        Field("before", "i8", (REPLICAS, workers)),
        Field("replicas", dtype, (replicas, n)),
    )


@dataclass(frozen=True)
class Neighbour:
    """A worker of this node, as the others see it.

    Attributes:
        words: Its fetches begun and done, and the writes of its replicas, shape (8,), dtype int64.
        fetched: Versions that they found, how many reads were torn, and the writes of the replica,
            theirs the last, shape (REPLICAS, servers + 2), dtype int64.
        before: Fetches that each worker of the node had begun when the versions were known, shape
            (REPLICAS, workers of the node), dtype int64.
        replicas: Where they go, shape (replicas, n_params).
    """

    words: np.ndarray
    fetched: np.ndarray
    before: np.ndarray
    replicas: np.ndarray

    @classmethod
    def of(cls, window: Window, rank: int) -> "Neighbour":
        """Return the worker of that rank."""
        names = ("fetches", "fetched", "before", "replicas")
        return cls(*(window.view(rank, name) for name in names))


class SingleFlightReads(RemoteReads):
    """A worker's remote reads, or a neighbour's that it joins. Collective: no.

    Args:
        own: How this worker reads.
        workers: The workers of the node that share, this one too, in the same order on each.
        me: Which of them this one is.
    """

    def __init__(
        self,
        cluster: Cluster,
        owners: Sequence[Owner],
        servers: int,
        own: RemoteReads,
        workers: Sequence[Neighbour],
        me: int,
    ) -> None:
        super().__init__(cluster, owners, servers)
        self._own, self._workers, self._me = own, workers, workers[me]
        self._joined: tuple[int, int] | None = None  # worker, fetch
        # Fetches whose versions may be older than those of the last read.
        self._before = np.zeros(len(workers), "i8")
        self._claimed = 0  # what BEGUN was last
        self._here = self._stamped = True
        self._found = np.zeros(servers + 2, "i8")  # as `Neighbour.fetched` has it
        places = [replica.ctypes.data for replica in self._me.replicas]
        self._slots = {place: slot for slot, place in enumerate(places)}
        self._slot = 0  # where this read goes
        self.joined = 0
        self._asked_s = self._longest_s = 0.0

    @property
    def bytes_received(self) -> int:
        """See `RemoteReads`: what this worker fetched itself."""
        return self._own.bytes_received

    def begin(self, out: np.ndarray) -> None:
        """Join a fetch that is under way, or claim the next; see `RemoteReads.begin`.

        Args:
            out: One of this worker's replicas.
        """
        self._out, self._here = out, False
        self._slot = self._slots[out.ctypes.data]
        self._joined = None
        for k, other in enumerate(self._workers):
            if other is self._me:
                continue
            begun = observe(other.words, BEGUN)
            if begun > max(self._before[k], observe(other.words, DONE)):
                self._joined = k, begun
        if self._joined is None:
            self._claim()

    def _claim(self) -> None:
        """Say that a fetch begins, and where it goes."""
        self._claimed = REPLICAS * (self._claimed // REPLICAS + 1) + self._slot
        publish(self._me.words, BEGUN, self._claimed)
        self._own.begin(self._out)
        self._stamped = False
        self._note_stamps()

    def _note_stamps(self) -> None:
        """Once this worker's own versions are known, note which fetches have begun."""
        if not self._stamped and self._own.stamped():
            self._stamped = True
            self._before[:] = [observe(worker.words, BEGUN) for worker in self._workers]

    def fetch(self) -> None:
        """See `RemoteReads.fetch`."""
        self._asked_s = time.perf_counter()
        if self._joined is None:
            self._write()
            self._own.fetch()

    def _write(self) -> None:
        """Say that the replica of this read is written from now on."""
        mine, writes = self._me.words, WRITES + self._slot
        publish(mine, writes, observe(mine, writes) + 1)

    def advance(self) -> bool:
        """See `RemoteReads.advance`."""
        if not self._here:
            self._here = self._own_is_here() if self._joined is None else self._other_is_here()
        return self._here

    def _own_is_here(self) -> bool:
        here = self._own.advance()
        self._note_stamps()
        if not here:
            return False
        slot = self._slot
        self._found[-2] = self._own.result(self._found)
        self._found[-1] = observe(self._me.words, WRITES + slot)
        self._me.fetched[slot] = self._found
        self._me.before[slot] = self._before
        publish(self._me.words, DONE, self._claimed)
        self._longest_s = max(self._longest_s, time.perf_counter() - self._asked_s)
        return True

    def _other_is_here(self) -> bool:
        assert self._joined is not None
        other, number = self._workers[self._joined[0]], self._joined[1]
        if observe(other.words, DONE) < number:
            if time.perf_counter() - self._asked_s > PATIENCE_S + PATIENCE * self._longest_s:
                self._fetch_alone()
            return False
        slot = number % REPLICAS
        self._found[:], before = other.fetched[slot], other.before[slot].copy()
        self._write()
        for _, _, shard in self._owners:
            np.copyto(self._out[shard.range], other.replicas[slot, shard.range])
        if observe(other.words, WRITES + slot) != self._found[-1]:  # written meanwhile
            self._fetch_alone()
            return False
        self._before[:] = before
        self._before[self._joined[0]] = number
        self.joined += 1
        return True

    def _fetch_alone(self) -> None:
        """Join nobody after all."""
        self._joined = None
        self._claim()
        self.fetch()

    def result(self, versions: np.ndarray) -> int:
        """See `RemoteReads.result`."""
        for server, _, _ in self._owners:
            versions[server] = self._found[server]
        return int(self._found[-2])
