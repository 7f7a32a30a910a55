"""Pulls: reads of all shards by a worker.

A server publishes two words around every update: the begun version before its first store, and the
committed version after its last. A worker observes the committed version, copies, and then observes
the begun version. If that is newer, an update was under way and the copy may be torn (a seqlock
without the retry; Boehm, MSPC 2012). The worker counts torn copies and uses them: as in Hogwild,
they only add noise. With ``read="consistent"`` the worker requests each read, and the server pauses
between two updates until the worker has read. Shards of other nodes are read by
`mpips.transport.remote_reads`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from mpips.health import status_board
from mpips.kernels.atomics import find_ahead, no_limit, observe, publish
from mpips.kernels.exchange import pull
from mpips.kernels.vectors import addresses_of
from mpips.layout import Shard
from mpips.mpi.window import Field, Window
from mpips.mpi.world import Cluster
from mpips.ps.consistency import Controller
from mpips.transport.push_sender import Owner
from mpips.transport.remote_reads import BEGUN, CLOCK, COMMITTED, RemoteReads

SHARD, ROWS = range(2)  # kinds of consistent reads; a request is ``count * KINDS + kind``
KINDS = 2
When = tuple[np.ndarray, int]  # addresses of header words, and the least value of each
AT_ONCE: When = np.zeros(0, np.int64), 0


def reader_fields(servers: int) -> tuple[Field, ...]:
    """Return the fields of a worker's segment that carry its consistent reads."""
    return (Field("wants", "i8", (servers,)), Field("reads", "i8", (servers,)))


class Pauses:
    """Worker's half of consistent reads: pauses servers of this node. Collective: no.

    Args:
        cluster: The job's ranks.
        window: The window of the store.
        owners: See `LocalReads`.
        worker_id: Number of this worker.

    Attributes:
        in_step: Whether rows are being read for a step, so that servers must pause.
    """

    in_step = False

    def __init__(
        self, cluster: Cluster, window: Window, owners: Sequence[Owner], worker_id: int
    ) -> None:
        self._cluster, self._worker, self._count = cluster, worker_id, 0
        self._wants = window.view(cluster.rank, "wants")
        self._reads = window.view(cluster.rank, "reads")
        self._granted = {k: window.view(rank, "granted_reads") for k, rank, _ in owners}

    def each(self, servers: Iterable[int], kind: int = SHARD) -> Iterator[int]:
        """Yield the servers one after another; each one pauses until the next is requested.

        Args:
            servers: Numbers of servers of this node.
            kind: Kind of the read, `SHARD` or `ROWS`.

        Blocks: until each server has paused.
        """
        for server in servers:
            self._count += 1
            want = self._count * KINDS + kind
            granted = self._granted[server]
            publish(self._wants, server, want)
            self._cluster.wait(
                lambda g=granted, want=want: observe(g, self._worker) == want,  # type: ignore[misc]
                status_board.SHARD,
            )
            try:
                yield server
            finally:
                publish(self._reads, server, want)


