"""What a server notes while it applies pushes, so that another can go on after its death.

Before an update the server publishes which push that is, and that a version has begun. It updates
its shard block by block. Before a block it copies the block's old values into one half of the undo
memory, and then publishes the block's number; the next block goes into the other half. So whatever
the last thing is that it did, by these words (`Adopted.recover`)

- no version is begun beyond the one committed: no update is under way. Is the push of the version
  committed not in the ledger yet, it is written there.
- a version is begun, and no block of it noted: nothing is changed. The push is applied.
- a version is begun, and block k of it noted: those before k are whole, k may be anything and is
  set to its old values, those behind it are as they were. The push is applied from block k on.

Old values are copied by a server that has waited for the push, or whose shard is one block. One of
several that is behind, with the next push there before it has applied the last one, would only fall
further behind: copying takes about as long as the update of a simple rule. It says so in the word
for the push, and if it dies in such an update, nobody can go on.

The push's gradient still lies in its worker's buffer, which is free only with the ledger.
What the kernel keeps of a process that was killed are its stores up to one instruction, in their
order: `publish` keeps the compiler from another one.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpips.cluster.process import STARTED, stat_of
from mpips.cluster.window import Field, Window
from mpips.cluster.world import Cluster
from mpips.kernels.atomics import observe, publish
from mpips.ps.shard import BLOCK_BYTES, Block, Server
from mpips.transport.far import BEGUN, COMMITTED
from mpips.transport.push import Push

PUSH, BLOCK, PROCESS, BORN, SPACE = range(5)  # words of a journal
UNDO_BYTES = 128 << 10  # of parameters in a block: with slots and undo it stays in the L2 cache
HALVES = 2
SEQ_BITS, WORKER_BITS, NUMBER_BITS = 40, 21, 20


def journal_fields(size: int, slots: int, dtype: str) -> tuple[Field, ...]:
    """Return the fields of a server's segment for a shard of `size` elements with `slots` slots."""
    most = min(size, UNDO_BYTES // np.dtype(dtype).itemsize)
    return (Field("journal", "i8", (8,)), Field("undo", dtype, (HALVES, 1 + slots, most)))


def _push_word(push: Push, version: int, kept: bool) -> int:
    """Return which push makes a version, of which it says whether it is odd."""
    flags = (version & 1) << 1 | kept
    return (flags << WORKER_BITS | push.worker) << SEQ_BITS | push.seq


def _what_word(word: int) -> tuple[int, int, int, int]:
    """Return whether the version is odd, whether old values are kept, the worker, its push."""
    rest, seq = divmod(word, 1 << SEQ_BITS)
    flags, worker = divmod(rest, 1 << WORKER_BITS)
    return flags >> 1, flags & 1, worker, seq


class Journaled(Server):
    """A server that another can go on for; see `mpips.ps.shard.Server`. Collective: no."""

    def __init__(self, cluster: Cluster, window: Window, server_id: int, *args: Any) -> None:
        rank = cluster.roles.servers[server_id]
        self._journal, self._undo = window.view(rank, "journal"), window.view(rank, "undo")
        self._kept: list[tuple[Block, list[tuple[np.ndarray, np.ndarray]]]] = []
        super().__init__(cluster, window, server_id, *args)

    def sign(self) -> None:
        """Say that this process serves the shard."""
        publish(self._journal, PROCESS, os.getpid())
        publish(self._journal, BORN, int(stat_of(os.getpid())[STARTED]))
        publish(self._journal, SPACE, process_space())

    def _cut(self, most: int = BLOCK_BYTES) -> list[Block]:
        """See `Server`; also into blocks whose old values are kept."""
        small = enumerate(super()._cut(UNDO_BYTES))
        self._kept = [(block, list(_old_values(self._undo, k, block))) for k, block in small]
        return super()._cut(most)

    def apply(self, push: Push) -> int:
        """See `Server.apply`."""
        word = _push_word(push, self.version + 1, self._keeps)
        publish(self._journal, PUSH, word)
        return super().apply(push)

    def blocks(self, some: Sequence[Block] | None = None) -> Iterator[Block]:
        """See `Server.blocks`; the old values of each are kept, as the word for the push says."""
        return self._keeping() if self._keeps else super().blocks(some)

    @property
    def _keeps(self) -> bool:
        return not self.hurried or len(self._kept) <= 1

    def _keeping(self) -> Iterator[Block]:
        first = self.version + 1 << NUMBER_BITS
        for number, (block, values) in enumerate(self._kept):
            for kept, live in values:
                np.copyto(kept, live)
            publish(self._journal, BLOCK, first | number)
            yield block


def _old_values(
    undo: np.ndarray, number: int, block: Block
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield where the old values of a block lie, and the block, each vector of it."""
    for kept, live in zip(undo[number % HALVES], (block.params, *block.slots), strict=True):
        yield kept[: live.size], live


class Adopted(Journaled):
    """The shard of a server that has died, where it lies; it may be adopted again. Collective: no.

    The process that served it must be gone; see `process_of`.

    Attributes:
        continued: Whether an update was under way, and was finished.
    """

    def __init__(self, cluster: Cluster, window: Window, server_id: int, *args: Any) -> None:
        super().__init__(cluster, window, server_id, *args)
        self._rest: list[Block] | None = None  # of the update that was under way
        self.continued = False

    def recover(self, find: Callable[[int, int], Push]) -> bool:
        """Bring the shard and its ledger to a version, after which both go on.

        Args:
            find: Returns the push of a worker and a number, which is not in the ledger.

        Returns:
            Whether that can be done.

        Blocks: until those near readers have copied that the dead server had let.
        """
        self.version = observe(self.header, COMMITTED)
        begun = observe(self.header, BEGUN)
        odd, kept, worker, seq = _what_word(observe(self._journal, PUSH))
        if begun > self.version:
            push = find(worker, seq)
            if not self._go_back(begun, kept, push):
                return False
            self.hurried = True  # of what is left of this update no old values are kept
            self.apply(push)
            self.hurried, self.continued = False, True
        elif odd == self.version & 1 and seq == observe(self.applied, worker) + 1:
            publish(self.applied, worker, seq)
        self._grants.let_finish()
        self.sign()
        return True

    def _go_back(self, begun: int, kept: int, push: Push) -> bool:
        """Undo what may be half done of an update; returns whether the rest of it can be applied.

        Args:
            begun: The version that it makes.
            kept: Whether old values of all blocks are kept.
            push: What is applied.
        """
        version, number = divmod(observe(self._journal, BLOCK), 1 << NUMBER_BITS)
        if kept and version == begun:
            self._rest = self._cut(UNDO_BYTES)[number:]
            for old, live in _old_values(self._undo, number, self._rest[0]):
                np.copyto(live, old)
        return bool(kept)

    def blocks(self, some: Sequence[Block] | None = None) -> Iterator[Block]:
        """See `Server.blocks`; of the update that was under way, those that are left."""
        rest, self._rest = self._rest, None
        # The old values of the first of these are kept still.
        return super().blocks(some) if rest is None else super(Journaled, self).blocks(rest)


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


def process_of(window: Window, rank: int) -> Process:
    """Return the process of a server of this node."""
    journal = window.view(rank, "journal")
    return Process(*(observe(journal, word) for word in (PROCESS, BORN, SPACE)))


def process_space() -> int:
    """Return what tells the process ids of this container from others' (pid_namespaces(7))."""
    return os.stat("/proc/self/ns/pid").st_ino
