"""Checkpoints between synchronous rounds.

All ranks are at the same step then, so the end of a round is a consistent snapshot.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpips.datasets.ledger import SampleAllocator
from mpips.health import status_board
from mpips.mpi.collectives import gather_polled
from mpips.optim import Range
from mpips.planning.job import Job
from mpips.rounds.base import Round
from mpips.snapshot.committer import LAST_TRIES, Committer
from mpips.snapshot.saver import ArraySaver, ShardSaver, saver_of
from mpips.snapshot.worker_state import saver_of_own

if TYPE_CHECKING:
    from mpips.session.metrics import Log


class RoundCheckpoints:
    """This rank's part in the checkpoints of a run; the coordinator also decides when they are due.

    Args:
        job: The run.
        rounds: Round, whose parameters, slots and own state are saved.
        log: Log of the run.
        savers: Savers of this rank's other state.
    """

    def __init__(
        self, job: Job, rounds: Round, log: "Log", savers: Sequence[ArraySaver] = ()
    ) -> None:
        self._job, self._cluster, self._rounds, self._log = job, job.cluster, rounds, log
        self._savers = [*_savers(job, rounds), *savers]
        self._committer = Committer(job, log) if job.run_folder is not None else None
        self._writers = [*self._cluster.roles.owners]  # of the shards
        self._resized = False  # whether the number of samples of a round has changed

    def wanted(self, step: int, epochs: float) -> tuple[bool, bool]:
        """Return whether a rank refused to save values that are not finite, and whether one is due.

        Args:
            step: Number of the next update.
            epochs: Epochs done after it.
        """
        c = self._committer
        return (False, False) if c is None else (c.refused, c.is_due(step, epochs))

    def save(self, step: int, samples: int, allocator: SampleAllocator) -> None:
        """Begin a checkpoint at the end of a round. Collective: yes. Blocks: for a copy.

        Args:
            step: Number of applied updates.
            samples: Number of applied samples.
            allocator: Position in the data.
        """
        if self._committer is not None:
            self._committer.note(step)
        self._rounds.compare(step)
        skipped, tables = self._skipped(), self._rounds.tables
        if tables is not None:
            tables.settle(step)
        if not self._savers:
            return
        self.finish()
        for saver in self._savers:
            saver.snapshot(step)
        if self._committer is not None:
            given = allocator.state()
            given["clocks"] *= len(self._cluster.roles.workers)
            state = self._job.state(step, given, samples, skipped)
            if self._resized:
                state["schedule"]["samples_per_update"] = 0
            self._committer.open(step, allocator.epochs_done, state)
        self._cluster.wait(
            lambda: not self.attend() or not any(s.holds for s in self._savers), status_board.SAVE
        )

    def reassign(self, writers: list[int]) -> None:
        """Assign the shards to other ranks for writing, after deaths of workers. Collective: yes.

        Args:
            writers: Rank that writes each shard.

        Blocks: until the checkpoint under way here is complete or given up.
        """
        self.finish()
        self._resized = True
        before, self._writers = self._writers, writers
        for number, (old, new) in enumerate(zip(before, writers, strict=True)):
            if new == self._cluster.rank != old:
                taken = self._rounds.slice_of(number)
                self._savers.append(saver_of(self._job, taken, None, number))

    def _give_up(self, committer: Committer) -> None:
        """Give up the checkpoint under way if it waits for a shard of a dead rank."""
        for number, rank in enumerate(self._writers):
            if rank in self._cluster.failures.lost:
                committer.give_up_shard(number, f"rank {rank} has died")

    def _skipped(self) -> dict[Range, int]:
        """Return the number of updates made without each array, the largest of any rank.

        Collective: yes, if workers' programs may freeze arrays.
        """
        found: dict[Range, int] = {}
        if self._job.sets_rate:
            mine, wait = self._job.leaving.skipped, self._cluster.wait_request
            for of_rank in gather_polled(self._cluster.comm, mine, wait):
                found |= {array: max(n, found.get(array, 0)) for array, n in of_rank.items()}
        return found

    def save_last(self, step: int, samples: int, allocator: SampleAllocator) -> None:
        """Save the last state unless it is saved, with several tries. Collective: yes."""
        for _ in range(LAST_TRIES):
            if not self._agree(lambda c: not (c.refused or c.has_saved(step))):
                return
            if (c := self._committer) is not None:
                self._cluster.wait(lambda: not c.pauses(), status_board.SAVE)
            self.save(step, samples, allocator)
            self.finish()

    def refused(self) -> bool:
        """Return whether a rank refused to save values that are not finite. Collective: yes."""
        return self._agree(lambda committer: committer.refused)

    def _agree(self, ask: Callable[[Committer], bool]) -> bool:
        """Return the coordinator's answer about its checkpoints on every rank. Collective: yes."""
        found = self._committer is not None and ask(self._committer)
        return bool(self._cluster.share(found, self._cluster.roles.coordinator))

    def attend(self) -> bool:
        """Act on messages, and progress a checkpoint; returns whether one is under way here."""
        for source, kind, payload in self._cluster.poll():
            if source not in self._cluster.failures.lost:  # else another rank acts for it
                self._handle(kind, payload)
        if self._committer is not None and self._cluster.failures.lost:
            self._give_up(self._committer)
        busy = False
        for saver in self._savers:
            saver.poll()
            busy = busy or saver.busy
        if self._committer is not None:
            self._committer.poll()
            busy = busy or self._committer.busy
        return busy

    def finish(self) -> None:
        """Wait until no checkpoint is under way here."""
        self._cluster.wait(lambda: not self.attend(), status_board.SAVE)

    def _handle(self, kind: str, payload: Any) -> None:
        committer = self._committer
        if kind == "write":
            for saver in self._savers:
                saver.write_into(payload)
        elif kind == "saved":
            for saver in self._savers:
                if isinstance(saver, ShardSaver):
                    saver.committed(payload)
        elif kind == "files" and committer is not None:
            committer.collect(*payload)
        else:
            assert kind in ("eval", "log"), f"unknown message {kind!r} in rounds"
            self._log.heard(kind, payload)

    def unsaved(self, step: int) -> str:
        """Return on the coordinator why no checkpoint has update `step`; empty if one has."""
        return "" if self._committer is None else self._committer.unsaved(step)

    def free(self) -> None:
        """Drop the savers; may be called twice."""
        self._savers = []


def _savers(job: Job, rounds: Round) -> list[ArraySaver]:
    """Return the savers of this rank's shard, and of the state that it keeps between rounds."""
    found = list[ArraySaver]()
    if job.cluster.rank in job.cluster.roles.owners:
        rows = rounds.tables.owner if rounds.tables is not None else None
        found.append(saver_of(job, rounds, rows))
    stall = job.config.snapshot == "stall"
    if (own := saver_of_own(job, rounds.own_state(), stall)) is not None:
        found.append(own)
    return found
