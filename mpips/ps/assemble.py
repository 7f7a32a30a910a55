"""Assembly of the asynchronous store: window, channels, reads, dispatch.

    half = assemble(cluster, design)

A worker's half is ready to pull and push. A server's half has a shard of zeros. Fill the shard, set
its version, and call `open`: the workers' `assemble` waits for that. The loops `mpips.ps.worker`
and `mpips.ps.server` run around the halves. If remote shards can be read by Get and by reply, one
worker measures both and tells all ranks the times.
"""

import timeit
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpips.mpi.collectives import Handler, begin_broadcast, cluster_subset
from mpips.mpi.collectives import free as free_comm
from mpips.mpi.start import Comm, Request, is_open_mpi
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.ps.client import Grants, LocalReads, Pauses, Puller
from mpips.ps.consistency import ClockController, Controller, RoundController
from mpips.ps.design import Design
from mpips.ps.dispatch import BatchQueue
from mpips.ps.shard import Server
from mpips.transport.channel import Receiver, Sender, owners_of
from mpips.transport.remote_reads import GetReads, RemoteReads, ReplyReads

if TYPE_CHECKING:
    from mpips.tables.step_rows import StepRows


WAYS = ("get", "reply")
TRIES = 3  # reads by each way; one, if it takes LONG_S
LONG_S = 1.0
GAIN = 0.8  # Get is chosen if it takes at most this part of a reply's time


def agree(
    cluster: Cluster,
    design: Design,
    puller: Callable[[str], Puller] | None,
    wait: Callable[[Request], object],
) -> np.ndarray | None:
    """Have one worker read its remote shards by Get and by reply, and broadcast the times.

    Args:
        cluster: The job's ranks.
        design: Design of the store.
        puller: On workers, returns a puller that reads by "get" or by "reply"; None on servers.
        wait: Waits for a request; servers serve meanwhile.

    Returns:
        Seconds of a read by Get and of one by reply, shape (2,), float64; None if there is no
        choice.

    Collective: yes.
    """
    roles, node_of = cluster.roles, cluster.node_of
    owners = [r for r, s in zip(roles.servers, design.shards, strict=True) if s.size]
    remote = [w for w in roles.workers if any(node_of[r] != node_of[w] for r in owners)]
    decided = design.far_read != "auto" or design.consistent or design.replies.codec is not None
    if not remote or decided or design.reads_wait or design.kept or _get_keeps_memory(cluster):
        return None
    times = np.zeros(2)
    if puller is not None and cluster.rank == remote[0]:
        out = np.zeros(design.size, design.dtype)
        times[:] = [_seconds(puller(way), out) for way in WAYS]
    wait(begin_broadcast(cluster.comm, times, remote[0]))
    return times


def _seconds(puller: Puller, out: np.ndarray) -> float:
    first = timeit.timeit(lambda: puller.pull(out), number=1)
    more = TRIES - 1 if first < LONG_S else 0
    return min([first, *timeit.repeat(lambda: puller.pull(out), number=1, repeat=more)])


def _get_keeps_memory(cluster: Cluster) -> bool:
    """Return whether Gets leak memory of the owners, as in Open MPI 5.0 with nodes on one host.

    Three readers at once left 7 KB of each 16.8 MB behind, seven readers 30 to 70 KB.
    """
    return is_open_mpi() and len(set(cluster.hosts)) < cluster.nodes


def way_of(design: Design, times: np.ndarray | None) -> str:
    """Return how workers read remote shards, given the result of `agree`."""
    if times is not None:
        return faster(times)
    return "reply" if design.far_read == "auto" else design.far_read


def faster(times: np.ndarray) -> str:
    """Return the faster way; in a tie a reply, which uses only one direction of the link."""
    return "get" if times[0] < GAIN * times[1] else "reply"


def announcement(times: np.ndarray) -> str:
    """Return a line for people with the measured times."""
    get_ms, reply_ms = (1e3 * times).tolist()
    return f"remote reads by {faster(times)}: {get_ms:.3g} ms by Get, {reply_ms:.3g} ms by reply"


class Half:
    """One rank's half of a store.

    Attributes:
        window: The window of the store.
    """

    def __init__(self, window: Window) -> None:
        self.window = window

    def free(self) -> None:
        """Free the window; the parts must not be used afterwards. May be called twice.

        Collective: yes.
        """
        self.window.free()


