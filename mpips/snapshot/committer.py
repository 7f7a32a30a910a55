"""Committer: collects the writers' answers and commits the checkpoint.

It runs on the coordinator. For the writers see `mpips.snapshot.saver`. A thread makes folders and
commits, so that no round and no push waits for the disk.
"""

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpips import checkpoint
from mpips.checkpoint.files import INDEX
from mpips.checkpoint.run_folder import CHECKPOINTS, METRICS
from mpips.config.jobfile import to_toml
from mpips.errors import UserError
from mpips.health import status_board
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.snapshot.saver import NOWHERE, Answer, Files
from mpips.snapshot.worker_state import names

if TYPE_CHECKING:
    from mpips.session.metrics import Log

RETRY_S = 60.0  # time after a failed checkpoint to the next one, if the period is longer
LAST_TRIES, LAST_PAUSE_S = 3, 1.0  # attempts to write the last checkpoint, and pause between them


@dataclass
class Pending:
    """The current checkpoint.

    Attributes:
        step: Number of updates at the snapshot.
        state: State in the index beside the arrays.
        folder: Folder of the checkpoint; None until it is made, or if it cannot be made.
        keepers: Ranks that write state of their own.
        answers: Answers of the writers, by kind and number of `ArraySaver`.
    """

    step: int
    state: dict[str, Any]
    folder: Path | None
    keepers: tuple[int, ...]
    answers: dict[tuple[str, int], Answer] = field(default_factory=dict)


