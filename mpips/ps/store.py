"""Pull and push: the worker's half and the server's half, side by side.

A server's segment is ``header | params | slots | applied``. Around every update it publishes
two words: the version begun before the first store, the version committed after the last. A
worker observes the committed version, copies, and then observes the version begun: if an update
had begun that was not yet committed when the copy started, the read may be torn (a seqlock
without the retry; Boehm, MSPC 2012). It is counted, and used: as in Hogwild, a torn read is one
more kind of noise. With ``read="consistent"`` the worker asks first, and the server holds
between two updates until it has read.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpips.cluster.window import Field, Window
from mpips.cluster.world import Cluster
from mpips.codecs import Codec
from mpips.kernels.atomics import find_ahead, no_limit, observe, publish
from mpips.kernels.vectors import addresses_of
from mpips.layout import Shard
from mpips.optim import Rule
from mpips.optim.staleness import Staleness
from mpips.ps.gate import Clocks, Gate, Needs
from mpips.transport.far import (
    BEGUN,
    CLOCK,
    COMMITTED,
    STATE,
    FarReads,
    GetReads,
    Replies,
    ReplyReads,
)
from mpips.transport.neighbours import Neighbour, SharedReads
from mpips.transport.push import Push
from mpips.transport.wire import Packing

STARTING, SERVING, CLOSED = range(3)  # values of STATE
BLOCK_BYTES = 1 << 20  # between two of an update a server of several nodes enters MPI
FRESH = Staleness()
STALENESS_BINS = 256  # the last bin holds everything above


def server_fields(size: int, slots: Sequence[str], dtype: str, workers: int) -> tuple[Field, ...]:
    """Return the fields of a server's segment for a shard of `size` elements."""
    return (
        Field("header", "i8", (8,)),
        Field("params", dtype, (size,)),
        *(Field(f"slots/{name}", dtype, (size,)) for name in slots),
        Field("applied", "i8", (workers,)),
        Field("granted_reads", "i8", (workers,)),
    )


def reader_fields(servers: int) -> tuple[Field, ...]:
    """Return the fields of a worker's segment that carry its consistent reads."""
    return (Field("wants", "i8", (servers,)), Field("reads", "i8", (servers,)))