class LocalReads:
    """Copies of the shards of this node. Collective: no.

    A copy may be torn by an update, unless `held` pauses the server.

    Args:
        window: The window of the store.
        owners: Server number, rank and shard of each server of this node that has a shard.
        held: Pauses the servers one after another; None if reads are not consistent.

    Attributes:
        servers: Numbers of the servers.
        held: See Args.
    """

    def __init__(self, window: Window, owners: Sequence[Owner], held: Pauses | None = None) -> None:
        self.servers, self.held = [server for server, _, _ in owners], held
        self._headers = [(server, window.view(rank, "header")) for server, rank, _ in owners]
        bounds = [(shard.begin, shard.end, server) for server, _, shard in owners]
        self._all = (
            addresses_of(header for _, header in self._headers),
            addresses_of(window.view(rank, "params") for _, rank, _ in owners),
            np.array(bounds, np.int64).reshape(-1, 3),
        )
        self._words = np.array([COMMITTED, BEGUN])

    def read(
        self, out: np.ndarray, versions: np.ndarray, clocks: np.ndarray | None = None,
        when: When = AT_ONCE,
    ) -> int:  # fmt: skip
        """Copy every shard, and return the number of torn copies.

        Args:
            out: Gets the shards, shape (n_params,).
            versions: Gets the version of each shard, shape (servers,), dtype int64.
            clocks: Gets each server's clock at the start of its read, shape (servers,), dtype
                int64; None if no clocks are needed.
            when: Words and their least value. If a word is smaller, nothing is copied, and -1 is
                returned. Only for reads without `held` and `clocks`.

        Blocks: only with `held`, until each server has paused.
        """
        if self.held is None and clocks is None:
            return pull(*when, *self._all, self._words, out, versions)
        torn, turns = 0, iter(()) if self.held is None else self.held.each(self.servers)
        for k, (server, header) in enumerate(self._headers):
            next(turns, None)
            if clocks is not None:
                clocks[server] = observe(header, CLOCK)
            headers, params, bounds = (each[k : k + 1] for each in self._all)
            torn += pull(*AT_ONCE, headers, params, bounds, self._words, out, versions)
        next(turns, None)  # lets the last server go on
        return torn


class Grants:
    """Server's half of consistent reads by workers of this node. Collective: no.

    A worker publishes the number of its request. Between two updates, the server publishes the same
    number as granted. It then pauses until the worker has published the number as read. Odd numbers
    request rows of tables.

    Attributes:
        noted: Called with the number of a worker that reads rows.
    """

    def __init__(self, cluster: Cluster, window: Window, server_id: int) -> None:
        self._cluster, self._server = cluster, server_id
        self._granted = window.view(cluster.roles.servers[server_id], "granted_reads")
        local = [(w, r) for w, r in enumerate(cluster.roles.workers) if cluster.is_local(r)]
        self._ranks = cluster.roles.workers
        self.noted: Callable[[int], object] = lambda worker: None
        self._readers = [(w, window.view(r, "wants"), window.view(r, "reads")) for w, r in local]
        self._asked = (
            addresses_of((wants for _, wants, _ in self._readers), server_id),
            np.array([w for w, _ in local], np.int64),
            self._granted,
            no_limit(len(cluster.roles.workers)),
        )

    def serve(self) -> None:
        """Grant the requests that have come. Blocks: until these workers have read."""
        found = find_ahead(*self._asked, 0)
        if found >= 0:
            self._hold(found)

    def let_finish(self) -> None:
        """Wait for reads that a dead server had granted. Blocks: as `serve`."""
        granted = [(w, reads, observe(self._granted, w)) for w, _, reads in self._readers]
        self._wait_for([(self._ranks[w], reads, count) for w, reads, count in granted])

    def _hold(self, found: int) -> None:
        held: list[tuple[int, np.ndarray, int]] = []
        while found >= 0 and len(held) < len(self._readers):
            worker, wants, reads = self._readers[found]
            want = observe(wants, self._server)
            if want & 1:
                self.noted(worker)
            publish(self._granted, worker, want)
            held.append((self._ranks[worker], reads, want))
            found = find_ahead(*self._asked, (found + 1) % len(self._readers))
        self._wait_for(held)

    def _wait_for(self, held: Sequence[tuple[int, np.ndarray, int]]) -> None:
        lost = self._cluster.failures.lost

        def have_read() -> bool:
            return all(observe(r, self._server) >= want or rank in lost for rank, r, want in held)

        self._cluster.wait(have_read, status_board.SHARD)


