"""Acknowledged pushes to other nodes, kept until they are applied.

As in `mpips.transport.push_sender` a header announces a push, and the body waits at the sender
until the server has room. But a worker's buffer is free only when every remote server has reported
the push in its ledger. A completed send is no proof: its last bytes may be lost if a process dies.
So a push that some remote shard lacks is always in the memory of its worker's node, with the word
that announces it. Any rank there can resend it (`Sending`).

The row gradients of a push lie beside its gradient, and are treated alike.

When a worker dies, a server drops the parts of its unfinished messages. A rank of the worker's node
resends all announced pushes that are not in the shard's ledger (`mpips.failover.resending`). So a
push may arrive twice; the ledger identifies the second, which is dropped.

When a server dies, another server of its node takes its shard over (`mpips.failover.takeover`). The
new server tells each remote worker how many of its pushes are applied. When a worker receives this
from a new rank, it sends there from now on, and resends the pushes that the shard lacks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpips.kernels.atomics import observe
from mpips.mpi.start import TAG_APPLIED, Request
from mpips.mpi.world import Cluster
from mpips.transport.push import Push
from mpips.transport.push_receiver import Body, PushReceiver
from mpips.transport.push_sender import BUFFERS, PUSHED, PushSender, ShardSender

APPLIED_WORDS = 2  # number of the server, and number of this worker's applied pushes


class Sending(ShardSender):
    """Sends one worker's pushes to the present server of one remote shard. Collective: no.

    Args:
        cluster: The job's ranks.
        args: Further arguments of `ShardSender`. The worker may be dead; the packing has no state.
    """

    def __init__(self, cluster: Cluster, *args: Any) -> None:
        super().__init__(cluster, *args)
        self._begin_body = cluster.arrays.begin_send
        self._earlier_ranks: set[int] = set()
        self._unsent: list[list[Request]] = []  # to earlier servers, which may never receive it

    def follow(self, rank: int, got: int) -> None:
        """Send to a new server of the shard from now on, and resend the open pushes.

        Nothing changes if the rank is the present server, an earlier one, or dead.

        Args:
            rank: Rank that serves the shard.
            got: Number of pushes that are applied.
        """
        if rank == self.rank or rank in self._earlier_ranks | self._failures.lost:
            return
        self._earlier_ranks.add(self.rank)
        self.rank = rank
        self._unsent += self._requests
        self._requests = [[] for _ in range(BUFFERS)]
        for seq in range(got + 1, observe(self._announced.words, PUSHED) + 1):
            self.send(seq)


class AcknowledgedPushSender(PushSender):
    """A worker's pushes; see `mpips.transport.push_sender.PushSender`. Collective: no."""

    def __init__(self, cluster: Cluster, shards: Sequence[Sending]) -> None:
        super().__init__(shards)
        self._cluster, self._sending = cluster, {shard.server: shard for shard in shards}
        self._applied_counts = dict.fromkeys(self._sending, 0)

    def begin_at(self, seq: int) -> None:
        """See `PushSender.begin_at`."""
        self._applied_counts = dict.fromkeys(self._sending, seq)

    def writable(self, seq: int) -> bool:
        """See `PushSender.writable`."""
        self._receive_reports()
        told = all(count >= seq - BUFFERS for count in self._applied_counts.values())
        return told and super().writable(seq)

    def sent(self) -> bool:
        """See `PushSender.sent`."""
        self._receive_reports()
        return super().sent()

    def serving(self, server: int) -> int:
        """Return the rank that serves a remote shard, as far as this rank knows."""
        self._receive_reports()
        return self._sending[server].rank

    def _receive_reports(self) -> None:
        """Receive the servers' reports of applied pushes."""
        for source, rows in self._cluster.arrays.rows(TAG_APPLIED, APPLIED_WORDS):
            for server, count in rows.tolist():
                self._applied_counts[server] = max(self._applied_counts[server], count)
                self._sending[server].follow(source, count)


class AcknowledgedPushReceiver(PushReceiver):
    """A server's remote pushes, whose senders may die; see `PushReceiver`. Collective: no.

    Any rank may send a worker's pushes, so only their numbers determine the next one. At a snapshot
    the receiver may hold more bodies than it has places, at most two of each worker.
    """

    def __init__(self, cluster: Cluster, *args: Any) -> None:
        super().__init__(cluster, *args)
        self._more_places = BUFFERS * len(cluster.roles.workers)
        self._taken: Body | None = None
        self._reports: list[tuple[list[Request], np.ndarray]] = []

    def _is_due(self, source: int, headers: Sequence[np.ndarray], limit: np.ndarray | None) -> bool:
        """See `PushReceiver`."""
        return limit is None or any(seq <= limit[w] for ((w, seq, *_),) in headers)

    def _is_next(self, body: Body, limit: np.ndarray | None) -> bool:
        """See `PushReceiver`."""
        worker, seq = body.headers[0, :2].tolist()
        following = observe(self._applied, worker) + 1
        if seq > following or (limit is not None and following > limit[worker]):
            return False
        return self._is_here(body)

    def _unpacked(self, body: Body) -> Push:
        self._taken = body
        return super()._unpacked(body)

    def give_back(self) -> None:
        """Free the place of the last taken push, which is applied, and report to its worker."""
        super().give_back()
        body, self._taken = self._taken, None
        if body is not None:
            worker, seq = body.headers[0, :2].tolist()
            if self._cluster.roles.workers[worker] == body.source:
                self._report(worker, seq)

    def tell_all(self) -> None:
        """Report the applied pushes to workers of other nodes, which learn this rank from it."""
        for worker, rank in enumerate(self._cluster.roles.workers):
            if self._places and not self._cluster.is_local(rank):
                self._report(worker, observe(self._applied, worker))

    def _report(self, worker: int, count: int) -> None:
        rank, word = self._cluster.roles.workers[worker], np.array([self._server, count])
        begin = self._cluster.arrays.begin_send
        sent = self._cluster.failures.begin_send(begin, word, rank, TAG_APPLIED)
        self._reports = [told for told in self._reports if not self._done(told)]
        if sent is not None:
            self._reports.append(([sent], word))

    def lose(self, rank: int) -> None:
        """Drop the unfinished messages of a dead rank."""
        self._announced.pop(rank, None)
        whole = True
        for body in [body for body in self._bodies if body.source == rank]:
            whole = whole and self._is_here(body)
            if not whole:  # later pushes must not be applied before this one is resent
                self._bodies.remove(body)
                self._free_place(self._make_place())  # MPI may still write to the old place

    def received(self, worker: int) -> int:
        """Return the number of a worker's pushes applied or complete here, without a gap."""
        count = observe(self._applied, worker)
        of_worker = [body for body in self._bodies if body.headers[0, 0] == worker]
        here = [body.headers[0, 1] for body in of_worker if self._is_here(body)]
        while count + 1 in here:
            count += 1
        return count

    def close(self) -> None:
        """Wait until no message is under way. Blocks: until then."""
        self._cluster.wait(lambda: all(map(self._done, self._reports)))

    def _done(self, told: tuple[list[Request], np.ndarray]) -> bool:
        return self._cluster.failures.done(told[0])
