"""Answers to workers of other nodes that read rows of tables: the server's half.

What a worker asks for, and in which order, says `mpips.transport.remote_rows`, its half.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from mpips.codecs import MessageId
from mpips.kernels.row_groups import read_places
from mpips.mpi.start import Request
from mpips.mpi.tags import TAG_ROWS, TAG_WANTED
from mpips.mpi.world import Cluster
from mpips.transport.packed_rows import RowChunks, rows_codec
from mpips.transport.remote_reads import WINDOW
from mpips.transport.remote_rows import ASIDE, HEAD
from mpips.transport.wire import Packing

Lets = Callable[[int, int, int], bool]


class ServedRows(NamedTuple):
    """A server's rows of a table, as far workers read them.

    Attributes:
        read: Reads rows at places of the server, int64, into a matrix, a row each.
        dim: Numbers of a row.
    """

    read: Callable[[np.ndarray, np.ndarray], object]
    dim: int


class _Answer:
    """Rows on their way to a worker, of one request; `rank` is the worker's."""

    def __init__(
        self, rank: int, send: Callable[[np.ndarray], Request], served: ServedRows, dtype: np.dtype,
        places: np.ndarray, count: int, packed: tuple[RowChunks, MessageId], at_once: bool,
    ) -> None:  # fmt: skip
        self.rank, self._send, self._served, self._dtype = rank, send, served, dtype
        self._chunks, self._message_id = packed
        self._places, self._cursor, self._left = places, np.zeros(2, np.int64), count
        self._sending: deque[tuple[Request, np.ndarray]] = deque()
        self._rows: np.ndarray | None = None
        if at_once:
            self._rows = self._read(count)

    def _read(self, count: int) -> np.ndarray:
        """Return the next rows."""
        local = np.empty(count, np.int64)
        read = read_places(self._places, self._cursor, local)
        assert read == len(local), f"a list of {read} places fewer than it says"
        rows = np.empty((read, self._served.dim), self._dtype)
        self._served.read(local, rows)
        return rows

    def chunks(self) -> Iterator[None]:
        """Send what may be sent now, a chunk each time. Blocks: no."""
        while self._sending and self._sending[0][0].Test():
            self._sending.popleft()
        while self._left and len(self._sending) < WINDOW:
            count = min(self._left, self._chunks.step)
            if self._rows is None:
                chunk = self._read(count)
            else:
                at = len(self._rows) - self._left
                chunk = self._rows[at : at + count]
            # What is left tells chunks apart, and no slice of the parameters begins there.
            begin = -(self.rank << 32) - self._left
            message = self._chunks.pack(chunk, replace(self._message_id, begin=begin))
            self._sending.append((self._send(message), message))
            self._left -= count
            yield

    @property
    def begun(self) -> bool:
        """Whether all has been handed to MPI, so that the worker's next one may begin."""
        return not self._left

    @property
    def done(self) -> bool:
        """Whether all has left."""
        return not self._left and not self._sending


class RowReplies:
    """A server's half: it answers those who ask. Collective: no.

    Args:
        cluster: The job's ranks.
        tables: Its rows, in the order of the job's tables.
        dtype: Of rows.
        packing: Of answers.
        server: Number of the server.
        noted: Called with the rank of who reads rows for a step, where reads are consistent.
        lets: Called with a rank and the two words of `RemoteRows.want`: whether rows hold that. By
            default `version` says so.

    Attributes:
        version: Updates that its rows hold, where workers count them; who wants more waits.
    """

    def __init__(
        self, cluster: Cluster, tables: Sequence[ServedRows], dtype: np.dtype, packing: Packing,
        server: int, noted: Callable[[int], object] | None = None, lets: Lets | None = None,
    ) -> None:  # fmt: skip
        self.version, self._noted = 0, noted
        self._lets = lets or (lambda rank, version, own: version <= self.version)
        self._cluster, self._tables = cluster, tables
        self._dtype, self._packing = dtype, packing
        self._codecs = [rows_codec(packing.codec, served.dim) for served in tables]
        self._source = -1 - server  # of messages; workers count from 0
        self._counts: Counter[int] = Counter()  # of answers, by rank: in any order they are alike
        self._coming: list[tuple[int, Request, np.ndarray]] = []  # or here, but for a later version
        self._lists: dict[tuple[int, int], np.ndarray] = {}  # by rank and table
        self._answers: list[_Answer] = []

    def serve(self, most: int = WINDOW, between: bool = True) -> bool:
        """Take requests, and get on with answers. Blocks: no.

        Args:
            most: Chunks that are sent at most of each answer; a worker's one after the other.
            between: Whether this is between two updates; else, where reads are consistent, no
                request is taken.

        Returns:
            Whether there was anything to do.
        """
        self._coming += self._cluster.arrays.begin_receives(TAG_WANTED)
        if between or self._noted is None:
            self._take_requests()
        busy, behind = bool(self._answers), set[int]()
        for answer in self._answers:
            for _ in islice(answer.chunks(), most if answer.rank not in behind else 0):
                continue
            if not answer.begun:
                behind.add(answer.rank)
        self._answers = [answer for answer in self._answers if not answer.done]
        return busy

    def _take_requests(self) -> None:
        """Begin to answer requests that are here, those of a rank in their order."""
        coming, self._coming, behind = self._coming, [], set[int]()
        for rank, request, message in coming:
            if rank in behind or not request.Test() or self._is_early(rank, message):
                behind.add(rank)
                self._coming.append((rank, request, message))
            else:
                self._answers.append(self._answer(rank, message))

    def _is_early(self, rank: int, message: np.ndarray) -> bool:
        """Whether a request wants updates that are still to come."""
        return not self._lets(rank, *message[: 8 * HEAD].view("i8")[2:].tolist())

    def _answer(self, rank: int, message: np.ndarray) -> _Answer:
        head, places = message[: 8 * HEAD].view("i8").tolist(), message[8 * HEAD :]
        table, count, version, _ = head
        if self._noted is not None and version != ASIDE:
            self._noted(rank)
        if places.size:
            self._lists[rank, table] = places
        served, begin = self._tables[table], self._cluster.arrays.begin_send
        send = lambda chunk: begin(chunk, rank, TAG_ROWS)  # noqa: E731
        places = self._lists[rank, table]
        self._counts[rank] += 1
        p = self._packing
        message_id = MessageId(p.seed, self._source, p.before + self._counts[rank])
        packed = RowChunks.of(self._codecs[table], count, served.dim, self._dtype), message_id
        at_once = self._noted is not None
        return _Answer(rank, send, served, self._dtype, places, count, packed, at_once)
