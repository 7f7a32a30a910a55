"""Servers and workers of one exchange, without the loops around them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from verdict import check

from mpips.codecs import Codec
from mpips.layout import cut
from mpips.layout.roles import assign
from mpips.mpi.collectives import cluster_subset
from mpips.mpi.collectives import free as cluster_free
from mpips.mpi.waiting import take_turns
from mpips.mpi.world import Cluster
from mpips.optim import make_rule
from mpips.ps.assemble import ServerHalf, assemble
from mpips.ps.design import Design
from mpips.transport.push import Push
from mpips.transport.wire import Packing

INBOX = 2  # remote bodies that a server holds


class Rig:
    """This rank's part: `server` and `receiver`, or `puller` and `sender`; for a ``with`` block.

    `servers` is their number, or their ranks. The rule is SGD with rate -1, so that parameters are
    the sum of the gradients applied; `more` is of `Design`. At the end of the block all ranks fail
    if any did not find what it expects.
    """

    def __init__(
        self,
        cluster: Cluster,
        n: int,
        servers: int | Sequence[int],
        remote: str = "get",
        codec: Codec | None = None,
        pull_codec: Codec | None = None,
        **more: Any,
    ) -> None:
        ranks = () if isinstance(servers, int) else servers
        count = servers if isinstance(servers, int) else len(servers)
        if count >= cluster.world:
            pytest.skip("leaves no worker")
        self.wrong: list[object] = []
        cluster.roles = assign("async", cluster.hosts, cluster.node_of, count, ranks)
        self.cluster, self.roles = cluster, cluster.roles
        self.shards = cut(n, count, 8)
        design = Design(
            self.shards, "float64", make_rule("sgd"), lambda step: -1.0, far_read=remote,
            replicas=2, inbox=INBOX, pushes=Packing(codec, seed=1),
            replies=Packing(pull_codec, seed=1), **more,
        )  # fmt: skip
        self.workers = cluster_subset(cluster, self.roles.workers)
        half = assemble(cluster, design)
        self.window = half.window
        if isinstance(half, ServerHalf):
            self.worker, self.server_half = False, half
            self.id = self.roles.servers.index(cluster.rank)
            self.shard = self.shards[self.id]
            self.server, self.receiver = half.server, half.receiver
            half.open(cluster.wait_request)
        else:
            self.worker, self.worker_half = True, half
            self.id = self.roles.workers.index(cluster.rank)
            self.puller, self.sender = half.puller, half.sender
            self.numbers = half.batch_queue.numbers  # of the next batch, where reads have a bound
            self.numbers.append(self.id)
            own = half.window.view(cluster.rank, "replicas") if half.replicas else None
            self.replicas = np.zeros((2, n)) if own is None else own
            self.replica = self.replicas[0]

    def __enter__(self) -> "Rig":
        return self

    def expect(self, good: object, *what: object) -> None:
        """Keep `what` to be told at the end, where all ranks fail, unless this is `good`."""
        if not good:
            self.wrong.append(what)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            check(self.cluster.comm, not self.wrong, self.wrong[:3])
            self.free()

    def push(
        self,
        grad: np.ndarray,
        read: np.ndarray | None = None,
        origin: np.ndarray | None = None,
        samples: int = 1,
    ) -> None:
        """Push a gradient when its buffer may be written: who still reads it would see NaN."""
        seq, sender = self.sender.seq + 1, self.sender
        self.cluster.wait(lambda: sender.writable(seq))
        sender.buffer(seq).fill(np.nan)
        sender.buffer(seq)[:] = grad
        if origin is not None:
            self.replicas[seq % 2] = origin
        versions = self.puller.versions if read is None else read
        sender.push((0, seq, seq + 1), samples, 0.0, versions, self.numbers[0])

    def serve(
        self, apply: Callable[[Push], object], idle: Callable[[], None] = lambda: None
    ) -> None:
        """Take pushes until each worker has said how many it sent, and all of them are applied."""
        final: dict[int, int] = {}

        def turn() -> bool:
            push = self.receiver.take()
            if push is not None:
                apply(push)
            idle()
            self.server.serve_reads()
            for source, kind, payload in self.cluster.poll():
                if kind == "fin":
                    self.server.finished(source, payload)
                    final[source] = payload
                self._answer(source, kind, payload)
            self.cluster.progress()
            return push is not None

        take_turns(turn, lambda: self.server.is_done(final), self.cluster.ranks_per_core)

    def serve_reads(self, update: Callable[[], object] = lambda: None) -> None:
        """Update and answer reads until every worker has seen enough."""
        enough = 0
        while enough < len(self.roles.workers):
            update()
            self.server.serve_reads()
            self.cluster.progress()
            for source, kind, payload in self.cluster.poll():
                enough += kind == "enough"
                self._answer(source, kind, payload)

    def _answer(self, source: int, kind: str, payload: Any) -> None:
        if kind == "read":
            self.server.want_read(source, payload[1:])
        elif kind == "cancel wait":
            self.server.clocks.cancel_wait(source)

    def see_enough(self) -> None:
        """End `serve_reads` of the servers."""
        self.cluster.send(self.roles.servers, "enough")

    def finish(self) -> None:
        """Tell the servers how many pushes this worker sent."""
        self.cluster.send(self.roles.servers, "fin", self.sender.seq)
        here = self.workers.Ibarrier()

        def sent() -> bool:
            self.sender.push_sender.resting()  # a node aggregator sends for the others
            return here.Test() and self.sender.push_sender.sent()

        self.cluster.wait(sent)

    def free(self) -> None:
        """Free the window, views first. Collective: yes."""
        self.cluster.barrier()
        cluster_free(self.workers)
        if self.worker:
            self.worker_half.free()
        else:
            self.server_half.close()
            self.server_half.free()
