"""A shard that a server serves, its own or one that it has taken over.

Pushes, cuts, checkpoints.
"""

import time

from mpips.planning.job import Job
from mpips.ps.shard import Server
from mpips.snapshot.agreement import Phase, SnapshotAgreement
from mpips.snapshot.saver import NOWHERE, Saver
from mpips.transport.channel import Receiver

TURN_S = 50e-6  # after which a server that applies pushes attends to all else


def saver_of(job: Job, server: Server, owner: int | None = None) -> Saver:
    """Return what saves a shard, and its rows of tables.

    Args:
        job: The run.
        server: Serves the shard.
        owner: Its number; by default this rank's.
    """
    slots = dict(zip(job.slots, server.slots, strict=True))
    saved = job.cluster, server.shard, server.params, slots, job.config.snapshot == "stall", owner
    if server.rows is None:
        return Saver(*saved)
    from mpips.tables.server import row_saver

    return row_saver(job, server.rows.tables, *saved)


class ShardService:
    """A shard, and what a server does for it. Collective: no.

    Args:
        rank: Of the server that began with it.
        store: Applies pushes to it.
        receiver: Where they come from.
        cut: Says which pushes a checkpoint holds.
        saver: Writes it.

    Attributes:
        reported_done: Whether the coordinator knows that all is applied.
    """

    def __init__(
        self, rank: int, store: Server, receiver: Receiver, cut: SnapshotAgreement, saver: Saver
    ) -> None:
        self.rank, self.store, self.receiver = rank, store, receiver
        self.cut, self.saver = cut, saver
        self.reported_done = False

    def apply_some(self) -> bool:
        """Apply pushes that are here, for a while at most; returns whether there was one."""
        phase, store, limit = self.cut.phase, self.store, None
        if store.resumes is not None:
            worker, seq = store.resumes
            limit = store.applied.copy()
            limit[worker] = seq
        elif phase is Phase.REACH:
            limit = self.cut.target
        elif phase in (Phase.AGREE, Phase.HOLD):
            return False
        busy, end = False, time.perf_counter() + TURN_S
        fetch = phase is not Phase.DRAIN or limit is not None
        while (push := self.receiver.take(limit, fetch)) is not None:
            store.apply(push)
            busy = True
            if time.perf_counter() >= end:
                break
        return busy

    @property
    def at_rest(self) -> bool:
        """Whether no snapshot is under way, and no checkpoint."""
        return self.cut.phase is Phase.FREE and not self.saver.busy

    def begin_snapshot(self, cut: tuple[int, list[int] | None]) -> None:
        """Begin a snapshot.

        Args:
            cut: Its number, and the pushes of each worker if these are agreed on. One that has
                begun, or that began before the shard was taken over, is left out.
        """
        number, target = cut
        if number > self.cut.begun:
            self.cut.begin(target)

    def settle(self, number: int) -> None:
        """Come to rest behind a snapshot, whose checkpoint is given up.

        Its coordinator has died.
        """
        self.begin_snapshot((number, None))
        self.write_into(NOWHERE)

    def reach(self, base_step: int) -> int | None:
        """Get on with a snapshot.

        Returns the step of its checkpoint when it is reached, and copied.
        """
        if self.store.resumes is not None or not self.cut.advance(self.receiver.bodies):
            return None
        step = self.store.settle(base_step + int(self.cut.target.sum()))
        self.saver.snapshot(step)
        if self.store.recorder is not None:
            self.store.recorder.flush()
        return step

    def write_into(self, folder: str) -> None:
        """Learn the folder of a checkpoint, if the shard is to be in it."""
        if not self.at_rest:
            self.saver.write_into(folder)

    def committed(self, step: int) -> None:
        """Learn that the checkpoint of a step is committed."""
        self.saver.committed(step)

    def epochs_over(self, over: tuple[int, list[int]]) -> None:
        """Learn how many epochs are over, with so many pushes of each worker."""
        assert self.store.rows is not None, "no rows are to be evicted"
        self.store.rows.epochs_over(*over)

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
