"""Servers and workers of one exchange, put together as `mpips.strategies.async_sgd` does."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpips.cluster.window import Field, Plan, Window
from mpips.cluster.world import Backoff, Cluster, cluster_subset
from mpips.cluster.world import free as cluster_free
from mpips.codecs import Codec
from mpips.kernels.atomics import observe
from mpips.layout import cut
from mpips.layout.roles import assign
from mpips.optim import make_rule
from mpips.optim.staleness import Staleness
from mpips.ps import store
from mpips.ps.gate import ClockGate, Gate, RoundGate
from mpips.ps.quorum import QuorumServer
from mpips.ps.store import FRESH, Puller, Server
from mpips.transport import neighbours, outbox
from mpips.transport.channel import Receiver, Sender
from mpips.transport.neighbours import Neighbour
from mpips.transport.push import Push
from mpips.transport.wire import Packing

INBOX = 2  # far bodies that a server holds


class Rig:
    """This rank's part: `server` and `receiver`, or `puller` and `sender`.

    The rule is SGD with rate -1, so that parameters are the sum of the gradients applied.
    """

    def __init__(
        self,
        cluster: Cluster,
        n: int,
        servers: int,
        consistent: bool = False,
        rule: str = "sgd",
        far: str = "get",
        share: bool = False,
        aggregate: bool = False,
        bound: int | None = None,
        codec: Codec | None = None,
        pull_codec: Codec | None = None,
        stale: Staleness = FRESH,
        backup: int | None = None,
    ) -> None:
        cluster.roles = assign("async", cluster.hosts, cluster.node_of, servers)
        self.cluster, self.roles = cluster, cluster.roles
        self.rule = make_rule(rule)
        self.shards = cut(n, servers, 8)
        self._sharing, self._aggregate, self._stale = share, aggregate, stale
        self.window = Window(cluster, [self._plan(rank, n) for rank in range(cluster.world)])
        self.workers = cluster_subset(cluster, self.roles.workers)
        self.worker = self.roles.name(cluster.rank).startswith("worker")
        if self.worker:
            self.id = self.roles.workers.index(cluster.rank)
            self.number = self.id  # of the next batch, where reads have a bound
            args = (cluster, self.window, self.id, self.shards)
            self.sender = Sender(*args, aggregate, Packing(codec, seed=1), stale.origins)
            gate: Gate | None = None if backup is None else RoundGate(self.id)
            if bound is not None:
                gate = ClockGate(self.id, bound, self.clock, lambda: self.sender.seq)
            self.puller = Puller(*args, consistent, far, gate, pull_codec)
            self.replica = np.zeros(n)
            if stale.origins:
                self.replicas = self.window.view(cluster.rank, "replicas")
            if share:
                self._share()
        else:
            self.id = self.roles.servers.index(cluster.rank)
            self.shard = self.shards[self.id]
            place = (cluster, self.window, self.id, self.shard)
            own = (*place, self.rule, lambda step: -1.0, Packing(pull_codec, seed=1), stale)
            needed = len(self.roles.workers) - (backup or 0)
            rounds = backup is not None
            self.server = QuorumServer(*own, needed=needed) if rounds else Server(*own)
            ledger, how = self.server.applied, (aggregate, codec, stale.origins)
            self.receiver = Receiver(*place, "float64", ledger, INBOX, *how)
        cluster.barrier()

    def clock(self) -> int:
        """Return the clock of the next batch."""
        return self.number // len(self.roles.workers)

    def _plan(self, rank: int, n: int) -> Plan:
        workers, servers = len(self.roles.workers), len(self.roles.servers)
        if rank in self.roles.servers:
            size = self.shards[self.roles.servers.index(rank)].size
            slots = self.rule.slots + self._stale.slots
            return Plan(store.server_fields(size, slots, "float64", workers))
        fields = outbox.worker_fields(n, servers, "float64") + store.reader_fields(servers)
        if self._aggregate:
            fields += outbox.carrier_fields(workers)
        if self._stale.origins:
            fields += (Field("replicas", "float64", (outbox.BUFFERS, n)),)
        if self._sharing:
            near = len(self._near_workers(rank))
            fields += neighbours.fields(n, servers, near, "float64", 2)
        return Plan(fields)

    def _share(self) -> None:
        near = self._near_workers(self.cluster.rank)
        workers, me = [Neighbour.of(self.window, r) for r in near], near.index(self.cluster.rank)
        self.replicas = workers[me].replicas
        self.replica = self.replicas[0]
        self.puller.share(workers, me)

    def _near_workers(self, rank: int) -> list[int]:
        node_of = self.cluster.node_of
        return [r for r in self.roles.workers if node_of[r] == node_of[rank]]

    def serve(
        self,
        apply: Callable[[Push], None],
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Take pushes until each worker has said how many it sent, and all of them are applied."""
        final: dict[int, int] = {}
        backoff = Backoff(self.cluster.crowding)
        while not self._served(final):
            push = self.receiver.take()
            if push is not None:
                apply(push)
            idle()
            self.server.serve_reads()
            for source, kind, payload in self.cluster.poll():
                if kind == "fin":
                    self.server.finished(source, payload)
                    final[self.roles.workers.index(source)] = payload
                else:
                    self.answer(source, kind, payload)
            if push is None:
                self.cluster.progress()
                backoff.pause()
            else:
                backoff.reset()

    def answer(self, source: int, kind: str, payload: Any) -> None:
        """Act on a message about far reads."""
        if kind == "read":
            self.server.want_read(source, payload)
        else:
            assert kind == "hurry", kind
            self.server.clocks.hurry(source)

    def _served(self, final: dict[int, int]) -> bool:
        ended = len(final) == len(self.roles.workers)
        applied = self.server.applied
        return ended and (
            not self.shard.size or all(observe(applied, w) == n for w, n in final.items())
        )

    def finish(self) -> None:
        """Tell the servers how many pushes this worker sent."""
        for rank in self.roles.servers:
            self.cluster.send(rank, "fin", self.sender.seq)
        here = self.workers.Ibarrier()

        def sent() -> bool:
            self.sender.resting()  # a carrier sends for the others
            return here.Test() and self.sender.sent()

        self.cluster.wait(sent)

    def free(self) -> None:
        """Free the window, views first. Collective: yes."""
        self.cluster.barrier()
        if not self.worker:
            self.receiver.close()
        cluster_free(self.workers)
        window = vars(self).pop("window")
        for part in ("puller", "sender", "server", "receiver"):
            if part in vars(self):
                vars(vars(self).pop(part)).clear()
        window.free()
