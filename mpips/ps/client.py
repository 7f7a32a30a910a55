"""Pulls: how a worker reads the shards of all servers.

Around every update a server publishes two words: the version begun before the first store, the
version committed after the last. A worker observes the committed version, copies, and then observes
the version begun: if an update had begun that was not yet committed when the copy started, the read
may be torn (a seqlock without the retry; Boehm, MSPC 2012). It is counted, and used: as in Hogwild,
a torn read is one more kind of noise. With ``read="consistent"`` the worker asks first, and the
server holds between two updates until it has read. The shards of other nodes come by
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

SHARD, ROWS = range(2)  # what a worker wants to read; a want is a number of reads, and that
KINDS = 2
When = tuple[np.ndarray, int]  # addresses of header words, and what they are to have reached
AT_ONCE: When = np.zeros(0, np.int64), 0


def reader_fields(servers: int) -> tuple[Field, ...]:
    """Return the fields of a worker's segment that carry its consistent reads."""
    return (Field("wants", "i8", (servers,)), Field("reads", "i8", (servers,)))


class Held:
    """Servers of this node that hold between two updates, for a worker to read. Collective: no.

    Args:
        cluster: The job's ranks.
        window: Where they are.
        owners: See `LocalReads`.
        worker_id: Number of this worker.

    Attributes:
        in_step: Whether rows that are read are for a step, so that servers are to hold.
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
        """Yield the servers, each of which holds until the next one is asked for.

        Args:
            servers: Numbers of servers of this node.
            kind: What is read, `SHARD` or `ROWS`.

        Blocks: until they hold, one after another.
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

    Each is torn where an update is under way, unless its server holds meanwhile.

    Args:
        window: Where they are.
        owners: Server number, rank and shard of each server of this node with a shard.
        held: Has the servers hold, one after another, where reads are consistent.

    Attributes:
        servers: Numbers of the servers.
        held: As given.
    """

    def __init__(self, window: Window, owners: Sequence[Owner], held: Held | None = None) -> None:
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
        """Copy every shard; returns how many of the copies are torn.

        Args:
            out: Where they go, shape (n_params,).
            versions: Becomes the version of each shard, shape (servers,), dtype int64.
            clocks: Likewise each server's clock when the read of it began, where that is asked for.
            when: Words without whose values nothing is copied, and -1 returned; of a read that
                waits for nobody.

        Blocks: no, but where servers are to hold: until they do.
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
        next(turns, None)  # the last one holds no more
        return torn


class Grants:
    """Consistent reads by workers of this node, the server's half. Collective: no.

    A worker publishes the number of the read that it wants; the server grants it between two
    updates, and holds until the worker has published the same number again. A number that is odd
    wants rows of tables.

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
        """Let those who asked read now. Blocks: until they have."""
        found = find_ahead(*self._asked, 0)
        if found >= 0:
            self._hold(found)

    def let_finish(self) -> None:
        """Hold for those who were let before, by a server that has died. Blocks: as `serve`."""
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
        for rank, reads, want in held:

            def has_read(rank: int = rank, reads: np.ndarray = reads, want: int = want) -> bool:
                return observe(reads, self._server) >= want or rank in lost

            self._cluster.wait(has_read, status_board.SHARD)


class Puller:
    """A worker's reads of all shards. Collective: no.

    Args:
        cluster: The job's ranks.
        shards: Of all servers.
        local: Reads those of this node.
        remote: Reads those of other nodes; by reply with a controller.
        controller: What a read waits for, if it does.

    Attributes:
        versions: Those of the last read, shape (servers,), dtype int64.
        reading: Whether a read is under way.
        usable: Whether the controller accepts what was read last.
        torn: Reads of a shard that are torn, so far.
        bytes: Bytes read so far.
        looks_ahead: Whether a pull may begin before it is due: it has remote shards.
        remote: As given; `controller` likewise.
        at_once: Whether a pull waits for nobody, and all shards are here.
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
        """Read every shard into `out`: `begin`, `fetch` and `finish` in one.

        Args:
            out: The replica, shape (n_params,), of the layout's dtype.

        Returns:
            Version read of each shard, shape (servers,), dtype int64: every update up to it is
            in `out`. Valid until the next call.

        Collective: no. Blocks: until the remote servers have entered MPI, never for the servers'
        updates unless reads are consistent or have a controller.
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
        """Read every shard, if words have values; returns whether it did. Needs `at_once`.

        Args:
            when: The words, and what each is to have reached.
            out: The replica, as in `pull`.
            versions: Becomes the version read of each shard, shape (servers,), dtype int64.

        Collective: no. Blocks: no.
        """
        torn = self._local.read(out, versions, None, when)
        if torn < 0:
            return False
        self.torn += torn
        self.bytes += out.nbytes
        return True

    def begin(self, out: np.ndarray) -> None:
        """Do what has to be done before `fetch`; leave `out` alone until `finish`.

        What is sent after `begin` is not in the way of what `fetch` asks for. Blocks: for a round
        trip at most.
        """
        assert not self.reading, "a read is under way"
        self._out, self.reading = out, True
        if self.controller is not None:
            self.controller.begin()
        self.remote.begin(out)

    def fetch(self) -> None:
        """Ask for the remote shards. Blocks: no."""
        self.remote.fetch()

    def advance(self) -> bool:
        """Get on with what `fetch` asked for; returns whether it is here. Blocks: no."""
        return self.remote.advance()

    def finish(self) -> np.ndarray:
        """Copy the local shards, and wait for the remote ones; see `pull`.

        Raises:
            UserError: If the read breaks the staleness bound.
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
        """End the read that is under way, if there is one, without its result.

        Blocks: as `finish` does, but never for other workers' pushes.
        """
        if self.reading and self.controller is None:
            self.finish()
        elif self.reading:
            self.remote.cancel_wait()
            self._cluster.wait(self.remote.advance)
        self.reading = False
