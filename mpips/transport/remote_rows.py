"""Reads of rows of tables across nodes: both halves.

A worker sends each remote server one request for the rows of a call that the server owns: number of
the table, number of rows, and their places, coded as gaps. If the list equals that of the last
request, it is not sent again (Li et al., OSDI 2014, section 5.1: key caching). The server answers
with the rows in this order, in chunks. It gathers each chunk when it passes it to MPI, between two
of its loops, so every row is whole. It keeps the last list of each worker and table, still coded,
and a few chunks. A list has at most `push_rows` rows; the worker requests more once these are here.

A worker may request the rows of a later call before it takes those of the present one. Then its
link is busy while it computes, and does not idle for a round trip each call. Servers answer lists
in the order of sending, so rows arrive in the order of the receives.

A request contains the updates that its rows must include. A server that has not applied them
answers later, and delays that worker's later requests with it. Rows are packed by the codec of
pulls, if it packs rows.

If reads are consistent, the server reads all rows of a call between two updates, and keeps them
until they are sent. Then a call is one request, whatever its length.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from mpips.codecs import Codec, MessageId
from mpips.health import status_board
from mpips.kernels.row_groups import read_places, spread
from mpips.layout.tables import Grouped
from mpips.mpi.start import TAG_ROWS, TAG_WANTED, Request
from mpips.mpi.waiting import all_done
from mpips.mpi.world import Cluster
from mpips.planning.tables import JobTable
from mpips.transport.remote_reads import WINDOW
from mpips.transport.rows import SentList, rows_codec
from mpips.transport.wire import Chunks, Packing

MOST_AHEAD = 64  # most open calls of a table: a program may never take them
HEAD = 4  # words of a request: number of the table, number of rows, and the arguments of `want`
ASIDE = -1  # second argument of `want` for rows outside steps; any negative number is


class _RowsRequest:
    """Rows of one call, requested from one remote server; `here` of them have arrived."""

    def __init__(
        self, reads: "RemoteRows", remote: "_RemoteServer", places: np.ndarray, rows: np.ndarray
    ) -> None:
        self._reads, self._remote = reads, remote
        self._places, self.rows, self.here = places, rows, 0
        self._wanted = reads.wanted  # also of its later messages
        self._next = 0  # first place that is not requested yet
        self._coming: deque[tuple[Request, Chunks, np.ndarray, np.ndarray]] = deque()
        self._sending: list[Request] = []

    def advance(self) -> bool:
        """Make progress; returns whether all rows are here. Blocks: no."""
        while True:
            while self._coming and self._coming[0][0].Test():
                _, chunks, message, chunk = self._coming.popleft()
                chunks.unpack(message, chunk)
                self.here += len(chunk)
            if self._coming or not all_done(self._sending):
                return False
            if self._next == len(self._places):
                return True
            self._ask()

    def _ask(self) -> None:
        """Send the next request, and post the receives while it is on its way."""
        reads, (_, rank, most, sent) = self._reads, self._remote
        part = slice(self._next, self._next + most)
        places, rows = self._places[part], self.rows[part]
        self._next += len(places)
        head = np.array([reads.number, len(places), *self._wanted], np.int64).view("u1")
        request_bytes = np.concatenate([head, sent.encode(places)])
        reads.bytes_sent += request_bytes.nbytes
        self._sending = [reads.arrays.begin_send(request_bytes, rank, TAG_WANTED)]
        chunks = Chunks.of_rows(reads.codec, len(rows), rows.shape[1], rows.dtype)
        for chunk in chunks.cut(rows):
            message = chunks.message(chunk)
            coming = reads.arrays.begin_receive(message, rank, TAG_ROWS)
            self._coming.append((coming, chunks, message, chunk))
            reads.bytes_received += message.nbytes


class _RemoteServer(NamedTuple):
    """A server of another node from which a worker reads rows, at most `most` by a request."""

    server: int
    rank: int
    most: int
    sent: SentList


class RowRequest:
    """Requested remote rows of the ids of one call.

    Args:
        grouped: Result of `Ownership.group` for the ids, rows of all servers.
        asked: Slice of the rows that a remote server owns, and the request for them, for each.

    Attributes:
        grouped: As given.
    """

    def __init__(self, grouped: Grouped, asked: Sequence[tuple[slice, _RowsRequest]]) -> None:
        self.grouped, self._asked, self._written = grouped, asked, [0] * len(asked)

    def advance(self, out: np.ndarray | None = None) -> bool:
        """Make progress; returns whether all rows are here. Blocks: no.

        Args:
            out: Gets the rows that have arrived, one for each id; None to leave them.
        """
        here = [each.advance() for _, each in self._asked]
        for k, (part, each) in enumerate(self._asked):
            begin, end = self._written[k], each.here
            if out is not None and end > begin:
                starts = self.grouped.starts[part.start + begin : part.start + end + 1]
                spread(each.rows[begin:end], self.grouped.order, starts, out)
                self._written[k] = end
        return all(here)


class RemoteRows:
    """A worker's reads of the rows of one table on other nodes. Collective: no.

    Args:
        number: Number of the table, in the order of the job's.
        table: The table.
        dtype: dtype of the rows.
        codec: Codec of pulls from other nodes.
        whole: Whether a call is one request; else a request has at most `push_rows` rows.

    Attributes:
        arrays: Messages of arrays.
        number: See Args.
        codec: Codec of the rows, or None.
        wanted: Updates that rows must include, as set by `want`.
        bytes_sent: Bytes of the requests.
        bytes_received: Bytes of the requested rows, as packed.
    """

    def __init__(
        self, cluster: Cluster, number: int, table: JobTable, dtype: np.dtype,
        codec: Codec | None, whole: bool = False,
    ) -> None:  # fmt: skip
        ranks = cluster.roles.owners
        self._cluster, owned = cluster, table.owned_by(len(ranks))
        self.arrays, self.number, self.codec = cluster.arrays, number, rows_codec(codec, table.dim)
        self._dim, self._dtype = table.dim, dtype
        self.bytes_sent = self.bytes_received = 0
        self.wanted = 0, 0
        self._ahead: deque[tuple[np.ndarray | None, RowRequest]] = deque()
        self._later: list[tuple[np.ndarray, Grouped]] = []
        most = lambda k: max(1, owned.count(k)) if whole else table.push_rows  # noqa: E731
        self._remote = [
            _RemoteServer(k, rank, most(k), SentList(owned.count(k)))
            for k, rank in enumerate(ranks)
            if not cluster.is_local(rank)
        ]

    def want(self, version: int, own: int = 0) -> None:
        """Set the updates that rows must include from now on.

        Args:
            version: Number of updates, if owners count them; in mode ssp the clock.
            own: Number of pushes of this worker, in mode ssp.
        """
        self.wanted = version, own

    def begin(self, grouped: Grouped) -> RowRequest:
        """Request the remote rows of a call. Blocks: no.

        Args:
            grouped: Result of `Ownership.group` for the ids, rows of all servers.
        """
        asked = []
        for remote in self._remote:
            part = grouped.of(remote.server)
            if part.stop > part.start:
                rows = np.empty((part.stop - part.start, self._dim), self._dtype)
                asked.append((part, _RowsRequest(self, remote, grouped.local[part], rows)))
        coming = RowRequest(grouped, asked)
        coming.advance()
        return coming

    def begin_ahead(self, ids: np.ndarray, grouped: Grouped) -> None:
        """Request the remote rows of a later call, by its ids.

        Blocks: no, unless `MOST_AHEAD` calls are open: then until the oldest is here, which is
        dropped.
        """
        while len(self._ahead) >= MOST_AHEAD:
            self.wait(self._ahead.popleft()[1])
        self._ahead.append((ids, self.begin(grouped)))

    def has_asked(self, ids: np.ndarray) -> bool:
        """Return whether the rows of these ids are requested ahead, and not taken yet."""
        return any(_same_ids(asked, ids) for asked, _ in self._ahead)

    def begin_later(self, ids: np.ndarray, grouped: Grouped) -> None:
        """Have `begin_read` request the remote rows of a call, unless the call comes first."""
        self._later.append((ids, grouped))

    def begin_read(self) -> None:
        """Send the requests of `begin_later`. Earlier requests become too old to be taken."""
        self._ahead = deque((None, coming) for _, coming in self._ahead)
        later, self._later = self._later, []
        for ids, grouped in later:
            self.begin_ahead(ids, grouped)

    def taken(self, ids: np.ndarray) -> RowRequest | None:
        """Return the request ahead with these ids, or None; drops the requests before it.

        Blocks: until the dropped rows are here.
        """
        self._later = [each for each in self._later if not _same_ids(each[0], ids)]
        while self._ahead:
            asked, coming = self._ahead.popleft()
            if _same_ids(asked, ids):
                return coming
            self.wait(coming)
        return None

    def advance(self) -> None:
        """Progress the requests ahead. Blocks: no."""
        for _, coming in self._ahead:
            coming.advance()

    def abandon(self) -> None:
        """Drop the requests ahead. Blocks: until their rows are here."""
        while self._ahead:
            self.wait(self._ahead.popleft()[1])

    def wait(self, coming: RowRequest, out: np.ndarray | None = None) -> None:
        """Wait until requested rows are here. Blocks: never for servers' updates.

        Args:
            coming: The request.
            out: See `RowRequest.advance`.
        """
        self._cluster.wait(lambda: coming.advance(out), status_board.SHARD)


def _same_ids(asked: np.ndarray | None, ids: np.ndarray) -> bool:
    return asked is not None and np.array_equal(asked, ids)


Lets = Callable[[int, int, int], bool]


class ServedRows(NamedTuple):
    """A server's rows of a table for reads from other nodes.

    Attributes:
        read: Reads rows, by their places in the server, int64, into a matrix.
        dim: Elements of a row.
    """

    read: Callable[[np.ndarray, np.ndarray], object]
    dim: int


class _Answer:
    """Rows of one request on their way to `rank`; `left` of them are not passed to MPI yet."""

    def __init__(
        self, rank: int, cluster: Cluster, served: ServedRows, dtype: np.dtype,
        places: np.ndarray, count: int, packed: tuple[Chunks, MessageId], at_once: bool,
    ) -> None:  # fmt: skip
        self.rank, self._cluster, self._served, self._dtype = rank, cluster, served, dtype
        self._chunks, self._message_id = packed
        self._places, self._cursor, self.left = places, np.zeros(2, np.int64), count
        self._whole, self._sending = count, deque[tuple[list[Request], np.ndarray]]()
        self._rows = self._read(count) if at_once else None

    def _read(self, count: int) -> np.ndarray:
        """Return the next rows."""
        local = np.empty(count, np.int64)
        read = read_places(self._places, self._cursor, local)
        assert read == len(local), f"a list of {read} places fewer than it says"
        rows = np.empty((read, self._served.dim), self._dtype)
        self._served.read(local, rows)
        return rows

    def chunks(self) -> Iterator[None]:
        """Send chunks while MPI has room; yields after each. Blocks: no."""
        begin_send, failures = self._cluster.arrays.begin_send, self._cluster.failures
        while self._sending and failures.done(self._sending[0][0]):
            self._sending.popleft()
        while self.left and len(self._sending) < WINDOW:
            at = self._whole - self.left
            count = min(self.left, self._chunks.length(at))
            chunk = self._read(count) if self._rows is None else self._rows[at : at + count]
            # `left` makes the identity unique, and no slice of the parameters begins there.
            begin = -(self.rank << 32) - self.left
            message = self._chunks.pack(chunk, replace(self._message_id, begin=begin))
            sent = failures.begin_send(begin_send, message, self.rank, TAG_ROWS)
            self._sending.append(([] if sent is None else [sent], message))  # None: it is dead
            self.left -= count
            yield

    @property
    def done(self) -> bool:
        """Whether all rows have left."""
        return not self.left and not self._sending


class RowReplies:
    """A server's half: answers requests for rows. Collective: no.

    Args:
        tables: Rows of the server, in the order of the job's tables.
        dtype: dtype of the rows.
        packing: Packing of answers.
        server: Number of the server.
        noted: If reads are consistent, called with the rank of each worker that reads for a step.
        lets: Called with a rank and the two words of `RemoteRows.want`; returns whether the rows
            include these updates. By default it compares with `version`.

    Attributes:
        version: Number of updates in the rows, if workers count them.
        lets: As given.
    """

    def __init__(
        self, cluster: Cluster, tables: Sequence[ServedRows], dtype: np.dtype, packing: Packing,
        server: int, noted: Callable[[int], object] | None = None, lets: Lets | None = None,
    ) -> None:  # fmt: skip
        self.version, self._noted = 0, noted
        self.lets = lets or (lambda rank, version, own: version <= self.version)
        self._cluster, self._tables = cluster, tables
        self._dtype, self._packing = dtype, packing
        self._codecs = [rows_codec(packing.codec, served.dim) for served in tables]
        self._source = -1 - server  # source number of messages; workers begin at 0
        self._counts: Counter[int] = Counter()  # answers, by rank
        self._coming: list[tuple[int, Request, np.ndarray]] = []  # arriving, or waiting for updates
        self._lists: dict[tuple[int, int], np.ndarray] = {}  # coded places, by rank and table
        self._answers: list[_Answer] = []

    def serve(self, most: int = WINDOW, between: bool = True) -> bool:
        """Take requests, and progress answers. Blocks: no.

        Args:
            most: Most chunks of each answer that are sent now; a worker's answers are sent in
                order.
            between: Whether this is between two updates; if not, and reads are consistent, no
                request is taken.

        Returns:
            Whether there were answers under way.
        """
        self._coming += self._cluster.arrays.begin_receives(TAG_WANTED)
        if between or self._noted is None:
            self._take_requests()
        busy, behind = bool(self._answers), set[int]()
        for answer in self._answers:
            for _ in islice(answer.chunks(), most if answer.rank not in behind else 0):
                continue
            if answer.left:
                behind.add(answer.rank)
        self._answers = [answer for answer in self._answers if not answer.done]
        return busy

    def _take_requests(self) -> None:
        """Begin to answer the requests that are here, those of a rank in their order."""
        coming, self._coming, behind = self._coming, [], set[int]()
        for rank, request, message in coming:
            here = self._cluster.failures.attempt(request.Test)
            if here is not False and rank in self._cluster.failures.lost:
                continue
            if rank in behind or not here or self._is_early(rank, message):
                behind.add(rank)
                self._coming.append((rank, request, message))
            else:
                self._answers.append(self._answer(rank, message))

    def _is_early(self, rank: int, message: np.ndarray) -> bool:
        """Return whether a request needs updates that are not applied yet."""
        return not self.lets(rank, *message[: 8 * HEAD].view("i8")[2:].tolist())

    def _answer(self, rank: int, message: np.ndarray) -> _Answer:
        head, places = message[: 8 * HEAD].view("i8").tolist(), message[8 * HEAD :]
        table, count, *wanted = head
        if self._noted is not None and wanted[1] >= 0:
            self._noted(rank)
        if places.size:
            self._lists[rank, table] = places
        served, places, p = self._tables[table], self._lists[rank, table], self._packing
        self._counts[rank] += 1
        message_id = MessageId(p.seed, self._source, p.before + self._counts[rank])
        packed = Chunks.of_rows(self._codecs[table], count, served.dim, self._dtype), message_id
        at_once = self._noted is not None
        return _Answer(rank, self._cluster, served, self._dtype, places, count, packed, at_once)
