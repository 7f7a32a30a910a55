"""Undo log of a server's updates, from which a successor recovers.

Before an update the server publishes the push's identity and the begun version. It updates its
shard piece by piece. Before each piece it copies the piece's old values into one half of the undo
memory, and then publishes the piece's number. The next piece uses the other half. These words tell
a successor how far the dead server came (`recover`):

- No version is begun beyond the committed one: no update is under way. If the push of the committed
  version is not in the ledger yet, the successor writes it there.
- A version is begun, and none of its pieces is published: nothing has changed. The successor
  applies the push.
- A version is begun, and piece k is published: pieces before k are updated, and pieces after k are
  unchanged. Piece k may be partly updated, and is set to its old values. The successor applies the
  push from piece k on, and keeps the old values again: it may die as well.

Pieces are so small that the rule's loop finds them, and the undo memory, in the L1 cache
(`mpips.kernels.rule_loops.undoable`, and `mpips.kernels.exchange.serving`, which numbers them
alike). If compensation of staleness has a state, it changes before the rule is applied. A piece is
then a block of `UNDO_BYTES`.

The push's gradient is still in its worker's buffer, which the worker reuses only after the ledger
shows the push. When a process is killed, its stores up to some instruction are in memory, in
program order. `publish` and `store_ordered` stop the compiler from reordering them.

The rows of a push change piece by piece after the shard, and their pieces are numbered after the
shard's, table by table. Before a piece the server copies its lines, and whether they have been
touched, into one half of the undo memory. Then it publishes the piece's number. So if piece k is
one of rows, the shard and the pieces before k are updated. The lines of piece k are set to their
old values, and the push is applied from k on. An update takes 1.4 times as long, since the copy
fetches the lines.

A lazy table assigns lines to all rows of a push before it changes the first of them. Repeated
assignment gives the same lines: a row has its line as soon as the index contains it. A line that
was assigned but not put into the index yet is put there. A larger index that was not in use yet is
made anew.

A successor does not know the rows changed since the last checkpoint, so the next checkpoint
contains all rows.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpips.config.names import EMA
from mpips.kernels import rows
from mpips.kernels.atomics import observe, publish
from mpips.kernels.exchange import NUMBER_BITS, PIECE, PUSH, SEQ_BITS, WORKER_BITS, push_word
from mpips.kernels.rule_loops import Undo
from mpips.layout.tables import Table
from mpips.mpi.process import STARTED, stat_of
from mpips.mpi.window import Field, Window
from mpips.optim import Change, Rule
from mpips.optim.row_rules import RowRule
from mpips.optim.staleness import Staleness
from mpips.planning.tables import JobTable
from mpips.ps.parts import BLOCK_BYTES, Block, DensePart
from mpips.ps.shard import Server
from mpips.transport.push import Push
from mpips.transport.remote_reads import BEGUN, COMMITTED

if TYPE_CHECKING:
    from mpips.tables.server import ServedTable

PROCESS, BORN, SPACE = range(PIECE + 1, PIECE + 4)  # words of an undo log, after its first ones
PIECE_BYTES = 1 << 10  # of parameters in a piece: with slots and undo it stays in the L1 cache
UNDO_BYTES = 128 << 10  # of a piece that is a block: it stays in the L2 cache
ROW_UNDO_BYTES = 1 << 18  # of lines in a piece: with their undo they stay in an L2 cache
HALVES = 2


def undo_log_fields(size: int, rule: Rule, stale: Staleness, dtype: str) -> tuple[Field, ...]:
    """Return the fields of a server's segment for the undo log of `size` elements."""
    slots = len(rule.slots + stale.slots)
    piece_bytes = UNDO_BYTES if stale.slots else PIECE_BYTES
    most = min(size, piece_bytes // np.dtype(dtype).itemsize)
    return (Field("undo_log", "i8", (8,)), Field("undo", dtype, (HALVES, 1 + slots, most)))


def row_undo_fields(tables: Sequence[JobTable], dtype: str) -> tuple[Field, ...]:
    """Return the fields of a server's segment for the old values of its rows."""
    if not tables:
        return ()
    item = np.dtype(dtype).itemsize
    widths = [table.rule.width(table.dim) for table in tables]
    numbers = max(width * _rows_of_piece(width * item) for width in widths)
    most = max(_rows_of_piece(width * item) for width in widths)
    return (Field("row_undo", dtype, (HALVES, numbers)), Field("touched", "i8", (HALVES, most)))


def _rows_of_piece(line_bytes: int) -> int:
    return max(1, ROW_UNDO_BYTES // line_bytes)


class UndoLog:
    """Progress of a server's updates, and the identity of its process. Collective: no.

    Pieces of an update are numbered, the dense part's first. Pieces of a later version have larger
    numbers.

    Args:
        undo_log: Words of the server's segment, shape (8,), dtype int64.

    Attributes:
        next: Number of the next piece.
        first: Number of the first piece that is not applied, in an update that was under way when
            the shard was taken over.
    """

    def __init__(self, undo_log: np.ndarray) -> None:
        self.undo_log = undo_log
        self.next = self.first = 0

    def sign(self) -> None:
        """Publish this process as the server of the shard."""
        publish(self.undo_log, PROCESS, os.getpid())
        publish(self.undo_log, BORN, int(stat_of(os.getpid())[STARTED]))
        publish(self.undo_log, SPACE, process_space())

    def begin(self, push: Push, version: int) -> None:
        """Publish the identity of the push that makes a version."""
        publish(self.undo_log, PUSH, push_word(version, push.worker, push.seq))
        self.next = version << NUMBER_BITS


class DenseUndo:
    """Old values of a shard during an update. Collective: no.

    Args:
        log: Undo log of the server.
        values: Memory for the old values, shape (HALVES, vectors, elements of a piece).
        part: The shard.

    Attributes:
        values: As given.
        block_bytes: Bytes of parameters in a block of an update.
    """

    def __init__(self, log: UndoLog, values: np.ndarray, part: DensePart) -> None:
        self._log, self.values, self._part = log, values, part
        self._by_blocks = bool(part.stale.slots)  # a piece is a block, kept before compensation
        self.block_bytes = UNDO_BYTES if self._by_blocks else BLOCK_BYTES

    def rest(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yield the blocks of an update that are not applied, and number their pieces.

        See `UndoLog.first`.
        """
        log = self._log
        for block in blocks:
            end = log.next + self._pieces(block)
            if log.next < log.first < end:
                block = self._after_pieces(block, log.first - log.next)
                log.next = log.first
            if log.next >= log.first:
                if self._by_blocks:
                    self._undo(log.next).keep((block.params, *block.slots))
                yield block
            log.next = end

    def apply(self, block: Block, grad: np.ndarray, step: int, lr: float) -> None:
        """Apply a block's rule, as `mpips.optim.Rule.apply`; keeps the old values of each piece."""
        rule, params, slots = block.rule, block.params, block.slots
        if self._by_blocks:
            rule.apply(params, grad, slots[: len(rule.slots)], step, lr)
        else:
            rule.apply_undoable(params, grad, slots, step, lr, self._undo(self._log.next))

    def undo_piece(self, number: int, push: Push | None) -> int:
        """Undo a piece that may be partly updated.

        Args:
            number: Number of the piece in the shard. If it is negative or too large, nothing is
                undone.
            push: The push, if this process has it.

        Returns:
            The number less the pieces of the shard.
        """
        for block in self._part.blocks:
            pieces = self._pieces(block)
            if 0 <= number < pieces:
                behind = self._after_pieces(block, number)
                self._undo(self._log.first).put_back((behind.params, *behind.slots))
            number -= pieces
        return number

    def _pieces(self, block: Block) -> int:
        return -(-block.params.size // self.values.shape[2])

    def _after_pieces(self, block: Block, pieces: int) -> Block:
        """Return a block without its first pieces."""
        at = pieces * self.values.shape[2]
        rest = slice(block.range.start + at, block.range.stop)
        slots = tuple(slot[at:] for slot in block.slots)
        return block._replace(range=rest, params=block.params[at:], slots=slots)

    def _undo(self, number: int) -> Undo:
        return Undo(self.values, self._log.undo_log, PIECE, number)


class RowUndo:
    """Old lines of a server's rows during an update. Collective: no.

    Args:
        log: Undo log of the server.
        memory: Fields ``row_undo`` and ``touched`` of the window.
        tables: The server's tables.
    """

    def __init__(
        self, log: UndoLog, memory: tuple[np.ndarray, np.ndarray], tables: "Sequence[ServedTable]"
    ) -> None:
        self._log, (self._lines, self._touched), self._tables = log, memory, tables

    def pieces(self, slot: np.ndarray, lines: np.ndarray, stripes: np.ndarray) -> Iterator[slice]:
        """See `mpips.tables.shard.Undo`; skips the pieces that are already applied."""
        log, step = self._log, _rows_of_piece(lines.shape[1] * lines.itemsize)
        for at in range(0, len(slot), step):
            number, log.next = log.next, log.next + 1
            if number >= log.first:
                part = slice(at, at + step)
                kept = self._kept(number, len(slot[part]), lines.shape[1])
                rows.keep(slot[part], lines, stripes, *kept)
                publish(log.undo_log, PIECE, number)
                yield part

    def undo_piece(self, number: int, push: Push | None) -> int:
        """Undo a piece that may be partly updated; see `DenseUndo.undo_piece`."""
        for served in self._tables:
            if served.shard.index is not None:
                served.shard.index.mend()
        if number < 0:
            return number
        assert push is not None, "tables are of one node"
        for served, (places, sums) in zip(self._tables, push.rows, strict=True):
            width = served.table.rule.width(served.table.dim)
            step = _rows_of_piece(width * sums.itemsize)
            pieces = -(-len(places) // step)
            if 0 <= number < pieces:
                part = places[number * step :][:step]
                served.shard.put_back(part, *self._kept(self._log.first, len(part), width))
            number -= pieces
        return number

    def _kept(self, number: int, count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the memory for a piece's old lines, and for whether each had been touched."""
        half = number % HALVES
        lines = self._lines[half, : count * width].reshape(count, width)
        return lines, self._touched[half, :count]


def keep_undo(server: Server, window: Window, rank: int) -> None:
    """Have a server keep the undo log that another server needs to take its shard over.

    Args:
        server: The server, with all of its parts.
        window: Window of the store.
        rank: Rank of the server that began with the shard.
    """
    server.undo = log = UndoLog(window.view(rank, "undo_log"))
    server.dense.undo = DenseUndo(log, window.view(rank, "undo"), server.dense)
    server.dense.cut()
    if server.rows is not None:
        memory = window.view(rank, "row_undo"), window.view(rank, "touched")
        server.rows.undo = RowUndo(log, memory, server.rows.tables)


def recover(server: Server, find: Callable[[int, int], Push | None]) -> bool:
    """Bring the shard of a dead server, and its ledger, to a committed version.

    An update under way stays unfinished if this process does not have its push. The server then
    needs that push before all others, and no worker reads meanwhile.

    Args:
        server: New server of the shard; see `keep_undo`. The process that served the shard must be
            gone; see `process_of`. The shard may be taken over again.
        find: Returns a push by its worker and number, if this process has it; the ledger does not
            contain it.

    Returns:
        Whether an update was under way.

    Blocks: until local readers that the dead server had granted reads have copied.
    """
    log = server.undo
    assert log is not None, "it keeps what is needed"
    server.version = observe(server.header, COMMITTED)
    begun = observe(server.header, BEGUN)
    rest, seq = divmod(observe(log.undo_log, PUSH), 1 << SEQ_BITS)  # see `push_word`
    odd, worker = divmod(rest, 1 << WORKER_BITS)
    continued = begun > server.version
    if continued:
        push = find(worker, seq)
        _undo_piece(server, log, begun, push)
        server.resumes = worker, seq
        if push is not None:
            server.apply(push)
    elif odd == server.version & 1 and seq == observe(server.applied, worker) + 1:
        publish(server.applied, worker, seq)
    if server.grants is not None:
        server.grants.let_finish()
    log.sign()
    return continued


def _undo_piece(server: Server, log: UndoLog, begun: int, push: Push | None) -> None:
    """Undo the piece of an update that may be partly done, so that the rest can be applied.

    Args:
        server: Server of the shard.
        log: Undo log of the server.
        begun: The version that the update makes.
        push: The push, if this process has it.
    """
    noted = observe(log.undo_log, PIECE)
    version, number = divmod(noted, 1 << NUMBER_BITS)
    if version == begun:
        log.first = noted
    else:
        number = -1  # nothing has changed
    for part in server.parts:
        assert part.undo is not None, "it keeps what is needed"
        number = part.undo.undo_piece(number, push)


def warm(rule: Rule, dtype: str) -> None:
    """Compile the loops that only a server with an undo log needs, or load them from the cache."""
    params, grad, *slots = np.zeros((2 + len(rule.slots), 1), dtype)
    undo = Undo(np.zeros((HALVES, 1 + len(slots), 1), dtype), np.zeros(8, np.int64), PIECE, 0)
    for one in (rule, Change(averaged=EMA in rule.slots)):
        one.apply_undoable(params, grad, tuple(slots), 1, 0.1, undo)


def warm_rows(table: Table, rule: RowRule, dtype: str) -> None:
    """Compile the loops for rows that only such a server needs, or load them from the cache."""
    from mpips.tables.shard import one_row

    shard, width = one_row(table, rule, dtype), rule.width(table.dim)
    place, touched, lines = np.zeros(1, "i8"), np.zeros((2, 1), "i8"), np.zeros((2, width), dtype)
    undo = RowUndo(UndoLog(np.zeros(8, "i8")), (lines, touched), ())
    shard.apply(place, np.zeros((1, table.dim), dtype), rule.rate, undo)
    if shard.index is not None:
        shard.index.mend()
    shard.put_back(place, lines[:1], touched[0])


def process_of(window: Window, rank: int) -> list[int]:
    """Return the process of a local shard's server: id, start time and `process_space`."""
    undo_log = window.view(rank, "undo_log")
    return [observe(undo_log, word) for word in (PROCESS, BORN, SPACE)]


def process_space() -> int:
    """Return the identity of this container's process ids; see pid_namespaces(7)."""
    return os.stat("/proc/self/ns/pid").st_ino
