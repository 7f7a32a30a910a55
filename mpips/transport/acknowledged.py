"""Acknowledged pushes to other nodes, kept until they are applied.

As in `mpips.transport.push_sender` a header announces a push, and the body waits at the sender
until the server has room. But a worker's buffer is free only when every remote server has said that
the push is in its ledger: a send that is complete says nothing of bytes that were on their way when
a process died. So whatever of a push some remote shard is without lies in the memory of its
worker's node, with the word that announces it, and any rank there can send it again (`Sending`).

What it has for rows of tables lies beside the gradient, and goes the same way.

When a worker dies, a server drops what has come of it in part, and has a rank of its node send all
that it announced and the shard's ledger is without (`mpips.failover.resending`). A push may so come
twice. The ledger says which, and the second is dropped.

When a server dies and another one of its node takes its shard over (`mpips.failover.takeover`),
that one says to each remote worker how many of its pushes are applied. A worker that hears that of
another rank than before sends there from now on, and again what the shard is without.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.kernels.atomics import observe
from mpips.mpi.start import TAG_APPLIED, Request
from mpips.mpi.world import Cluster
from mpips.transport.push import Push
from mpips.transport.push_receiver import Body, PushReceiver
from mpips.transport.push_sender import BUFFERS, PUSHED, Announced, Owner, PushSender, ShardSender
from mpips.transport.wire import Packing

if TYPE_CHECKING:
    from mpips.transport.rows import RowsPacker

APPLIED_WORDS = 2  # number of the server, and pushes of this worker


class Sending(ShardSender):
    """Sends one worker's pushes for one remote shard, whoever serves it. Collective: no.

    Args:
        cluster: The job's ranks.
        owner: Number and rank of the server, and its shard.
        of: The worker, of this node, dead or alive.
        packing: How bodies are packed, without a state.
        rows: Packs the rows of pushes, where there are tables.
    """

    def __init__(
        self, cluster: Cluster, owner: Owner, of: Announced, packing: Packing,
        rows: "RowsPacker | None" = None,
    ) -> None:  # fmt: skip
        super().__init__(cluster, owner, of, packing, rows)
        self._begin_body = cluster.arrays.begin_send
        self._before: set[int] = set()
        self._unsent: list[list[Request]] = []  # to those, who may never take it

    def follow(self, rank: int, got: int) -> None:
        """Send to another rank, if it is one that has taken the shard over; what is open, again.

        Args:
            rank: That has said so.
            got: How many pushes are applied.
        """
        if rank == self.rank or rank in self._before:
            return
        self._before.add(self.rank)
        self.rank = rank
        self._unsent += self._requests
        self._requests = [[] for _ in range(BUFFERS)]
        for seq in range(got + 1, observe(self._of.words, PUSHED) + 1):
            self.send(seq)


class AcknowledgedPushSender(PushSender):
    """A worker's pushes; see `mpips.transport.push_sender.PushSender`. Collective: no."""

    _shards: Sequence[Sending]

    def __init__(self, cluster: Cluster, shards: Sequence[Sending]) -> None:
        super().__init__(shards)
        self._cluster, self._sending = cluster, {shard.server: shard for shard in shards}
        self._told = dict.fromkeys(self._sending, 0)

    def begin_at(self, seq: int) -> None:
        """See `PushSender.begin_at`."""
        self._told = dict.fromkeys(self._sending, seq)

    def writable(self, seq: int) -> bool:
        """See `PushSender.writable`."""
        self._hear()
        told = all(count >= seq - BUFFERS for count in self._told.values())
        return told and super().writable(seq)

    def sent(self) -> bool:
        """See `PushSender.sent`."""
        self._hear()
        return super().sent()

    def serving(self, server: int) -> int:
        """Return the rank that serves a remote shard, as far as this rank has heard."""
        self._hear()
        return self._sending[server].rank

    def _hear(self) -> None:
        """Note what remote servers say that they have applied."""
        for source, rows in self._cluster.arrays.rows(TAG_APPLIED, APPLIED_WORDS):
            for server, count in rows.tolist():
                self._told[server] = max(self._told[server], count)
                self._sending[server].follow(source, count)


class AcknowledgedPushReceiver(PushReceiver):
    """A server's remote pushes, whose senders may die; see `PushReceiver`. Collective: no.

    Any rank may send a worker's pushes, so that their numbers alone say which is next. At a
    snapshot it may hold more bodies than there are places for: two of each worker at most.
    """

    def __init__(self, cluster: Cluster, *args: Any) -> None:
        super().__init__(cluster, *args)
        self._more = BUFFERS * len(cluster.roles.workers)
        self._taken: Body | None = None
        self._telling: list[tuple[list[Request], np.ndarray]] = []

    def _owes(self, source: int, headers: Sequence[np.ndarray], limit: np.ndarray | None) -> bool:
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
        """Free the place of the push taken last, which is applied, and tell its worker."""
        super().give_back()
        body, self._taken = self._taken, None
        if body is not None:
            worker, seq = body.headers[0, :2].tolist()
            if self._cluster.roles.workers[worker] == body.source:
                self._tell(worker, seq)

    def tell_all(self) -> None:
        """Tell the workers of other nodes what is applied, and so who serves the shard."""
        for worker, rank in enumerate(self._cluster.roles.workers):
            if self._places and not self._cluster.is_local(rank):
                self._tell(worker, observe(self._applied, worker))

    def _tell(self, worker: int, count: int) -> None:
        rank, word = self._cluster.roles.workers[worker], np.array([self._server, count])
        begin = self._cluster.arrays.begin_send
        sent = self._cluster.failures.begin_send(begin, word, rank, TAG_APPLIED)
        self._telling = [told for told in self._telling if not self._done(told)]
        if sent is not None:
            self._telling.append(([sent], word))

    def lose(self, rank: int) -> None:
        """Drop what has come in part of a rank that has died."""
        self._announced.pop(rank, None)
        whole = True
        for body in [body for body in self._coming if body.source == rank]:
            whole = whole and self._is_here(body)
            if not whole:  # nothing behind it may be applied before it comes again
                self._coming.remove(body)
                self._free_place(self._make_place())  # MPI may still write to the other

    def received(self, worker: int) -> int:
        """Return how many pushes of a worker are applied, or here."""
        count = observe(self._applied, worker)
        of_worker = [body for body in self._coming if body.headers[0, 0] == worker]
        here = [body.headers[0, 1] for body in of_worker if self._is_here(body)]
        while count + 1 in here:
            count += 1
        return count

    def close(self) -> None:
        """Wait until nothing is under way. Blocks: until then."""
        self._cluster.wait(lambda: all(map(self._done, self._telling)))

    def _done(self, told: tuple[list[Request], np.ndarray]) -> bool:
        return self._cluster.failures.done(told[0])