class Puller:
    """A worker's half of the store. Collective: no.

    Args:
        consistent: Whether each shard is read between two updates of its server.
        far: How the shards of other nodes are read, "get" or "reply"; consistent ones by reply.
        gate: What a read waits for, if it does; then far shards are read by reply.
        codec: What replies are packed by, or None.
    """

    def __init__(
        self,
        cluster: Cluster,
        window: Window,
        worker_id: int,
        shards: Sequence[Shard],
        consistent: bool = False,
        far: str = "get",
        gate: Gate | None = None,
        codec: Codec | None = None,
    ) -> None:
        self._cluster, self._window, self._worker = cluster, window, worker_id
        owners = [(k, r, shards[k]) for k, r in enumerate(cluster.roles.servers) if shards[k].size]
        self._near = [
            (k, shard, window.view(r, "header"), window.view(r, "params"))
            for k, r, shard in owners
            if cluster.near(r)
        ]
        self._far_owners = [(k, r, shard) for k, r, shard in owners if not cluster.near(r)]
        near = [r for _, r, _ in owners if cluster.near(r)]
        self.gate, self.usable = gate, True  # whether the gate accepts what was read last
        if gate is not None:
            gate.near = [(window.view(r, "header"), window.view(r, "applied")) for r in near]
        self._clocks = np.zeros(len(shards), "i8")
        self.versions = np.zeros(len(shards), "i8")
        self._granted = {
            k: window.view(r, "granted_reads") for k, r, _ in owners if cluster.near(r)
        }
        self._wants = window.view(cluster.rank, "wants")
        self._reads = window.view(cluster.rank, "reads")
        self._count, self._consistent, self._codec = 0, consistent, codec
        self._out = np.zeros(0)
        self.reading = False
        self._shared: SharedReads | None = None
        self.read_far_by(far)
        self.torn = 0
        self.bytes = 0

    def read_far_by(self, way: str) -> None:
        """Read the far shards by "get" or by "reply" from now on; not during a read."""
        self._far: FarReads | None = None
        args = self._cluster, self._far_owners, len(self.versions)
        if self._far_owners and self.gate is not None:
            self._far = ReplyReads(*args, self._consistent, self._codec, self.gate.needs)
        elif self._far_owners and way == "get" and not self._consistent:
            self._far = GetReads(*args, self._window)
        elif self._far_owners:
            self._far = ReplyReads(*args, self._consistent, self._codec)

    def share(self, workers: Sequence[Neighbour], me: int) -> None:
        """Share far reads with the other workers of the node from now on; see `SharedReads`."""
        if self._far is not None and len(workers) > 1 and not self._consistent:
            args = self._cluster, self._far_owners, len(self.versions)
            self._far = self._shared = SharedReads(*args, self._far, workers, me)

    @property
    def joined(self) -> int:
        """Reads that came from a neighbour's fetch."""
        return self._shared.joined if self._shared else 0

    @property
    def bytes_received(self) -> int:
        """Bytes of far shards that this rank has read itself, as they were sent."""
        return self._far.bytes_received if self._far else 0

    @property
    def looks_ahead(self) -> bool:
        """Whether a pull may begin before it is due: it has far shards, and holds nobody up."""
        return self._far is not None and not self._consistent

    def timed(self, way: str, out: np.ndarray) -> float:
        """Return the seconds of a pull into `out` by "get" or "reply"; it counts nowhere."""
        self.read_far_by(way)
        counted = self.torn, self.bytes
        start = time.perf_counter()
        self.pull(out)
        self.torn, self.bytes = counted
        return time.perf_counter() - start

    def pull_final(self, out: np.ndarray) -> None:
        """Read every shard into `out` once the servers apply nothing more and serve no reads."""
        self._consistent, self.gate = False, None
        self.read_far_by("get")
        self.pull(out)

    def pull(self, out: np.ndarray) -> np.ndarray:
        """Read every shard into `out`: `begin`, `fetch` and `finish` in one.

        Args:
            out: The replica, shape (n_params,), of the layout's dtype.

        Returns:
            Version read of each shard, shape (servers,), dtype int64: every update up to it is
            in `out`. Valid until the next call.

        Collective: no. Blocks: until the far servers have entered MPI, never for the servers'
        updates unless reads are consistent or have a gate.
        References: Recht et al., NeurIPS 2011 (Hogwild); Li et al., OSDI 2014, section 3.2.
        """
        self.begin(out)
        self.fetch()
        return self.finish()

    def begin(self, out: np.ndarray) -> None:
        """Do what has to be done before `fetch`; leave `out` alone until `finish`.

        What is sent after `begin` is not in the way of what `fetch` asks for. Blocks: for a round
        trip at most.
        """
        assert not self.reading, "a read is under way"
        self._out, self.reading = out, True
        if self.gate is not None:
            self.gate.begin()
        if self._far is not None:
            self._far.begin(out)

    def fetch(self) -> None:
        """Ask for the far shards. Blocks: no."""
        if self._far is not None:
            self._far.fetch()

    def advance(self) -> bool:
        """Get on with what `fetch` asked for; returns whether it is here. Blocks: no."""
        return self._far is None or self._far.advance()

    def ready(self) -> bool:
        """Whether `finish` would wait for no other worker's push. Blocks: no; gets on."""
        return self.gate is None or (self.gate.open() and self.advance())

    def abandon(self) -> None:
        """End the read that is under way, if there is one, without its result.

        Blocks: as `finish` does, but never for other workers' pushes.
        """
        if self.reading and self.gate is not None and isinstance(self._far, ReplyReads):
            self._far.hurry()
            self._cluster.wait(self._far.advance)
        elif self.reading and self.gate is None:
            self.finish()
        self.reading = False

    def finish(self) -> np.ndarray:
        """Copy the near shards, and wait for the far ones; see `pull`.

        Raises:
            UserError: If the read breaks the staleness bound.
        """
        if self.gate is not None:
            self._cluster.wait(self.gate.open)
        self._count += 1
        torn = self.torn
        for k, shard, header, params in self._near:
            if self._consistent:
                publish(self._wants, k, self._count)
                self._cluster.wait(lambda k=k: self._is_granted(k))  # type: ignore[misc]
            self._pull_near(k, self._out[shard.range], header, params)
            if self._consistent:
                publish(self._reads, k, self._count)
        if self._far is not None:
            self._cluster.wait(self._far.advance)
            self.torn += self._far.result(self.versions)
        if self.gate is not None:
            self.usable = self._accepted(self.gate, self.torn - torn)
        self.bytes += self._out.nbytes
        self.reading = False
        return self.versions

    def _is_granted(self, server: int) -> bool:
        return observe(self._granted[server], self._worker) == self._count

    def _accepted(self, gate: Gate, torn: int) -> bool:
        near, far = [k for k, *_ in self._near], [k for k, *_ in self._far_owners]
        clocks = [int(self._clocks[k]) for k in near]
        clocks += self._far.clocks() if self._far is not None else []
        return gate.accepts(clocks, self.versions[near + far].tolist(), torn)

    def _pull_near(
        self, server: int, out: np.ndarray, header: np.ndarray, params: np.ndarray
    ) -> None:
        self._clocks[server] = observe(header, CLOCK)
        committed = observe(header, COMMITTED)
        np.copyto(out, params)
        self.torn += observe(header, BEGUN) > committed
        self.versions[server] = committed


