"""A shard that a server serves, its own or one that it has adopted: pushes, cuts, checkpoints."""

import time
from collections.abc import Callable

from mpips.cut.agreement import Cut, Phase
from mpips.cut.saver import NOWHERE, Saver
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
        reported_done: Whether the chief knows that all is applied.
    """

    def __init__(
        self, rank: int, store: Server, receiver: Receiver, cut: Cut, saver: Saver
    ) -> None:
        self.rank, self.store, self.receiver = rank, store, receiver
        self.cut, self.saver = cut, saver
        self.reported_done = False

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
            if time.perf_counter() >= end:
                return True
            push = self._take()
        return busy

    def _take(self) -> Push | None:
        phase, resumes = self.cut.phase, self.store.resumes
        if resumes is not None:
            limit = self.store.applied.copy()
            limit[resumes[0]] = resumes[1]
            return self.receiver.take(limit)
        if phase in (Phase.FREE, Phase.LAST):
            return self.receiver.take()
        if phase is Phase.DRAIN:
            return self.receiver.take(fetch=False)
        return self.receiver.take(limit=self.cut.target) if phase is Phase.REACH else None

    @property
    def at_rest(self) -> bool:
        """Whether no cut is under way, and no checkpoint."""
        return self.cut.phase is Phase.FREE and not self.saver.busy

    def begin_cut(self, number: int, target: list[int] | None = None) -> None:
        """Begin a cut, with the pushes of each worker if these are agreed on.

        Args:
            number: Of the cut. One that has begun, or that began before the shard was taken over,
                is left out.
            target: The pushes.
        """
        if number > self.cut.begun:
            self.cut.begin(target)

    def settle(self, number: int) -> None:
        """Come to rest behind a cut, whose checkpoint is given up: its chief has died."""
        self.begin_cut(number)
        self.write_into(NOWHERE)

    def reach(self, base_step: int) -> int | None:
        """Get on with a cut; returns the step of its checkpoint when it is reached, and copied."""
        if self.store.resumes is not None or not self.cut.advance(self.receiver.bodies):
            return None
        step = self.store.settle(base_step + int(self.cut.target.sum()))
        self.saver.snapshot(step)
        if self.store.recorder is not None:
            self.store.recorder.flush()
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
