"""Gradients from a worker to the servers; both halves.

On a node the gradient stays in the buffer where the worker computed it; a worker has two, in shared
memory. The worker fills buffer ``seq % 2``, writes the push's header beside it and publishes
``seq``. Each server applies its slice in place and publishes ``applied[worker]``. The buffer is
free once every local server has applied the push, and it has left for every remote one (see
`mpips.transport.push_sender` and `mpips.transport.push_receiver`).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpips.datasets.ledger import Range
from mpips.kernels.atomics import find_ahead, no_limit, observe
from mpips.kernels.exchange import announce, reached
from mpips.kernels.vectors import addresses_of
from mpips.layout import Shard
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.transport.push import Push
from mpips.transport.push_receiver import PushReceiver
from mpips.transport.push_sender import (
    BUFFERS,
    PUSHED,
    Announced,
    NodeAggregator,
    NodeMember,
    Owner,
    PushOptions,
    PushSender,
    ShardSender,
    aggregators,
)

if TYPE_CHECKING:
    from mpips.transport.acknowledged import AcknowledgedPushReceiver
    from mpips.transport.rows import RowsPacker, Section, Sections


def rows_packer(
    cluster: Cluster, window: Window, worker: int, server: int, options: PushOptions
) -> "RowsPacker | None":
    """Return the packer of a worker's rows for a remote server; None without tables.

    Args:
        cluster: The job's ranks.
        window: Window with the worker's segment.
        worker: Number of the worker, on this node.
        server: Number of the server.
        options: Options of pushes.
    """
    if not options.tables:
        return None
    from mpips.transport.rows import RowsPacker

    roles = cluster.roles
    args = options.tables, len(roles.servers), server, options.packing, worker
    return RowsPacker(window, roles.workers[worker], *args)


def owners_of(
    cluster: Cluster, shards: Sequence[Shard], has_tables: bool
) -> tuple[list[Owner], list[Owner]]:
    """Return the servers that pushes go to: those of this node, and those of other nodes."""
    servers = zip(range(len(shards)), cluster.roles.servers, shards, strict=True)
    owners = [owner for owner in servers if owner[2].size or has_tables]
    local = [owner for owner in owners if cluster.is_local(owner[1])]
    return local, [owner for owner in owners if not cluster.is_local(owner[1])]


class Sender:
    """A worker's half of the channel. Collective: no.

    Args:
        options: Options of pushes.

    Attributes:
        seq: Number of the last push.
        awaited: Address of the word of each local server with the number of this worker's applied
            pushes.
    """

    def __init__(
        self,
        cluster: Cluster,
        window: Window,
        worker_id: int,
        shards: Sequence[Shard],
        options: PushOptions,
    ) -> None:
        self._worker = worker_id
        self._me = me = Announced.of(window, worker_id, cluster.rank, options.origins)
        reals = me.headers.view(np.float64)
        self._slots = list(zip(me.headers, reals, me.versions, strict=True))
        local, remote = owners_of(cluster, shards, bool(options.tables))
        ledgers = (window.view(rank, "applied") for _, rank, _ in local)
        self._words, self.awaited = me.words, addresses_of(ledgers, worker_id)
        self._crosses = bool(remote)
        self.push_sender = PushSender()
        if remote:
            self.push_sender = self._make_push_sender(cluster, window, remote, options)
        self.seq = 0

    def begin_at(self, seq: int) -> None:
        """Set the number of the first push to ``seq + 1``.

        Args:
            seq: Number of this worker's pushes in the servers' ledgers.
        """
        self.seq = seq
        self.push_sender.begin_at(seq)

    def _make_push_sender(
        self, cluster: Cluster, window: Window, remote: Sequence[Owner], options: PushOptions
    ) -> PushSender:
        me, packing = self._me, options.packing
        packers = [rows_packer(cluster, window, self._worker, k, options) for k, *_ in remote]
        pairs = list(zip(remote, packers, strict=True))
        if options.kept:
            assert not options.aggregate, "then a death ends the job"
            from mpips.transport.acknowledged import AcknowledgedPushSender, Sending

            sending = [Sending(cluster, owner, me, packing, rows) for owner, rows in pairs]
            return AcknowledgedPushSender(cluster, sending)
        shards = [ShardSender(cluster, owner, me, packing, rows) for owner, rows in pairs]
        workers = enumerate(cluster.roles.workers)
        members = [Announced.of(window, w, r) for w, r in workers if cluster.is_local(r)]
        if not options.aggregate or len(members) == 1:
            return PushSender(shards, packing.before)
        aggregator = aggregators(cluster, options.aggregate)[cluster.rank]
        carried = window.view(aggregator, "carried")
        if aggregator != cluster.rank:
            return NodeMember(carried, me)
        return NodeAggregator(shards, carried, me, members, packing.before)

    def buffer(self, seq: int) -> np.ndarray:
        """Return the gradient buffer of push `seq`, shape (n,)."""
        return self._me.grads[seq % BUFFERS]

    def writable(self, seq: int, patience_ns: int = 0) -> bool:
        """Return whether the buffer of push `seq` may be written: its last push has left it.

        Args:
            seq: Number of the push.
            patience_ns: Longest time to wait, in nanoseconds, if no push crosses nodes.
        """
        if self._crosses:
            return self.push_sender.writable(seq) and reached(self.awaited, seq - BUFFERS, 0)
        return reached(self.awaited, seq - BUFFERS, patience_ns)

    def push(
        self,
        batch: Range,
        samples: int,
        loss: float,
        versions: np.ndarray,
        number: int = 0,
        factor: float = 1.0,
    ) -> int:
        """Announce the gradient in ``buffer(seq + 1)``. Blocks: no.

        Args:
            batch: Batch of the gradient.
            samples: Samples in the batch.
            loss: Mean loss over the batch.
            versions: Version of each shard that the worker read, shape (shards,), dtype int64.
            number: Number of the batch, in the order in which batches are assigned.
            factor: Factor of the learning rate.

        Returns:
            Number of the push.
        """
        self.seq = seq = self.seq + 1
        slot = self._slots[seq % BUFFERS]
        announce(
            self._words, *slot, versions, self._worker, seq, *batch, samples, loss, number, factor
        )
        if self._crosses:
            self.push_sender.send(seq)
        return seq


class _Slot(NamedTuple):
    """A server's views of one buffer of a local worker; made once.

    Attributes:
        header: Header of the push, shape (HEADER_WORDS,), dtype int64.
        version: Version of the server's shard that the worker read, shape (1,), dtype int64.
        grad: Gradient of the shard, shape (shard.size,).
        origin: Parameters of the gradient, shape (shard.size,); None if the server does not need
            them.
        rows: Returns the push's gradients of the server's rows; None without tables.
    """

    header: np.ndarray
    version: np.ndarray
    grad: np.ndarray
    origin: np.ndarray | None
    rows: "Callable[[], tuple[Section, ...]] | None"

    @classmethod
    def of(
        cls, source: Announced, seq: int, server: int, shard: Shard, tables: "Sequence[Sections]"
    ) -> "_Slot":
        """Return the views of the buffer of push `seq`."""
        k = seq % BUFFERS
        version = source.versions[k, server : server + 1]
        grad = source.grads[k, shard.range]
        rows = (lambda: tuple(table.of(k, server) for table in tables)) if tables else None
        return cls(source.headers[k], version, grad, source.origin(seq, shard), rows)

    def push(self) -> Push:
        """Return the push in the buffer."""
        push = Push.unpack(self.header, self.grad, self.origin)
        push.version = self.version.item()
        if self.rows is not None:
            push.rows = self.rows()
        return push


def _sections_of(window: Window, rank: int, options: PushOptions) -> "list[Sections]":
    if not options.tables:
        return []
    from mpips.transport.rows import Sections

    return [Sections(window, rank, table.name) for table in options.tables]


class Receiver:
    """A server's half of the channel. Collective: no.

    Args:
        applied: The server's ledger, shape (workers,); the store writes it.
        options: Options of pushes.

    Attributes:
        pushed: Address of each local worker's number of announced pushes.
        workers: Numbers of these workers.
        next: Index of the worker that is checked first.
    """

    def __init__(
        self,
        cluster: Cluster,
        window: Window,
        server_id: int,
        shard: Shard,
        dtype: str,
        applied: np.ndarray,
        options: PushOptions,
    ) -> None:
        self._takes_pushes = shard.size > 0 or bool(options.tables)
        self._applied = applied
        workers = list(enumerate(cluster.roles.workers))
        local = [(w, r) for w, r in workers if cluster.is_local(r)]
        announced = [Announced.of(window, w, r, options.origins) for w, r in local]
        slots = range(BUFFERS)
        rows = [_sections_of(window, r, options) for _, r in local]
        self._slots = [
            [_Slot.of(a, k, server_id, shard, tables) for k in slots]
            for a, tables in zip(announced, rows, strict=True)
        ]
        self._sources = announced
        self.pushed = addresses_of((source.words for source in announced), PUSHED)
        self._local = [source.worker for source in announced]
        self.workers = np.array(self._local, np.int64)
        self._no_limit = no_limit(applied.size)
        self.next = 0
        self._has_remote = len(local) < len(workers)
        kind: type[PushReceiver] = PushReceiver
        if options.kept:
            from mpips.transport.acknowledged import AcknowledgedPushReceiver

            kind = AcknowledgedPushReceiver
        self._remote = kind(cluster, server_id, shard.size, dtype, applied, options)
        self._remote_first = False

    @property
    def bodies(self) -> int:
        """Number of remote bodies that are here or arriving, and not yet taken."""
        return self._remote.bodies

    def take(self, limit: np.ndarray | None = None, fetch: bool = True) -> Push | None:
        """Return the next push, or None if none is here. Blocks: no.

        The push before it must have been applied: this call frees its memory.

        Args:
            limit: Take only pushes with ``seq <= limit[worker]``, shape (workers,). A message with
                pushes of several workers may contain later ones.
            fetch: Whether to take local pushes, and to begin receiving further remote bodies.
        """
        if not self._has_remote:
            return self._take_local(limit) if fetch and self._takes_pushes else None
        self._remote.give_back()
        if not self._takes_pushes:
            return None
        self._remote.attend(limit, fetch)
        self._remote_first = not self._remote_first  # alternate, so that neither side starves
        if self._remote_first:
            return self._remote.take(limit) or (self._take_local(limit) if fetch else None)
        return (self._take_local(limit) if fetch else None) or self._remote.take(limit)

    @property
    def places(self) -> np.ndarray:
        """Addresses of each local worker's headers, versions read and gradients; shape (n, 6)."""
        found = [
            [getattr(slot, name) for name in ("header", "version", "grad") for slot in slots]
            for slots in self._slots
        ]
        return np.array([addresses_of(arrays) for arrays in found]).reshape(-1, 3 * BUFFERS)

    def announced(self, worker: int) -> int:
        """Return the number of pushes that a local worker has announced; final if it is dead."""
        return observe(self._sources[self._local.index(worker)].words, PUSHED)

    @property
    def acknowledged(self) -> "AcknowledgedPushReceiver":
        """The receiver of remote pushes if ranks may die."""
        from mpips.transport.acknowledged import AcknowledgedPushReceiver

        assert isinstance(self._remote, AcknowledgedPushReceiver), (
            "else a death of another node ends the job"
        )
        return self._remote

    def find(self, worker: int, seq: int) -> Push | None:
        """Return an announced push of a local worker that some server has not applied.

        None for a remote worker.
        """
        if worker not in self._local:
            return None
        return self._slots[self._local.index(worker)][seq % BUFFERS].push()

    def close(self) -> None:
        """Cancel the posted receives. Blocks: until MPI has released them."""
        self._remote.close()

    def _take_local(self, limit: np.ndarray | None) -> Push | None:
        bounds = self._no_limit if limit is None else limit
        found = find_ahead(self.pushed, self.workers, self._applied, bounds, self.next)
        if found < 0:
            return None
        self.next = (found + 1) % len(self._local)  # round robin, so that no worker starves
        seq = observe(self._applied, self._local[found]) + 1
        return self._slots[found][seq % BUFFERS].push()
