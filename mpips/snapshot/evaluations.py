"""Evaluations of a run's checkpoints: curve, best, and early stop.

An evaluation is of a checkpoint: when one is due, the servers agree on a snapshot as for any other,
and each goes on as soon as it has copied its shard. Evaluators read the files when they are whole,
so that nobody waits for them, and what they find is exactly of one step, in every mode. One
evaluation is under way at a time; while it is, none is due.

Evaluators that die or get no further are given up (`mpips.mpi.evaluator_link`): the others make the
evaluation under way once more, with larger shares. Where none is left the run goes on without a
curve; it ends if they were to say when it is over.

The best figure and the evaluations since are in each checkpoint, and so is the step of the
evaluation under way: a run that is resumed has that one made again.
"""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpips.checkpoint.files import INDEX, step_folder
from mpips.checkpoint.run_folder import BEST, CHECKPOINTS
from mpips.config import Config
from mpips.health import status_board
from mpips.mpi.abort import Lost
from mpips.mpi.evaluator_link import Link
from mpips.planning.job import Job
from mpips.problems.evaluation import add_up, next_evaluation

if TYPE_CHECKING:
    from mpips.session.metrics import Log

ROUNDING = 1e-9  # of epochs
PAUSE_S = 0.005
TELL_S = 1.0
# What evaluators send: the sums over their shares of the samples, or why there are none.
Found = Mapping[str, float] | str


class Asked(NamedTuple):
    """What the coordinator asks an evaluator for.

    Attributes:
        number: Of the request, which the answer has too.
        folder: Of the checkpoint.
        part: Of the held-out samples, its share.
        parts: How many there are.
    """

    number: int
    folder: str
    part: int
    parts: int


@dataclass
class Standing:
    """What a run's evaluations come to, so far.

    Attributes:
        best_step: Step of the one with the lowest held-out loss; None where none is finite.
        best_loss: Its loss.
        since: Evaluations after it.
    """

    best_step: int | None = None
    best_loss: float = math.inf
    since: int = 0

    def note(self, step: int, loss: float) -> bool:
        """Count an evaluation; returns whether it is the best. NaN is never better."""
        if loss < self.best_loss:
            self.best_step, self.best_loss, self.since = step, loss, 0
            return True
        self.since += 1
        return False

    def reason(self, config: Config, means: Mapping[str, float]) -> str:
        """Return why the run is to end after an evaluation that gave `means`, or an empty text."""
        target = config.target_accuracy
        if target and means.get("accuracy", 0.0) >= target:
            return "target"
        return self.stale(config)

    def stale(self, config: Config) -> str:
        """Return ``patience`` if there was no better evaluation for so long, or an empty text."""
        return "patience" if 0 < config.patience <= self.since else ""


