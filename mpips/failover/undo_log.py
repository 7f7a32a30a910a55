"""Undo log of a server's updates, from which a successor recovers.

Before an update the server publishes which push that is, and that a version has begun. It updates
its shard piece by piece. Before a piece it copies the piece's old values into one half of the undo
memory, and then publishes the piece's number; the next piece goes into the other half. So whatever
the last thing is that it did, by these words (`recover`)

- no version is begun beyond the one committed: no update is under way. Is the push of the version
  committed not in the ledger yet, it is written there.
- a version is begun, and no piece of it noted: nothing is changed. The push is applied.
- a version is begun, and piece k of it noted: those before k are whole, k may be anything and is
  set to its old values, those behind it are as they were. The push is applied from piece k on, and
  its old values are kept once more: who does that may die as well.

Pieces are so small that the loop of the rule finds them, and the undo memory, in the first-level
cache (`mpips.kernels.rule_loops.undoable`, and `mpips.kernels.exchange.serving`, which numbers them
alike). Where staleness is compensated by a state of its own, which changes before the rule comes, a
piece is a block of `UNDO_BYTES`.

The push's gradient still lies in its worker's buffer, which is free only with the ledger.
What the kernel keeps of a process that was killed are its stores up to one instruction, in their
order: `publish` and `store_ordered` keep the compiler from another one.

The rows of a push are changed piece by piece, behind the pieces of the shard, and pieces are
numbered on behind those, table by table. Before a piece its lines are copied into one half of the
undo memory, with what says whether they have been touched, and then its number is published. So of
an update of which piece k is noted the shard is whole, and so are the pieces before k; the lines of
k are set back to what they were; and the push is applied from k on. An update takes 1.4 times as
long, as it is the copying that fetches the lines.

Lines of a lazy table are given to all rows of a push before the first of them is changed, and given
again they are the same: a row has one as soon as the index says so. A line that was given and not
put into the index yet is put there. A larger index that was not in use yet is made anew.

Which rows have changed since the last checkpoint, who takes over them does not know: the next one
has all.
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

PROCESS, BORN, SPACE = range(PIECE + 1, PIECE + 4)  # words of an undo log, behind its first ones
PIECE_BYTES = 1 << 10  # of parameters in a piece: with slots and undo it stays in the L1 cache
UNDO_BYTES = 128 << 10  # likewise where a piece is a block, and the L2 cache
ROW_UNDO_BYTES = 1 << 18  # of lines in a piece: with those that they are of, within an L2 cache
HALVES = 2


def undo_log_fields(size: int, rule: Rule, stale: Staleness, dtype: str) -> tuple[Field, ...]:
    """Return the fields of a server's segment for a shard of `size` elements."""
    slots = len(rule.slots + stale.slots)
    piece_bytes = UNDO_BYTES if stale.slots else PIECE_BYTES
    most = min(size, piece_bytes // np.dtype(dtype).itemsize)
    return (Field("undo_log", "i8", (8,)), Field("undo", dtype, (HALVES, 1 + slots, most)))


def row_undo_fields(tables: Sequence[JobTable], dtype: str) -> tuple[Field, ...]:
    """Return the fields of a server's segment that keep the old values of its rows."""
    if not tables:
        return ()
    item = np.dtype(dtype).itemsize
    widths = [table.rule.width(table.dim) for table in tables]
    numbers = max(width * _rows_of_piece(width * item) for width in widths)
    most = max(_rows_of_piece(width * item) for width in widths)
    return (Field("row_undo", dtype, (HALVES, numbers)), Field("touched", "i8", (HALVES, most)))


def _rows_of_piece(line_bytes: int) -> int:
    return max(1, ROW_UNDO_BYTES // line_bytes)


def _what_word(word: int) -> tuple[int, int, int]:
    """Return whether the version is odd, the worker, its push."""
    rest, seq = divmod(word, 1 << SEQ_BITS)
    return *divmod(rest, 1 << WORKER_BITS), seq


class UndoLog:
    """What a server notes of its updates, and who it is. Collective: no.

    Pieces of an update are numbered from the dense part's on, and the numbers of a later version
    are larger.

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
        """Say that this process serves the shard."""
        publish(self.undo_log, PROCESS, os.getpid())
        publish(self.undo_log, BORN, int(stat_of(os.getpid())[STARTED]))
        publish(self.undo_log, SPACE, process_space())

    def begin(self, push: Push, version: int) -> None:
        """Note which push makes a version."""
        publish(self.undo_log, PUSH, push_word(version, push.worker, push.seq))
        self.next = version << NUMBER_BITS


class DenseUndo:
    """The old values of a shard, while an update changes it. Collective: no.

    Args:
        log: Of the server.
        values: Memory for them, shape (HALVES, vectors, elements of a piece).
        part: The shard.

    Attributes:
        values: As given.
        block_bytes: Of parameters that are updated at a time.
    """

    def __init__(self, log: UndoLog, values: np.ndarray, part: DensePart) -> None:
        self._log, self.values, self._part = log, values, part
        self._whole = bool(part.stale.slots)  # pieces are blocks, kept before these change
        self.block_bytes = UNDO_BYTES if self._whole else BLOCK_BYTES

    def rest(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yield what is not applied of an update, and number its pieces; see `UndoLog.first`."""
        log = self._log
        for block in blocks:
            end = log.next + self._pieces(block)
            if log.next < log.first < end:
                block = self._behind(block, log.first - log.next)
                log.next = log.first
            if log.next >= log.first:
                if self._whole:
                    self._undo(log.next).keep((block.params, *block.slots))
                yield block
            log.next = end

    def apply(self, block: Block, grad: np.ndarray, step: int, lr: float) -> None:
        """Apply a block's rule, as `mpips.optim.Rule.apply`; keeps the old values of each piece."""
        rule, params, slots = block.rule, block.params, block.slots
        if self._whole:
            rule.apply(params, grad, slots[: len(rule.slots)], step, lr)
        else:
            rule.apply_undoable(params, grad, slots, step, lr, self._undo(self._log.next))

    def go_back(self, number: int, push: Push | None) -> int:
        """Undo what may be half done of a piece.

        Args:
            number: Which piece of the shard; none of it if that is negative, or too large.
            push: What is applied, if it is here.

        Returns:
            The number less the pieces of the shard.
        """
        for block in self._part.blocks:
            pieces = self._pieces(block)
            if 0 <= number < pieces:
                behind = self._behind(block, number)
                self._undo(self._log.first).put_back((behind.params, *behind.slots))
            number -= pieces
        return number

    def _pieces(self, block: Block) -> int:
        return -(-block.params.size // self.values.shape[2])

    def _behind(self, block: Block, pieces: int) -> Block:
        """Return a block without its first pieces."""
        at = pieces * self.values.shape[2]
        rest = slice(block.range.start + at, block.range.stop)
        slots = tuple(slot[at:] for slot in block.slots)
        return block._replace(range=rest, params=block.params[at:], slots=slots)

    def _undo(self, number: int) -> Undo:
        return Undo(self.values, self._log.undo_log, PIECE, number)


class RowUndo:
    """The old lines of a server's rows, while an update changes them. Collective: no.

    Args:
        log: Of the server.
        memory: Of the window: ``row_undo`` and ``touched``.
        tables: The server's rows.
    """

    def __init__(
        self, log: UndoLog, memory: tuple[np.ndarray, np.ndarray], tables: "Sequence[ServedTable]"
    ) -> None:
        self._log, (self._lines, self._touched), self._tables = log, memory, tables

    def pieces(self, slot: np.ndarray, lines: np.ndarray, stripes: np.ndarray) -> Iterator[slice]:
        """See `mpips.tables.shard.Undo`; those that are applied already are left out."""
        log, step = self._log, _rows_of_piece(lines.shape[1] * lines.itemsize)
        for at in range(0, len(slot), step):
            number, log.next = log.next, log.next + 1
            if number >= log.first:
                part = slice(at, at + step)
                kept = self._kept(number, len(slot[part]), lines.shape[1])
                rows.keep(slot[part], lines, stripes, *kept)
                publish(log.undo_log, PIECE, number)
                yield part

    def go_back(self, number: int, push: Push | None) -> int:
        """Undo what may be half done of a piece; see `DenseUndo.go_back`."""
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
        """Return where the lines of a piece are kept, and which of them had been touched."""
        half = number % HALVES
        lines = self._lines[half, : count * width].reshape(count, width)
        return lines, self._touched[half, :count]


def keep_undo(server: Server, window: Window, rank: int) -> UndoLog:
    """Have a server keep what another one needs to take its shard over.

    Args:
        server: The server, with all of its parts.
        window: Of the store.
        rank: Of the server that began with the shard.
    """
    server.undo = log = UndoLog(window.view(rank, "undo_log"))
    server.dense.undo = DenseUndo(log, window.view(rank, "undo"), server.dense)
    server.dense.cut()
    if server.rows is not None:
        memory = window.view(rank, "row_undo"), window.view(rank, "touched")
        server.rows.undo = RowUndo(log, memory, server.rows.tables)
    return log


def recover(server: Server, find: Callable[[int, int], Push | None]) -> bool:
    """Bring the shard of a server that has died, and its ledger, to a version.

    Where an update was under way of a push that is not here, it stays as it is until the server
    gets that push, which has to be the next, and nobody reads meanwhile.

    Args:
        server: Serves the shard from now on; see `keep_undo`. The process that has served it must
            be gone; see `process_of`. It may be taken over again.
        find: Returns the push of a worker and a number, which is not in the ledger, if that is
            here.

    Returns:
        Whether an update was under way.

    Blocks: until those local readers have copied that the dead server had let.
    """
    log = server.undo
    assert log is not None, "it keeps what is needed"
    server.version = observe(server.header, COMMITTED)
    begun = observe(server.header, BEGUN)
    odd, worker, seq = _what_word(observe(log.undo_log, PUSH))
    continued = begun > server.version
    if continued:
        push = find(worker, seq)
        _go_back(server, log, begun, push)
        server.resumes = worker, seq
        if push is not None:
            server.apply(push)
    elif odd == server.version & 1 and seq == observe(server.applied, worker) + 1:
        publish(server.applied, worker, seq)
    if server.grants is not None:
        server.grants.let_finish()
    log.sign()
    return continued


def _go_back(server: Server, log: UndoLog, begun: int, push: Push | None) -> None:
    """Undo what may be half done of an update, so that the rest of it can be applied.

    Args:
        server: Of the shard.
        log: Of the server.
        begun: The version that the update makes.
        push: What is applied, if it is here.
    """
    noted = observe(log.undo_log, PIECE)
    version, number = divmod(noted, 1 << NUMBER_BITS)
    if version == begun:
        log.first = noted
    else:
        number = -1  # nothing is changed
    for part in server.parts:
        assert part.undo is not None, "it keeps what is needed"
        number = part.undo.go_back(number, push)


def warm(rule: Rule, dtype: str) -> None:
    """Compile, or load from the cache on disk, the loops that only such a server needs."""
    params, grad, *slots = np.zeros((2 + len(rule.slots), 1), dtype)
    undo = Undo(np.zeros((HALVES, 1 + len(slots), 1), dtype), np.zeros(8, np.int64), PIECE, 0)
    for one in (rule, Change(averaged=EMA in rule.slots)):
        one.apply_undoable(params, grad, tuple(slots), 1, 0.1, undo)


def warm_rows(table: Table, rule: RowRule, dtype: str) -> None:
    """Compile, or load from the cache on disk, the loops that only such a server needs."""
    from mpips.tables.shard import one_row

    shard, width = one_row(table, rule, dtype), rule.width(table.dim)
    place, touched, lines = np.zeros(1, "i8"), np.zeros((2, 1), "i8"), np.zeros((2, width), dtype)
    undo = RowUndo(UndoLog(np.zeros(8, "i8")), (lines, touched), ())
    shard.apply(place, np.zeros((1, table.dim), dtype), rule.rate, undo)
    if shard.index is not None:
        shard.index.mend()
    shard.put_back(place, lines[:1], touched[0])


def process_of(window: Window, rank: int) -> list[int]:
    """Return who serves a shard of this node: process id, when it was started, `process_space`."""
    undo_log = window.view(rank, "undo_log")
    return [observe(undo_log, word) for word in (PROCESS, BORN, SPACE)]


def process_space() -> int:
    """Return what tells the process ids of this container from others' (pid_namespaces(7))."""
    return os.stat("/proc/self/ns/pid").st_ino