class WorkerHalf(Half):
    """A worker's half of a store.

    Attributes:
        puller: Reads the shards.
        sender: Sends gradients.
        batch_queue: Batches assigned to this worker.
        replicas: Replicas that reads go to if they are in shared memory; else empty.
        remote_way: How remote shards are read, "get" or "reply".
        handlers: Handler of each kind of message about a dead rank.
        rows: Reads and pushes rows of tables; None without tables.
    """

    rows: "StepRows | None"

    def __init__(self, cluster: Cluster, window: Window, design: Design) -> None:
        super().__init__(window)
        worker = cluster.roles.workers.index(cluster.rank)
        self._cluster, self._design, self._worker = cluster, design, worker
        self.handlers: dict[str, Handler] = {}
        if design.kept:
            from mpips.failover.resending import Resender

            self.handlers["lacking"] = Resender(cluster, window, design).send
        self.batch_queue = BatchQueue(cluster, window, worker, design.ahead)
        self.sender = Sender(cluster, window, worker, design.shards, design.push_options)
        self._local, self._remote = owners_of(cluster, design.shards, bool(design.tables))
        self._plain = self._make_puller("get")
        cluster.barrier()  # the servers have filled their shards
        times = agree(cluster, design, self._make_puller, cluster.wait_request)
        self.remote_way = way_of(design, times)
        held = Pauses(cluster, window, self._local, worker) if design.consistent else None
        ranks = design.sharing(cluster, cluster.rank)
        self.puller = self._make_puller(self.remote_way, held, self._make_controller(), ranks)
        self.rows = None
        if design.tables:
            from mpips.tables.step_rows import StepRows

            # If reads are consistent, the replay log would miss a read before its step.
            asks, bounded = not design.consistent, design.bound is not None
            reading = design.replies.codec, asks and not bounded, held, asks and bounded
            self.rows = StepRows(cluster, window, design.tables, *reading)
        staged = bool(ranks) or design.stale.origins
        self.replicas = list(window.view(cluster.rank, "replicas")) if staged else []

    def writable(self, seq: int, patience_ns: int = 0) -> bool:
        """Advance the current read, and return whether the buffer of push `seq` may be written.

        See `mpips.transport.channel.Sender.writable`.
        """
        if self.puller.reading:
            self.puller.advance()
        return self.sender.writable(seq, patience_ns)

    def under_way(self) -> bool:
        """Return whether messages to or from other nodes are under way; advance them.

        Blocks: no.
        """
        asks = self.rows is not None and self.rows.asks
        return not self.sender.push_sender.resting() or self.puller.reading or asks

    def advance(self) -> None:
        """Advance reads and pushes that are under way. Blocks: no."""
        if self.puller.reading:
            self.puller.advance()
        if self.rows is not None:
            self.rows.advance()
        self.sender.push_sender.sent()

    def abandon(self) -> None:
        """End the current reads without their results. Blocks: until they are complete."""
        self.puller.abandon()
        if self.rows is not None:
            self.rows.abandon()

    def leave(self) -> None:
        """Tell the servers that this worker reads no more, if ranks may die. Blocks: no."""
        if self._design.kept:
            self._cluster.send(self._cluster.roles.servers, "whole")

    def pull_final(self, out: np.ndarray) -> np.ndarray:
        """Read every shard into `out`, after the servers have applied their last push.

        Args:
            out: The replica, shape (n_params,), of the layout's dtype.

        Returns:
            Version of each shard, shape (servers,), dtype int64.
        """
        return self._plain.pull(out)

    def _make_puller(
        self,
        way: str,
        held: Pauses | None = None,
        controller: Controller | None = None,
        ranks: Sequence[int] = (),
    ) -> Puller:
        """Return a puller that reads remote shards by "get" or "reply".

        Args:
            way: "get" or "reply".
            held: Pauses servers of this node for consistent reads; None for other reads.
            controller: Decides when a read may begin; None if reads do not wait.
            ranks: Workers that share their remote reads, this one included; empty for none.
        """
        window, shards = self.window, self._design.shards
        local = LocalReads(window, self._local, held)
        remote = self._remote_reads(way, held is not None, controller)
        if ranks:
            from mpips.transport.single_flight import Neighbour, SingleFlightReads

            neighbours = [Neighbour.of(window, rank) for rank in ranks]
            args = self._cluster, self._remote, len(shards), remote, neighbours
            remote = SingleFlightReads(*args, ranks.index(self._cluster.rank))
        puller = Puller(self._cluster, shards, local, remote, controller)
        puller.looks_ahead &= held is None  # an early read would pause servers for longer
        return puller

    def _remote_reads(
        self, way: str, consistent: bool, controller: Controller | None
    ) -> RemoteReads:
        args = self._cluster, self._remote, len(self._design.shards)
        codec, needs = self._design.replies.codec, controller.needs if controller else tuple
        if not self._remote:
            return RemoteReads(*args)
        serving = None
        if self._design.kept:
            from mpips.transport.acknowledged import AcknowledgedPushSender

            assert isinstance(self.sender.push_sender, AcknowledgedPushSender), "as it makes one"
            serving = self.sender.push_sender.serving
        if way == "get" and not (serving or consistent or controller):
            return GetReads(*args, self.window)
        return ReplyReads(*args, consistent, codec, needs, serving)

    def _make_controller(self) -> Controller | None:
        """Return the controller of reads; None if reads do not wait."""
        window, workers = self.window, len(self._cluster.roles.workers)
        local = [(window.view(r, "header"), window.view(r, "applied")) for _, r, _ in self._local]
        if self._design.backup is not None:
            return RoundController(self._worker, local)
        if self._design.bound is None:
            return None
        batch_queue, sender = self.batch_queue, self.sender  # no cycle of references with `self`
        clock, own = lambda: batch_queue.numbers[0] // workers, lambda: sender.seq
        return ClockController(self._worker, local, self._design.bound, clock, own)


