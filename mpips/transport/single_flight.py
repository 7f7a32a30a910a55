"""Single-flight reads of remote shards: one worker fetches, others copy.

The workers of a node keep their replicas in shared memory. A worker that reads the remote shards
first looks at its neighbours. It may join a neighbour's fetch under way, which it waits for and
copies. That fetch must have begun after this worker knew the versions of its last read, so that
versions never decrease. Otherwise the worker fetches the shards itself, and publishes that. There
is no leader, and every word has one writer.

If the link is the bottleneck, the workers fall into step, and the node takes each shard once: when
one of two concurrent fetches ends, its worker begins another, which the other worker can join. A
joined read is older than an own read by at most one transfer. It has the versions of the fetch, so
staleness stays exact.

A worker fetches for itself in two cases: if it waits longer than a read should take, since its
neighbour may be stopped; and if it copies so late that the neighbour's next read already arrives in
the same replica, since MPI may have written half an element.
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
WRITES = 2  # and one word a replica: number of its writes, by joined reads too
REPLICAS = 2  # at most: the one in use, and the next one
PATIENCE = 4.0  # times the longest read so far
PATIENCE_S = 0.05  # and at least this


def fields(n: int, servers: int, workers: int, dtype: str, replicas: int) -> tuple[Field, ...]:
    """Return the fields of a worker's segment through which others join its reads.

    Args:
        n: Number of parameters.
        servers: Number of servers.
        workers: Number of workers on the node that share.
        dtype: dtype of the parameters.
        replicas: Number of replicas of each worker, 1 or 2.
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
        words: Fetches begun and done, and the writes of its replicas, shape (8,), dtype int64.
        fetched: Versions of each replica's fetch, number of torn reads, and writes of the replica
            including this one, shape (REPLICAS, servers + 2), dtype int64.
        before: Fetches that each worker of the node had begun when the versions were known, shape
            (REPLICAS, workers of the node), dtype int64.
        replicas: Replicas of the parameters, shape (replicas, n_params).
    """

    words: np.ndarray
    fetched: np.ndarray
    before: np.ndarray
    replicas: np.ndarray

    @classmethod
    def of(cls, window: Window, rank: int) -> "Neighbour":
        """Return the worker at a rank."""
        names = ("fetches", "fetched", "before", "replicas")
        return cls(*(window.view(rank, name) for name in names))


class SingleFlightReads(RemoteReads):
    """A worker's remote reads, own or joined. Collective: no.

    Args:
        own: This worker's own reads.
        workers: Workers of the node that share, including this one, in the same order on each.
        me: Index of this worker in `workers`.
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
        self._joined: tuple[int, int] | None = None  # worker and fetch
        # Fetches whose versions may be older than those of the last read.
        self._before = np.zeros(len(workers), "i8")
        self._claimed = 0  # last value of BEGUN
        self._here = self._stamped = True
        self._found = np.zeros(servers + 2, "i8")  # in the form of `Neighbour.fetched`
        places = [replica.ctypes.data for replica in self._me.replicas]
        self._slots = {place: slot for slot, place in enumerate(places)}
        self._slot = 0  # replica of this read
        self.joined = 0
        self._asked_s = self._longest_s = 0.0

    @property
    def bytes_received(self) -> int:
        """See `RemoteReads`: bytes that this worker fetched itself."""
        return self._own.bytes_received

    def begin(self, out: np.ndarray) -> None:
        """Join a fetch under way, or claim the next; see `RemoteReads.begin`.

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
        """Publish that a fetch begins, and its replica."""
        self._claimed = REPLICAS * (self._claimed // REPLICAS + 1) + self._slot
        publish(self._me.words, BEGUN, self._claimed)
        self._own.begin(self._out)
        self._stamped = False
        self._note_stamps()

    def _note_stamps(self) -> None:
        """Note the begun fetches, once this worker's own versions are known."""
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
        """Publish that the replica of this read is written from now on."""
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
        """Fetch the shards without joining."""
        self._joined = None
        self._claim()
        self.fetch()

    def result(self, versions: np.ndarray) -> int:
        """See `RemoteReads.result`."""
        for server, _, _ in self._owners:
            versions[server] = self._found[server]
        return int(self._found[-2])
