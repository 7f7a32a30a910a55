"""A shard that a server serves, its own or one that it has adopted: pushes, cuts, checkpoints."""

import time
from collections.abc import Callable

from mpips.cut.agreement import Cut, Phase
from mpips.cut.saver import Saver
from mpips.ps.shard import Server
from mpips.transport.channel import Receiver
from mpips.transport.push import Push

TURN_S = 50e-6  # after which a server that applies pushes attends to all else


class Served:
    """A shard, and what a server does for it. Collective: no.

    Args:
        rank: Of the server that began with it.
        store: Applies pushes to it.
        receiver: Where they come from.
        cut: Says which pushes a checkpoint holds.
        saver: Writes it.

    Attributes:
        skips: How many cuts it takes no part in that are begun next.
        told_done: Whether the chief knows that all is applied.
    """

    def __init__(
        self, rank: int, store: Server, receiver: Receiver, cut: Cut, saver: Saver, skips: int = 0
    ) -> None:
        self.rank, self.store, self.receiver = rank, store, receiver
        self.cut, self.saver, self.skips = cut, saver, skips
        self.told_done = False

    def apply_some(self, note: Callable[[Push], None] | None = None) -> bool:
        """Apply pushes that are here, for a while at most; returns whether there was one.

        Args:
            note: Called with each worker's push that is applied.
        """
        push, store = self._take(), self.store
        busy, end = push is not None, time.perf_counter() + TURN_S
        while push is not None:
            store.apply(push)
            if note is not None:
                for part in push:
                    note(part)
            store.hurried = True
            if time.perf_counter() >= end:
                return True
            push = self._take()
        store.hurried = False
        return busy

    def _take(self) -> Push | None:
        phase = self.cut.phase
        if phase in (Phase.FREE, Phase.LAST):
            return self.receiver.take()
        if phase is Phase.DRAIN:
            return self.receiver.take(fetch=False)
        return self.receiver.take(limit=self.cut.target) if phase is Phase.REACH else None

    def begin_cut(self, target: list[int] | None) -> None:
        """Begin a cut, with the pushes of each worker if these are agreed on."""
        if self.skips:
            self.skips -= 1
        else:
            self.cut.begin(target)

    def reach(self, base_step: int) -> int | None:
        """Get on with a cut; returns the step of its checkpoint when it is reached, and copied."""
        if not self.cut.advance(self.receiver.bodies):
            return None
        step = self.store.settle(base_step + int(self.cut.target.sum()))
        self.saver.snapshot(step)
        return step

    def write_into(self, folder: str) -> None:
        """Learn the folder of a checkpoint, if the shard is to be in it."""
        if self.cut.phase is not Phase.FREE or self.saver.busy:
            self.saver.write_into(folder)

    def hold_or_go_on(self) -> None:
        """Take pushes again, as soon as the live shard need not stay as it is."""
        self.cut.phase = Phase.HOLD if self.saver.holds else Phase.FREE

    def advance_saver(self) -> None:
        """Get on with a checkpoint."""
        self.saver.poll()
        if self.cut.phase is Phase.HOLD and not self.saver.holds:
            self.cut.phase = Phase.FREE

    def close(self) -> None:
        """Serve it no more."""
        self.store.close()
        self.receiver.close()