class ServerHalf(Half):
    """A server's half of a store.

    Attributes:
        design: Design of the store.
        server: Applies pushes to the shard.
        receiver: Receives the pushes.
        servers: Communicator of all servers.
    """

    def __init__(self, cluster: Cluster, window: Window, design: Design, servers: Comm) -> None:
        super().__init__(window)
        self._cluster, self.design, self.servers = cluster, design, servers
        self.server, self.receiver = self.serve(cluster.roles.servers.index(cluster.rank))
        if self.server.undo is not None:
            self.server.undo.sign()

    def serve(self, number: int) -> tuple[Server, Receiver]:
        """Make the server and the receiver of a shard.

        Args:
            number: Number of the shard: this server's, or one of this node that it takes over.
        """
        cluster, window, design = self._cluster, self.window, self.design
        rank, shard = cluster.roles.servers[number], design.shards[number]
        segment = cluster, window, number
        if design.backup is None:
            server = Server(*segment, design)
        else:
            from mpips.ps.first_n import FirstNServer

            server = FirstNServer(*segment, design)
        if design.consistent:
            server.hold_for(Grants(cluster, window, number))
        if design.tables:
            from mpips.tables.server import OwnedRows

            server.own(OwnedRows(server, segment, design.tables, design.replies))
        if rank in design.takes_over:
            from mpips.failover.undo_log import keep_undo

            keep_undo(server, window, rank)
        options = design.dtype, server.applied, design.push_options
        return server, Receiver(*segment, shard, *options)

    def open(self, wait: Callable[[Request], object]) -> np.ndarray | None:
        """Let the workers in: the shard is complete.

        Args:
            wait: Waits for a request, and serves reads meanwhile.

        Returns:
            See `agree`.

        Collective: yes.
        """
        self._cluster.barrier()
        return agree(self._cluster, self.design, None, wait)

    def close(self) -> None:
        """Stop serving. Collective: over the servers, unless one of them has died."""
        self.server.close()
        self.receiver.close()
        if not self._cluster.failures.left_out.intersection(self._cluster.roles.servers):
            free_comm(self.servers)


def assemble(cluster: Cluster, design: Design) -> WorkerHalf | ServerHalf:
    """Assemble this rank's half of a store.

    Args:
        cluster: The job's ranks, with their roles.
        design: Design of the store.

    Raises:
        UserError: If shared memory is too small.

    Collective: yes. Blocks: on workers, until the servers have called `open`.
    """
    window = Window(cluster, design.plans(cluster), design.shared, not design.kept)
    servers = cluster_subset(cluster, cluster.roles.servers)
    if cluster.rank in cluster.roles.servers:
        return ServerHalf(cluster, window, design, servers)
    return WorkerHalf(cluster, window, design)