class Committer:
    """Coordinator's half of checkpoints: makes the folder, collects records, and commits.

    The class is larger than others, since it has all states of a checkpoint, from due to committed.

    Args:
        job: The run.
        log: Log of the run.

    Attributes:
        saved_step: Step of the newest committed checkpoint; None if there is none.
        refused: Whether a rank refused to save values that are not finite.
        failure: Why the last checkpoint could not be written; empty if it was.
        thread: Thread that makes folders and commits; shut it down at the end of the run.
    """

    def __init__(self, job: Job, log: "Log") -> None:
        assert job.run_folder is not None, "the coordinator holds the run's folder"
        self._job, self._run_folder, self._log = job, job.run_folder, log
        own, everyone = names(job), tuple(range(job.cluster.world))
        self._own = job.own_slots + own
        self._keepers = everyone if own and job.config.in_rounds else job.cluster.roles.workers
        self._tables = {table.name: table.description for table in tables_of(job)}
        # Whether a checkpoint contains only rows that have changed since the previous one.
        self._chained = bool(self._tables) and job.config.checkpoint_rows == "changed"
        self._pending: Pending | None = None
        self._making: Future[Path] | None = None
        self._committing: Future[None] | None = None
        self.thread = ThreadPoolExecutor(1, "commit")
        self._failed_s = 0.0
        self._period = job.config.checkpoint_period
        self._last_s, self._last_step = time.perf_counter(), job.base_step
        self.saved_step: int | None = None
        if job.checkpoint:
            self.saved_step = job.base_step
            status_board.report(status_board.SAVED, job.base_step)
        self.refused = False
        self.failure = ""

    @property
    def busy(self) -> bool:
        """Whether any rank is still busy with a checkpoint."""
        return self._pending is not None

    def pauses(self) -> bool:
        """Return whether a checkpoint has just failed, so that another one may fail, too."""
        return bool(self.failure) and not self.failed_for(LAST_PAUSE_S)

    def unsaved(self, step: int) -> str:
        """Return why update `step` is in no checkpoint; empty if it is in one."""
        return "" if self.has_saved(step) else f"{self.failure}; {self.kept}"

    def failed_for(self, seconds: float) -> bool:
        """Return whether the last checkpoint failed at least `seconds` ago."""
        return bool(self.failure) and time.perf_counter() - self._failed_s >= seconds

    def is_due(self, step: int, epochs: float) -> bool:
        """Return whether a checkpoint is due after these numbers of updates and epochs."""
        evaluations, (seconds, steps) = self._job.evaluations, self._period
        if self.busy:
            return False
        if self.failed_for(RETRY_S) or (evaluations is not None and evaluations.due(epochs)):
            return True
        if step <= self._last_step:
            return False
        late = seconds is not None and time.perf_counter() - self._last_s >= seconds
        often = steps is not None and step - self._last_step >= steps
        return late or often or status_board.asked_to_save()

    def note(self, step: int) -> None:
        """Note that a snapshot begins after update number `step`; the next period begins here."""
        self._last_s, self._last_step = time.perf_counter(), step

    def open(self, step: int, epochs: float, state: dict[str, Any], own: bool = True) -> None:
        """Begin a checkpoint: its folder is made in the thread, then sent to the writers.

        Blocks: no.

        Args:
            step: Number of updates at the snapshot.
            epochs: Number of epochs at the snapshot.
            state: Clocks, ledger and dispatch at the snapshot, as values of JSON.
            own: Whether ranks save state of their own, if they have any.
        """
        self.failure, self._last_step = "", step
        if self._job.evaluations is not None:
            state |= self._job.evaluations.at_snapshot(step, epochs)
        self._pending = Pending(step, state, None, self._keepers if own and self._own else ())
        try:
            directory = self._directory()
        except (UserError, OSError) as error:
            self._tell_writers(self._pending, str(error))
        else:
            self._making = self.thread.submit(checkpoint.begin_step, directory, step)

    def _tell_writers(self, pending: Pending, failure: str = "") -> None:
        """Send the writers the folder, or that there is none."""
        self.failure = failure
        place = NOWHERE if pending.folder is None else str(pending.folder)
        writers = sorted({*self._job.cluster.roles.owners, *pending.keepers})
        self._job.cluster.send(writers, "write", place)

    def _directory(self) -> Path:
        """Return the folder of checkpoints; make it again if the run's folder was removed."""
        before, out = self._run_folder.moved, self._run_folder.path()
        if out is None:
            self.saved_step = None
            out = self._run_folder.recreate()
            self._log.reopen(out / METRICS)
        if self._run_folder.moved != before:
            self._log.warn(f"{self._run_folder.moved}; checkpoints go to {out}")
        return out / CHECKPOINTS

    def has_saved(self, step: int) -> bool:
        """Return whether the last checkpoint is that of `step`, and its folder still exists."""
        return self.saved_step == step and self._run_folder.path() is not None

    def collect(self, whose: tuple[str, int], answer: Answer) -> None:
        """Note a writer's answer, by kind and number of its `ArraySaver`."""
        assert self._pending is not None, "no checkpoint is under way"
        self._pending.answers[whose] = answer

    def give_up_shard(self, owner: int, why: str) -> bool:
        """Let the checkpoint fail if an owner has not answered; return whether this is so."""
        lacks = self._pending is not None and ("shard", owner) not in self._pending.answers
        if lacks:
            self.collect(("shard", owner), why)
        return lacks

    def poll(self) -> bool:
        """Advance the checkpoint; return whether it was committed just now. Blocks: no."""
        pending, committing = self._pending, self._committing
        if pending is None:
            return False
        if self._making is not None:
            self._folder_made(pending, self._making)
            return False
        if committing is None:
            owners = self._job.cluster.roles.owners
            if len(pending.answers) == len(owners) + len(pending.keepers):
                self._all_answered(pending)
            return False
        if not committing.done():
            return False
        self._committing = None
        try:
            committing.result()
        except UserError as error:
            self._fail(pending, str(error))
            return False
        except OSError as error:  # the new checkpoint is committed, so an old one is the problem
            self._log.warn(f"an old checkpoint cannot be removed: {error}")
        self.saved_step, self._pending, self.failure = pending.step, None, ""
        status_board.report(status_board.SAVED, pending.step)
        if self._chained:
            self._job.cluster.send(self._job.cluster.roles.owners, "saved", pending.step)
        self._log.event("checkpoint", pending.step)
        if self._job.evaluations is not None:
            self._job.evaluations.saved(pending.step)
        return True

    def _folder_made(self, pending: Pending, making: "Future[Path]") -> None:
        """Send the folder to the writers, if the thread has made it or failed."""
        if not making.done():
            return
        self._making = None
        try:
            pending.folder = making.result()
        except (UserError, OSError) as error:
            self._tell_writers(pending, str(error))
        else:
            self._tell_writers(pending)

    def _all_answered(self, pending: Pending) -> None:
        answers, job = pending.answers.values(), self._job
        if None in answers:
            _discard(pending)
            self.refused, self._pending = True, None
            return
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            self._fail(pending, self.failure or failures[0])
            return
        files: dict[str, list[Files]] = {"shard": [], "own": []}
        for (kind, _), answer in pending.answers.items():
            files[kind] += [answer] if isinstance(answer, tuple) else []
        shards, own = (tuple(first for first, *_ in each) for each in files.values())
        assert pending.folder is not None, "its files are written"
        contents = checkpoint.Contents(
            pending.step, job.layout, job.dtype, job.slots, shards, to_toml(job.config),
            pending.state, workers=own, worker_names=self._own if own else (),
            rows=tuple(record for _, *rows in files["shard"] for record in rows),
            tables=self._tables,
        )  # fmt: skip
        protected = job.evaluations.protected if job.evaluations is not None else ()
        args = pending.folder, contents, job.config.keep, protected
        self._committing = self.thread.submit(checkpoint.commit, *args)

    def _fail(self, pending: Pending, why: str) -> None:
        """Give up the current checkpoint, and warn."""
        _discard(pending)
        self._log.warn(f"no checkpoint of step {pending.step}: {why}; {self.kept}")
        self.failure, self._failed_s, self._pending = why, time.perf_counter(), None

    @property
    def kept(self) -> str:
        """Text that names the newest checkpoint."""
        newest = f"the newest whole checkpoint is that of step {self.saved_step}"
        return "none is saved" if self.saved_step is None else newest


def _discard(pending: Pending) -> None:
    """Remove the files of a checkpoint, unless its index exists: then it is complete."""
    if pending.folder is not None:
        with contextlib.suppress(OSError):  # files without an index are removed later
            if not (pending.folder / INDEX).exists():
                checkpoint.remove_checkpoint(pending.folder)
