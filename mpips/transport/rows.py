"""Rows of a push: gradients of single table rows, and their packing.

A worker sums the gradients of each row and groups the rows by server. They lie in its segment, in
the buffer of the push. One word announces gradient and rows to the servers of its node, and the
buffer is free when both are applied (`mpips.transport.channel`).

To another node they go in one message, after the gradient of the server's shard: for each table the
number of rows, their places, coded as gaps, and the sums. If the places equal those of the worker's
last push, they are not sent again (Li et al., OSDI 2014, section 5.1: key caching): a server takes
a worker's pushes in order. Sums are packed by the codec of pushes, if it packs rows
(`mpips.codecs.Codec.for_rows`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpips.codecs import Codec, MessageId, buffer_for, codec_for
from mpips.kernels.row_groups import most_bytes, read_places, spread, write_places
from mpips.mpi.start import is_open_mpi
from mpips.mpi.window import TRANSFER_MAX_BYTES, Field, Window
from mpips.planning.tables import JobTable
from mpips.transport.push_sender import BUFFERS
from mpips.transport.wire import Packing

HEAD_BYTES = 16  # of each table in a message: number of rows, and bytes of their places
WORD = 8  # bytes: numbers are aligned to it
# More than MPI sends eagerly: 64 KB by Open MPI on TCP, 32 KB by MPICH. MPICH does not keep a link
# busy with pieces of more than 64 KB.
PIECE_BYTES = (96 if is_open_mpi() else 60) << 10
MOST_PIECES = 1 << 10
PLACE = "tables/"  # prefix of a table's fields in a segment


def rows_fields(tables: Sequence[JobTable], servers: int, dtype: str) -> tuple[Field, ...]:
    """Return the fields of a worker's segment for the rows of its pushes."""
    found = list[Field]()
    for table in tables:
        name, rows = f"{PLACE}{table.name}", table.push_rows
        found += [
            Field(f"{name}/starts", "i8", (BUFFERS, servers + 1)),
            Field(f"{name}/places", "i8", (BUFFERS, rows), sparse=True),
            Field(f"{name}/sums", dtype, (BUFFERS, rows, table.dim), sparse=True),
        ]
    return tuple(found)


class Section(NamedTuple):
    """A push's gradients of one server's rows of a table.

    Attributes:
        places: Places of the rows in the server, each once, shape (k,), dtype int64.
        sums: Sum of the gradients of each row, shape (k, dim).
    """

    places: np.ndarray
    sums: np.ndarray


class Sections:
    """Rows of a worker's open pushes, of one table. Collective: no.

    Attributes:
        starts: First row of each server, and the end of the last one's, shape (BUFFERS, servers +
            1), dtype int64.
        places: See `Section`; shape (BUFFERS, most rows of a push), dtype int64.
        sums: See `Section`; shape (BUFFERS, most rows of a push, dim).
    """

    def __init__(self, window: Window, rank: int, table: str) -> None:
        names = (f"{PLACE}{table}/{name}" for name in ("starts", "places", "sums"))
        self.starts, self.places, self.sums = (window.view(rank, name) for name in names)

    def of(self, seq: int, server: int) -> Section:
        """Return the section of push `seq` for a server."""
        k = seq % BUFFERS
        begin, end = self.starts[k, server : server + 2].tolist()
        return Section(self.places[k, begin:end], self.sums[k, begin:end])


# To another node -------------------------------------------------------------------------------


def rows_codec(codec: Codec | None, dim: int) -> Codec | None:
    """Return the codec for rows of `dim` elements, or None if they are not packed."""
    return None if codec is None else codec.for_rows(dim)


class SentList:
    """The last list of places that was sent. Collective: no.

    Args:
        rows: Number of rows of the server.
    """

    def __init__(self, rows: int) -> None:
        self._each = most_bytes(rows)
        self._last = np.zeros(0, "u1")

    def encode(self, places: np.ndarray) -> np.ndarray:
        """Return the code of places, in new memory; empty if they equal the last list.

        Args:
            places: Shape (n,), dtype int64; increasing.
        """
        coded = np.empty(len(places) * self._each, "u1")
        coded = coded[: write_places(places, coded)].copy()
        if np.array_equal(coded, self._last):
            return coded[:0]
        self._last = coded
        return coded


