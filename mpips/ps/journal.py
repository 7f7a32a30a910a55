"""What a server notes while it applies pushes, so that another can go on after its death.

Before an update the server publishes which push that is, and that a version has begun. It updates
its shard piece by piece. Before a piece it copies the piece's old values into one half of the undo
memory, and then publishes the piece's number; the next piece goes into the other half. So whatever
the last thing is that it did, by these words (`Adopted.recover`)

- no version is begun beyond the one committed: no update is under way. Is the push of the version
  committed not in the ledger yet, it is written there.
- a version is begun, and no piece of it noted: nothing is changed. The push is applied.
- a version is begun, and piece k of it noted: those before k are whole, k may be anything and is
  set to its old values, those behind it are as they were. The push is applied from piece k on, and
  its old values are kept once more: who does that may die as well.

Pieces are so small that the loop of the rule finds them, and the undo memory, in the first-level
cache (`mpips.kernels.rule_loops.undoable`). Where staleness is compensated by a state of its own,
which changes before the rule comes, a piece is a block of `UNDO_BYTES`.

The push's gradient still lies in its worker's buffer, which is free only with the ledger.
What the kernel keeps of a process that was killed are its stores up to one instruction, in their
order: `publish` and `store_ordered` keep the compiler from another one.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpips.cluster.process import STARTED, stat_of
from mpips.cluster.window import Field, Window
from mpips.cluster.world import Cluster
from mpips.kernels.atomics import observe, publish
from mpips.kernels.rule_loops import Undo
from mpips.optim import Change, Rule
from mpips.optim.staleness import Staleness
from mpips.ps.shard import BLOCK_BYTES, Block, Server
from mpips.transport.far import BEGUN, COMMITTED
from mpips.transport.push import Push

PUSH, PIECE, PROCESS, BORN, SPACE = range(5)  # words of a journal
PIECE_BYTES = 1 << 10  # of parameters in a piece: with slots and undo it stays in the L1 cache
UNDO_BYTES = 128 << 10  # likewise where a piece is a block, and the L2 cache
HALVES = 2
SEQ_BITS, WORKER_BITS, NUMBER_BITS = 40, 21, 28


def journal_fields(size: int, rule: Rule, stale: Staleness, dtype: str) -> tuple[Field, ...]:
    """Return the fields of a server's segment for a shard of `size` elements."""
    slots = len(rule.slots + stale.slots)
    piece_bytes = UNDO_BYTES if stale.slots else PIECE_BYTES
    most = min(size, piece_bytes // np.dtype(dtype).itemsize)
    return (Field("journal", "i8", (8,)), Field("undo", dtype, (HALVES, 1 + slots, most)))


def _push_word(push: Push, version: int) -> int:
    """Return which push makes a version, of which it says whether it is odd."""
    return ((version & 1) << WORKER_BITS | push.worker) << SEQ_BITS | push.seq


def _what_word(word: int) -> tuple[int, int, int]:
    """Return whether the version is odd, the worker, its push."""
    rest, seq = divmod(word, 1 << SEQ_BITS)
    return *divmod(rest, 1 << WORKER_BITS), seq


class Journaled(Server):
    """A server that another can go on for; see `mpips.ps.shard.Server`. Collective: no."""

    def __init__(self, cluster: Cluster, window: Window, server_id: int, *args: Any) -> None:
        rank = cluster.roles.servers[server_id]
        self._journal, self._undo = window.view(rank, "journal"), window.view(rank, "undo")
        self._first = self._next = 0  # pieces of an update
        super().__init__(cluster, window, server_id, *args)

    def sign(self) -> None:
        """Say that this process serves the shard."""
        publish(self._journal, PROCESS, os.getpid())
        publish(self._journal, BORN, int(stat_of(os.getpid())[STARTED]))
        publish(self._journal, SPACE, process_space())

    @property
    def pieces(self) -> int:
        """How many pieces the shard has."""
        return sum(self._pieces_of(block) for block in self._blocks)

    def _pieces_of(self, block: Block) -> int:
        return -(-block.params.size // self._undo.shape[2])

    def _cut(self, most: int = BLOCK_BYTES) -> list[Block]:
        """See `Server`."""
        return super()._cut(UNDO_BYTES if self.stale.slots else most)

    def apply(self, push: Push) -> int:
        """See `Server.apply`."""
        publish(self._journal, PUSH, _push_word(push, self.version + 1))
        return super().apply(push)

    def blocks(self, some: Sequence[Block] | None = None) -> Iterator[Block]:
        """See `Server.blocks`; numbers their pieces, and keeps the old values of whole ones."""
        self._next = self.version + 1 << NUMBER_BITS | self._first
        for block in super().blocks(some):
            if self.stale.slots:
                for kept, live in self._old_values(self._next, block):
                    np.copyto(kept, live)
                publish(self._journal, PIECE, self._next)
            yield block
            self._next += self._pieces_of(block)

    def _apply(self, block: Block, grad: np.ndarray, step: int, lr: float) -> None:
        """See `Server._apply`; also keeps the old values of each piece."""
        if self.stale.slots:
            super()._apply(block, grad, step, lr)
            return
        undo = Undo(self._undo, self._journal, PIECE, self._next)
        block.rule.apply_undoable(block.params, grad, block.slots, step, lr, undo)

    def _old_values(self, number: int, block: Block) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield where the old values of a block's first piece lie, and the piece, each vector."""
        for kept, vector in zip(
            self._undo[number % HALVES], (block.params, *block.slots), strict=True
        ):
            live = vector[: kept.size]
            yield kept[: live.size], live


class Adopted(Journaled):
    """The shard of a server that has died, where it lies; it may be adopted again. Collective: no.

    The process that served it must be gone; see `process_of`.

    Attributes:
        continued: Whether an update was under way.
    """

    def __init__(self, cluster: Cluster, window: Window, server_id: int, *args: Any) -> None:
        super().__init__(cluster, window, server_id, *args)
        self._rest: list[Block] | None = None  # of the update that was under way
        self._wanted: list[tuple[int, tuple[Any, ...]]] = []
        self.continued = False

    def recover(self, find: Callable[[int, int], Push | None]) -> bool:
        """Bring the shard and its ledger to a version, after which both go on.

        Where an update was under way of a push that is not here, it stays as it is until `apply`
        gets that push, which has to be the next, and nobody reads meanwhile.

        Args:
            find: Returns the push of a worker and a number, which is not in the ledger, if that is
                here.

        Returns:
            Whether that can be done: with tables it cannot always be.

        Blocks: until those near readers have copied that the dead server had let.
        """
        self.version = observe(self.header, COMMITTED)
        begun = observe(self.header, BEGUN)
        odd, worker, seq = _what_word(observe(self._journal, PUSH))
        if begun > self.version:
            push = find(worker, seq)
            self._go_back(begun, push)
            self.resumes, self.continued = (worker, seq), True
            if push is not None:
                self.apply(push)
        elif odd == self.version & 1 and seq == observe(self.applied, worker) + 1:
            publish(self.applied, worker, seq)
        self._grants.let_finish()
        self.sign()
        return True

    def apply(self, push: Push) -> int:
        """See `Server.apply`; or the rest of the update that was under way."""
        if self.resumes is not None:
            assert self.resumes == (push.worker, push.seq), "another push is half applied"
        version = super().apply(push)
        self._first, self.resumes = 0, None
        return version

    def want_read(self, rank: int, request: tuple[Any, ...]) -> None:
        """See `Server.want_read`."""
        if self.resumes is None:
            super().want_read(rank, request)
        else:
            self._wanted.append((rank, request))

    def serve_reads(self) -> bool:
        """See `Server.serve_reads`."""
        if self.resumes is not None:
            return False
        while self._wanted:
            super().want_read(*self._wanted.pop(0))
        return super().serve_reads()

    def _go_back(self, begun: int, push: Push | None) -> None:
        """Undo what may be half done of an update, so that the rest of it can be applied.

        Args:
            begun: The version that it makes.
            push: What is applied, if it is here.
        """
        version, number = divmod(observe(self._journal, PIECE), 1 << NUMBER_BITS)
        if version == begun:
            self._first, self._rest = number, self._from(number)
            for old, live in self._old_values(number, self._rest[0]):
                np.copyto(live, old)

    def _from(self, number: int) -> list[Block]:
        """Return the blocks from a piece on, of which the first begins with it."""
        blocks = list(self._blocks)
        while number >= self._pieces_of(blocks[0]):
            number -= self._pieces_of(blocks.pop(0))
        first, at = blocks[0], number * self._undo.shape[2]
        range_, slots = first.range, tuple(slot[at:] for slot in first.slots)
        rest = slice(range_.start + at, range_.stop)
        blocks[0] = first._replace(range=rest, params=first.params[at:], slots=slots)
        return blocks

    def blocks(self, some: Sequence[Block] | None = None) -> Iterator[Block]:
        """See `Server.blocks`; of the update that was under way, those that are left."""
        rest, self._rest = self._rest, None
        return super().blocks(some if rest is None else rest)


class Process(NamedTuple):
    """A process that serves.

    Attributes:
        pid: Its process id.
        started: When it was started, as `stat_of` says it.
        space: The process ids among which that is one; see `process_space`.
    """

    pid: int
    started: int
    space: int


def warm(rule: Rule, dtype: str) -> None:
    """Compile, or load from the cache on disk, the loops that only such a server needs."""
    params, grad, *slots = np.zeros((2 + len(rule.slots), 1), dtype)
    undo = Undo(np.zeros((HALVES, 1 + len(slots), 1), dtype), np.zeros(8, np.int64), PIECE, 0)
    for one in (rule, Change()):
        one.apply_undoable(params, grad, tuple(slots), 1, 0.1, undo)


def process_of(window: Window, rank: int) -> Process:
    """Return the process of a server of this node."""
    journal = window.view(rank, "journal")
    return Process(*(observe(journal, word) for word in (PROCESS, BORN, SPACE)))


def process_space() -> int:
    """Return what tells the process ids of this container from others' (pid_namespaces(7))."""
    return os.stat("/proc/self/ns/pid").st_ino