class Puller:
    """A worker's reads of all shards. Collective: no.

    Args:
        cluster: The job's ranks.
        shards: Shard of each server.
        local: Reads of the shards of this node.
        remote: Reads of the shards of other nodes; with a controller, they are by reply.
        controller: Decides when the worker may read; None if reads do not wait.

    Attributes:
        versions: Versions of the last read, shape (servers,), dtype int64.
        reading: Whether a read is under way.
        usable: Whether the controller accepts the last read.
        torn: Number of torn copies so far.
        bytes: Bytes read so far.
        looks_ahead: Whether a pull may begin early, since there are remote shards.
        remote: See Args.
        controller: See Args.
        at_once: Whether all shards are local and pulls never wait.
    """

    def __init__(
        self,
        cluster: Cluster,
        shards: Sequence[Shard],
        local: LocalReads,
        remote: RemoteReads,
        controller: Controller | None = None,
    ) -> None:
        self._cluster, self._local, self.remote = cluster, local, remote
        self.controller, self.looks_ahead = controller, remote.some
        self._owned = [server for server, shard in enumerate(shards) if shard.size]
        self.versions, self._clocks = np.zeros((2, len(shards)), "i8")
        self._out, self.reading, self.usable = np.zeros(0), False, True
        self._at_once = not remote.some and controller is None
        self.at_once = self._at_once and local.held is None
        self.torn = self.bytes = 0

    def pull(self, out: np.ndarray) -> np.ndarray:
        """Read every shard into `out`: `begin`, `fetch` and `finish`.

        Args:
            out: The replica, shape (n_params,), of the layout's dtype.

        Returns:
            Version read of each shard, shape (servers,), dtype int64. All updates up to that
            version are in `out`. Valid until the next call.

        Collective: no. Blocks: until the remote servers have entered MPI. It waits for updates only
        if reads are consistent or have a controller.
        References: Recht et al., NeurIPS 2011 (Hogwild); Li et al., OSDI 2014, section 3.2.
        """
        if self._at_once:
            self.torn += self._local.read(out, self.versions)
            self.bytes += out.nbytes
            return self.versions
        self.begin(out)
        self.fetch()
        return self.finish()

    def pull_when(self, when: When, out: np.ndarray, versions: np.ndarray) -> bool:
        """Read every shard if header words have reached a value. Needs `at_once`.

        Args:
            when: Addresses of the words, and the least value of each.
            out: The replica, as in `pull`.
            versions: Gets the version read of each shard, shape (servers,), dtype int64.

        Returns:
            Whether it has read the shards.

        Collective: no. Blocks: no.
        """
        torn = self._local.read(out, versions, None, when)
        if torn < 0:
            return False
        self.torn += torn
        self.bytes += out.nbytes
        return True

    def begin(self, out: np.ndarray) -> None:
        """Begin a read into `out`, which belongs to the read until `finish`.

        Messages sent between `begin` and `fetch` do not delay the read. Blocks: for one round trip
        at most.
        """
        assert not self.reading, "a read is under way"
        self._out, self.reading = out, True
        if self.controller is not None:
            self.controller.begin()
        self.remote.begin(out)

    def fetch(self) -> None:
        """Request the remote shards. Blocks: no."""
        self.remote.fetch()

    def advance(self) -> bool:
        """Advance `fetch`; return whether all remote shards have come. Blocks: no."""
        return self.remote.advance()

    def finish(self) -> np.ndarray:
        """Copy the local shards and wait for the remote ones; see `pull`.

        Raises:
            UserError: If the read violates the staleness bound.
        """
        clocks, controller = None, self.controller
        if controller is not None:
            self._cluster.wait(controller.ready, status_board.CLOCKS)
            clocks = self._clocks
        torn = self._local.read(self._out, self.versions, clocks)
        if self.remote.some:
            self._cluster.wait(self.remote.advance, status_board.SHARD)
            torn += self.remote.result(self.versions)
        if controller is not None:
            read = self._clocks[self._local.servers].tolist() + self.remote.clocks()
            self.usable = controller.accepts(read, self.versions[self._owned].tolist(), torn)
        self.torn += torn
        self.bytes += self._out.nbytes
        self.reading = False
        return self.versions

    def abandon(self) -> None:
        """End the current read, if there is one, without its result.

        Blocks: as `finish`, but never for other workers' pushes.
        """
        if self.reading and self.controller is None:
            self.finish()
        elif self.reading:
            self.remote.cancel_wait()
            self._cluster.wait(self.remote.advance)
        self.reading = False