class Server:
    """A server's half of the store: it applies pushes to its shard. Collective: no.

    Args:
        rule: Update rule.
        rate: Learning rate as a function of the update's number.
        packing: How replies to far readers are packed.
        stale: What is done about stale pushes.
    """

    def __init__(
        self,
        cluster: Cluster,
        window: Window,
        server_id: int,
        shard: Shard,
        rule: Rule,
        rate: Callable[[int], float],
        packing: Packing | None = None,
        stale: Staleness = FRESH,
    ) -> None:
        self._cluster, self._server, self._rule, self._rate = cluster, server_id, rule, rate
        self.shard = shard
        view = lambda name: window.view(cluster.rank, name)  # noqa: E731
        self._header, self.params = view("header"), view("params")
        self.slots = tuple(view(f"slots/{name}") for name in rule.slots + stale.slots)
        self._stale = stale
        self.handled = self.dropped = 0
        self.applied = view("applied")
        self._granted = view("granted_reads")
        workers = enumerate(cluster.roles.workers)
        near = [(w, r) for w, r in workers if cluster.near(r)]
        self._readers = [(w, window.view(r, "wants"), window.view(r, "reads")) for w, r in near]
        self._wants = addresses_of((wants for _, wants, _ in self._readers), server_id)
        self._near = np.array([w for w, _ in near], np.int64)
        self._no_limit = no_limit(self.applied.size)
        packing = packing or Packing()
        self._replies = Replies(cluster, self._header, self.params, shard, server_id, packing)
        ranks = cluster.roles.workers
        self.clocks = Clocks(self._header, self.applied, ranks, self._replies.ask)
        self._block = BLOCK_BYTES // self.params.itemsize
        self._scratch = np.zeros(self._block if stale.origins else 0, self.params.dtype)
        self.staleness = np.zeros(STALENESS_BINS, "i8")
        self.staleness_max = self.staleness_sum = 0
        self.busy_s = 0.0

    @property
    def version(self) -> int:
        """Updates applied to the shard, in resumed runs too."""
        return observe(self._header, COMMITTED)

    def start_from(self, version: int) -> None:
        """Set the version of a shard whose parameters and slots were just filled."""
        publish(self._header, BEGUN, version)
        publish(self._header, COMMITTED, version)
        publish(self._header, STATE, SERVING)

    def close(self) -> None:
        """Say in the header that nothing more will be applied."""
        publish(self._header, STATE, CLOSED)

    def apply(self, push: Push) -> int:
        """Apply a push, the next of its worker, and record it in the ledger.

        A mean of several workers' gradients is applied once, at as many times the rate: for SGD
        the same as one after another. It counts as many versions, and is as stale as the oldest
        in it. A push that is dropped counts as a version that changes nothing.

        Returns:
            The shard's version after it.

        Blocks: no; with several nodes, enters MPI between blocks.
        Reference: Li et al., OSDI 2014, section 3.
        """
        start = time.perf_counter()
        version = self.version + push.count
        oldest = self._account(push)
        publish(self._header, BEGUN, version)
        if self._stale.drops(oldest):
            self.dropped += push.count
        else:
            lr = self._stale.rate(self._rate(version), oldest) * push.count
            self._update(push, version, lr)
        # Before the ledger: who sees there that a push is applied reads a version that counts it.
        publish(self._header, COMMITTED, version)
        self._record(push)
        self.clocks.publish()
        self.busy_s += time.perf_counter() - start
        return version

    def finished(self, rank: int, pushes: int) -> None:
        """Note that a worker will have made so many pushes, and no more."""
        self.clocks.finished(rank, pushes)

    def settle(self, step: int) -> int:
        """Get ready for a checkpoint; returns its step, which is `step` where pushes are counted.

        All servers have applied the same pushes when they call it.
        """
        return step

    def _account(self, push: Push) -> int:
        """Count the staleness of each push in a message; returns the largest."""
        version = self.version
        for part in push:
            assert part.seq == observe(self.applied, part.worker) + 1, "pushes out of order"
            self._count_staleness(version - part.version)
        return max(version - part.version for part in push)

    def _record(self, push: Push) -> None:
        """Write a push into the ledger."""
        for part in push:
            publish(self.applied, part.worker, part.seq)
            self.clocks.advance(part.number)
        self.handled += push.count

    def _update(self, push: Push, version: int, lr: float) -> None:
        own = len(self._rule.slots)
        for block in self._blocks():
            params, grad = self.params[block], push.grad[block]
            slots = tuple(slot[block] for slot in self.slots)
            if push.origin is not None:
                out = self._scratch[: grad.size]
                self._stale.compensate(out, grad, params, push.origin[block], slots[own:])
                grad = out
            self._rule.apply(params, grad, slots[:own], version, lr)

    def _blocks(self) -> Iterator[slice]:
        far = self._cluster.nodes > 1  # somebody there may read, or send
        for begin in range(0, self.shard.size, self._block):
            if begin and far:
                self._cluster.progress()
                self._replies.serve(between=False)
            yield slice(begin, begin + self._block)

    def _count_staleness(self, staleness: int) -> None:
        self.staleness[min(staleness, STALENESS_BINS - 1)] += 1
        self.staleness_max = max(self.staleness_max, staleness)
        self.staleness_sum += staleness

    def want_read(self, rank: int, request: tuple[Any, ...]) -> None:
        """Note that a far worker asked for a reply (`mpips.transport.far.ReplyReads`)."""
        consistent, *needs = request
        self.clocks.want(rank, consistent, Needs(*needs))

    def serve_reads(self) -> None:
        """Let those who asked read the shard now, between two updates.

        Blocks: until near readers have copied the shard; far ones get a reply.
        """
        self.clocks.let()
        asked = self._wants, self._near, self._granted, self._no_limit
        held = []
        first = 0
        for _ in self._readers:
            if (found := find_ahead(*asked, first)) < 0:
                break
            first = (found + 1) % len(self._readers)
            worker, wants, reads = self._readers[found]
            want = observe(wants, self._server)
            publish(self._granted, worker, want)
            held.append((reads, want))
        for reads, want in held:
            self._cluster.wait(lambda r=reads, n=want: observe(r, self._server) >= n)  # type: ignore[misc]
        self._replies.serve()