class Evaluations:
    """The coordinator's half: has checkpoints evaluated, and draws the conclusions. Collective: no.

    Args:
        job: The run.
        link: To the evaluators.
        log: Of the run.
        survivable: Ranks that train, without which it goes on if they die.

    Attributes:
        standing: What has come of them.
        link: As given.
    """

    def __init__(self, job: Job, link: Link, log: "Log", survivable: Iterable[int] = ()) -> None:
        self._job, self.link, self._log = job, link, log
        saved = job.checkpoint.state.get("evaluations") if job.checkpoint is not None else None
        known = saved or {"standing": {}, "pending": None}
        self.standing = Standing(**known["standing"])
        self._next = next_evaluation(job.allocator().epochs_done + ROUNDING, job.config.eval_every)
        self._pending: tuple[int, float] | None = None  # step and epoch, of a cut at least
        self._answers: dict[int, Found] | None = None  # by rank, once evaluators are asked
        self._asked = 0  # requests
        self._folder = ""
        self._last_step: int | None = None
        self._reason = self.standing.stale(job.config)
        survivable = tuple(survivable)
        link.spare(survivable)
        for rank in link.evaluators:
            link.send(rank, "begin", survivable)
        if known["pending"] is not None:
            self._resume(*known["pending"])

    def _resume(self, step: int, epoch: float) -> None:
        """Have an evaluation made that was not over when the checkpoint was saved."""
        if (step_folder(self._job.out / CHECKPOINTS, step) / INDEX).exists():
            self._pending = step, epoch
            self.saved(step)

    def due(self, epochs: float) -> bool:
        """Return whether a checkpoint is to be saved for an evaluation."""
        due = self._pending is None and epochs >= self._next - ROUNDING
        return due and bool(self.link.living)

    def at_snapshot(self, step: int, epochs: float) -> dict[str, Any]:
        """Return what a checkpoint says of evaluations, and have it evaluated if it is time.

        Args:
            step: Updates that it holds.
            epochs: Epochs that it holds.
        """
        unsaved = self._pending is not None and self._answers is None
        if (unsaved and self.link.living) or self.due(epochs):
            self._pending = step, round(epochs, 4)
            self._next = next_evaluation(epochs + ROUNDING, self._job.config.eval_every)
        return {"evaluations": {"standing": asdict(self.standing), "pending": self._pending}}

    def saved(self, step: int | None) -> None:
        """Ask the evaluators for a checkpoint that is whole now, if it is to be evaluated."""
        place = self._job.place
        out = place.where() if place is not None else None
        if self._pending is None or self._pending[0] != step or self._answers is not None:
            return
        if out is None:  # it was removed meanwhile
            return
        assert step is not None, "it is that of the evaluation"
        self._folder = str(step_folder(out / CHECKPOINTS, step))
        self._ask()

    def _ask(self) -> None:
        """Have the evaluators that are left make the evaluation that is under way, if any is."""
        living = self.link.living
        self._answers = {} if living else None
        self._asked += 1
        self.link.overdue.expect()
        for part, rank in enumerate(living):
            asked = Asked(self._asked, self._folder, part, len(living))
            self.link.send(rank, "evaluate", tuple(asked))

    @property
    def protected(self) -> Sequence[int]:
        """Steps of checkpoints that stay though they are old."""
        best = self.standing.best_step if self._job.config.keep_best else None
        pending = None if self._pending is None else self._pending[0]
        return [step for step in (best, pending) if step is not None]

    def poll(self) -> str:
        """Hear what evaluators say; returns why the run is to end, or an empty text.

        That is ``target``, ``patience``, or the name of a signal that came to an evaluator.
        Blocks: no.

        Raises:
            UserError: If not all evaluators give the same metrics.
            Lost: If none is left that could say when the run is over.
        """
        for source, kind, payload in self.link.poll():
            if source in self.link.given_up or source not in self.link.evaluators:
                continue  # of a death among those that train, they know themselves
            if kind == "stop":
                self._reason = payload
            elif kind == "lost":
                self._lose(source, "has died")
            else:
                assert kind == "evaluated", f"unknown message {kind!r} from an evaluator"
                number, found = payload
                if number == self._asked and self._answers is not None:
                    self._answers[source] = found
        if self._answers is not None:
            known = self._answers
            awaited = [rank for rank in self.link.living if rank not in known]
            for rank, why in self.link.overdue.look(awaited, time.perf_counter()).items():
                self._lose(rank, why)
        if self._answers is not None and len(self._answers) == len(self.link.living):
            self._conclude(self._answers)
        return self._reason

    def _lose(self, rank: int, why: str) -> None:
        """Go on without an evaluator.

        Raises:
            Lost: If it was the last one, and is to say when the run is over.
        """
        c, number = self._job.config, self.link.evaluators.index(rank)
        self.link.give_up(rank)
        who = f"evaluator {number} (rank {rank}) {why}"
        if not self.link.living and (c.patience or c.target_accuracy):
            asks = "patience" if c.patience else "target_accuracy"
            raise Lost(f"{who}, and {asks} is given", "an evaluator", "--resume goes on")
        left = "the others evaluate its share"
        if not self.link.living:
            best = ", and the best checkpoint is no longer kept" if c.keep_best else ""
            left = f"nothing is evaluated any more{best}"
        self._log.warn(f"{who}; {left}")
        self._log.event("lost", None, rank=rank, evaluator=number)
        if self._answers is not None:
            self._ask()
        if not self.link.living:
            self._pending = None

    def _conclude(self, answers: dict[int, Found]) -> None:
        assert self._pending is not None, "it was asked for"
        step, epoch = self._pending
        self._pending = self._answers = None
        failures = [answer for answer in answers.values() if isinstance(answer, str)]
        if failures:
            self._log.warn(f"no evaluation of step {step}: {failures[0]}")
            return
        sums = {rank: answer for rank, answer in answers.items() if not isinstance(answer, str)}
        found = add_up(sums, "rank", "the same metrics on every evaluator")
        means = {name: value / self._job.info.n_test for name, value in found.items()}
        self._note(step, epoch, means)
        self._reason = self._reason or self.standing.reason(self._job.config, means)

    def _note(self, step: int, epoch: float, means: Mapping[str, float]) -> None:
        """Add a point to the curve."""
        self._last_step = step
        self._log.heard("eval", {"step": step, "epoch": round(epoch, 4), **means})
        if self.standing.note(step, means["loss"]) and self._job.config.keep_best:
            self._point_to(step)

    def _point_to(self, step: int) -> None:
        """Have ``best`` in the run's folder point to the checkpoint of a step."""
        out = self._job.place.where() if self._job.place is not None else None
        if out is None:
            return
        new = out / f"{BEST}.tmp"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(step_folder(Path(CHECKPOINTS), step))
            os.replace(new, out / BEST)
        except OSError as problem:
            self._log.warn(f"{out / BEST} cannot be made to point to step {step}: {problem}")

    def finish(self, done: bool) -> None:
        """Wait for the evaluation under way, unless the run was stopped to go on later.

        Blocks: as long as that takes, or until who does not get on with it is given up.
        """
        told = -math.inf
        while done and self._answers is not None:
            if time.perf_counter() - told > TELL_S:  # that the evaluators are judged
                told = time.perf_counter()
                status_board.set_phase(status_board.EVALUATING, told)
            self.poll()
            self._job.cluster.progress()
            time.sleep(PAUSE_S)

    def add_last(self, step: int, epoch: float, means: Mapping[str, float]) -> None:
        """Add what the workers found of the final state, unless an evaluator has."""
        if means and step != self._last_step:
            self._note(step, epoch, means)