def padded(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of `WORD`."""
    return -(-nbytes // WORD) * WORD


class _Share(NamedTuple):
    """Limits of a push for one server, of one table.

    Attributes:
        most: Most rows of a push.
        rows: Rows of the server.
        dim: Elements of a row.
    """

    most: int
    rows: int
    dim: int

    @classmethod
    def of(cls, table: JobTable, servers: int, server: int) -> "_Share":
        rows = table.owned_by(servers).count(server)
        return cls(min(table.push_rows, rows), rows, table.dim)

    def nbytes(self, itemsize: int) -> int:
        """Return the most bytes in a message."""
        lists = padded(self.most * most_bytes(self.rows))
        return HEAD_BYTES + lists + padded(self.most * self.dim * itemsize)


def pieces_of(message: np.ndarray, most: int) -> list[np.ndarray]:
    """Cut a message of at most `most` bytes into transfers; their number depends only on `most`."""
    step = TRANSFER_MAX_BYTES
    return [message[b : b + step] for b in range(0, most, step)]


def pieces_in_turn(message: np.ndarray) -> list[np.ndarray]:
    """Cut a message into transfers; a server receives only a few of them at a time."""
    step = max(PIECE_BYTES, -(-message.size // MOST_PIECES))
    return [message[b : b + step] for b in range(0, message.size, step)]


class SumsPacker:
    """Packs the sums of one table's rows in a worker's pushes to one server of another node.

    Args:
        packing: Packing of pushes to other nodes.
        dim: Elements of a row.
        worker: Number of the worker.
        server: Number of the server.
        number: Number of the table, in the order of the job's.
    """

    def __init__(self, packing: Packing, dim: int, worker: int, server: int, number: int) -> None:
        self._codec, self._before = rows_codec(packing.codec, dim), packing.before
        # No slice of the parameters begins there, so no other message has the same random numbers.
        begin = -1 - (number << 32) - server
        self._message_id = MessageId(packing.seed, worker, 0, begin)

    def nbytes(self, sums: np.ndarray) -> int:
        """Return the bytes that `write` uses in a message."""
        return _nbytes(sums.size, sums.dtype, self._codec)

    def write(self, sums: np.ndarray, message: np.ndarray, seq: int) -> None:
        """Write the sums of push `seq`, shape (k, dim), to the beginning of a message."""
        vector = sums.reshape(-1)
        codec = codec_for(self._codec, vector.size, vector.dtype)
        if codec is None:
            message[: vector.nbytes].view(vector.dtype)[:] = vector
            return
        message_id = replace(self._message_id, number=self._before + seq)
        part = message[: codec.wire_bytes(vector.size, vector.dtype)]
        codec.encode(vector, part, (), message_id)

    def arrived(self, sums: np.ndarray, seq: int) -> np.ndarray:
        """Return the sums of push `seq` as a server receives them, shape (k, dim)."""
        message = buffer_for(self.nbytes(sums))
        self.write(sums, message, seq)
        return _read(message, np.empty_like(sums).reshape(-1), self._codec).reshape(sums.shape)


class RowsPacker:
    """Packs the rows of a worker's pushes for a server of another node. Collective: no.

    Args:
        window: Window of the store.
        rank: Rank of the worker.
        tables: Tables of the job.
        servers: Number of servers.
        server: Number of the server.
        packing: Packing of pushes to other nodes.
        worker: Number of the worker.

    Attributes:
        most: Most bytes of a message.
    """

    def __init__(
        self,
        window: Window,
        rank: int,
        tables: Sequence[JobTable],
        servers: int,
        server: int,
        packing: Packing,
        worker: int,
    ) -> None:
        self._server = server
        self._sections = [Sections(window, rank, table.name) for table in tables]
        self._packers = [
            SumsPacker(packing, table.dim, worker, server, k) for k, table in enumerate(tables)
        ]
        shares = [_Share.of(table, servers, server) for table in tables]
        self._lists = [SentList(share.rows) for share in shares]
        self.most = sum(share.nbytes(self._sections[0].sums.itemsize) for share in shares)
        self._messages = [buffer_for(0) for _ in range(BUFFERS)]

    def pack(self, seq: int) -> np.ndarray:
        """Return the message of push `seq`; valid until the push's buffer is used again."""
        found = [sections.of(seq, self._server) for sections in self._sections]
        pairs = zip(self._lists, found, strict=True)
        lists = [sent.encode(section.places) for sent, section in pairs]
        at = HEAD_BYTES * len(found)
        sizes = [each.nbytes(s.sums) for each, s in zip(self._packers, found, strict=True)]
        message = self._room(seq % BUFFERS, at + sum(map(padded, map(len, lists))) + sum(sizes))
        head = message[:at].view("i8").reshape(-1, 2)
        for row, section, coded, packer in zip(head, found, lists, self._packers, strict=True):
            row[:] = len(section.places), len(coded)
            message[at : at + len(coded)] = coded
            at += padded(len(coded))
            packer.write(section.sums, message[at:], seq)
            at += packer.nbytes(section.sums)
        return message

    def pack_in_turn(self, seq: int) -> tuple[int, list[np.ndarray]]:
        """Return the bytes of the message of `pack`, and its pieces from `pieces_in_turn`."""
        message = self.pack(seq)
        return message.size, pieces_in_turn(message)

    def _room(self, slot: int, nbytes: int) -> np.ndarray:
        if self._messages[slot].size < nbytes:
            self._messages[slot] = buffer_for(nbytes + nbytes // 2)
        return self._messages[slot][:nbytes]


def _nbytes(n: int, dtype: np.dtype, codec: Codec | None) -> int:
    """Return the bytes of `n` elements in a message."""
    found = codec_for(codec, n, dtype)
    return padded(found.wire_bytes(n, dtype) if found is not None else n * dtype.itemsize)


def _read(message: np.ndarray, out: np.ndarray, codec: Codec | None) -> np.ndarray:
    """Return the elements at the beginning of a message, as many as `out` has.

    They are in `out` if they were packed, else in the message.
    """
    found = codec_for(codec, out.size, out.dtype)
    if found is None:
        return message[: out.nbytes].view(out.dtype)
    found.decode(message[: found.wire_bytes(out.size, out.dtype)], out)
    return out


class RowsUnpacker:
    """Unpacks the rows of remote pushes for one server, one push at a time. Collective: no.

    Args:
        tables: Tables of the job.
        servers: Number of servers.
        server: Number of the server.
        dtype: dtype of the rows.
        codec: Codec of pushes from other nodes.
    """

    def __init__(
        self, tables: Sequence[JobTable], servers: int, server: int, dtype: str, codec: Codec | None
    ) -> None:
        self._shares = [_Share.of(table, servers, server) for table in tables]
        self._dtype = np.dtype(dtype)
        self._codecs = [rows_codec(codec, share.dim) for share in self._shares]
        self._places = [np.empty(share.most, "i8") for share in self._shares]
        self._sums = [np.empty(share.most * share.dim, dtype) for share in self._shares]
        self._lists: dict[tuple[int, int], np.ndarray] = {}  # coded places, by worker and table
        self._nbytes = sum(share.nbytes(self._dtype.itemsize) for share in self._shares)

    def place(self) -> np.ndarray:
        """Return memory for a message of any push, shape (nbytes,), dtype uint8."""
        return buffer_for(self._nbytes)

    def pieces(self, message: np.ndarray) -> list[np.ndarray]:
        """Return the pieces in which a message arrives."""
        return pieces_in_turn(message)

    def unpack(self, worker: int, message: np.ndarray) -> tuple[Section, ...]:
        """Return the rows of a worker's next push, by table; valid until the next call.

        Args:
            worker: Number of the worker; its pushes are unpacked in order.
            message: The received message; do not change it while the result is in use.
        """
        at, found = HEAD_BYTES * len(self._shares), []
        head = message[:at].view("i8").reshape(-1, 2).tolist()
        for number, (count, nbytes) in enumerate(head):
            if nbytes:
                self._lists[worker, number] = message[at : at + nbytes].copy()
            at += padded(nbytes)
            places, dim = self._places[number][:count], self._shares[number].dim
            if count:
                read = read_places(self._lists[worker, number], np.zeros(2, np.int64), places)
                assert read == count, f"{read} places, expected {count}"
            codec = self._codecs[number]
            sums = _read(message[at:], self._sums[number][: count * dim], codec)
            at += _nbytes(sums.size, self._dtype, codec)
            found.append(Section(places, sums.reshape(count, dim)))
        return tuple(found)


def warm(dtype: str) -> None:
    """Compile the loops of rows in messages, or load them from the cache on disk."""
    places, ones = np.zeros(1, np.int64), np.ones((1, 1), dtype)
    read_places(SentList(1).encode(places), np.zeros(2, np.int64), places)
    spread(ones, places, np.arange(2), ones.copy())
