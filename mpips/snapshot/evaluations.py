"""Evaluations of a run's checkpoints: curve, best step, and early stopping.

Evaluators evaluate checkpoints. When an evaluation is due, the servers take a snapshot as for any
checkpoint. Each server continues as soon as it has copied its shard. Evaluators read the files once
they are complete, so no rank waits for them. In every mode, the metrics are those of exactly one
step. Only one evaluation runs at a time; no other one is due meanwhile.

The coordinator gives up evaluators that die or hang (`mpips.mpi.evaluator_link`). The others then
repeat the current evaluation with larger shares. If no evaluator is left, the run continues without
evaluations; with `patience` or `target_accuracy` it ends instead.

Each checkpoint contains the best loss, the number of evaluations since, and the step of the current
evaluation. A resumed run repeats that evaluation.
"""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpips.checkpoint.files import INDEX, folder_step, step_folder
from mpips.checkpoint.run_folder import BEST, CHECKPOINTS
from mpips.config import Config
from mpips.health import status_board
from mpips.mpi.abort import Lost
from mpips.mpi.evaluator_link import Link
from mpips.planning.job import Job
from mpips.problems.evaluation import ROUNDING, add_up, next_evaluation

if TYPE_CHECKING:
    from mpips.session.metrics import Log

PAUSE_S = 0.005
TELL_S = 1.0
# Answer of an evaluator: sums of the metrics over its share of the samples, or an error message.
Answer = Mapping[str, float] | str


class Asked(NamedTuple):
    """Request of the coordinator to an evaluator.

    Attributes:
        number: Number of the request; the answer has the same.
        folder: Folder of the checkpoint.
        part: Number of the evaluator's share of the held-out samples, from 0.
        parts: Number of shares.
    """

    number: int
    folder: str
    part: int
    parts: int


@dataclass
class Standing:
    """Best result of a run's evaluations so far.

    Attributes:
        best_step: Step of the evaluation with the lowest held-out loss; None if no loss is finite.
        best_loss: Its loss.
        since: Number of evaluations after it.
    """

    best_step: int | None = None
    best_loss: float = math.inf
    since: int = 0

    def note(self, step: int, loss: float) -> bool:
        """Count an evaluation. Returns whether it is the best; NaN is never better."""
        if loss < self.best_loss:
            self.best_step, self.best_loss, self.since = step, loss, 0
            return True
        self.since += 1
        return False

    def reason(self, config: Config, means: Mapping[str, float]) -> str:
        """Return why the run must end after an evaluation with these means, or an empty string."""
        target = config.target_accuracy
        if target and means.get("accuracy", 0.0) >= target:
            return "target"
        return self.stale(config)

    def stale(self, config: Config) -> str:
        """Return ``patience`` if the last `patience` evaluations were not better, else empty."""
        return "patience" if 0 < config.patience <= self.since else ""


class Evaluations:
    """The coordinator's half: requests evaluations, and decides from them. Collective: no.

    Args:
        job: The run.
        link: Messages to and from the evaluators.
        log: Log of the run.
        survivable: Ranks that train and whose death the run survives.

    Attributes:
        standing: Best result so far.
        link: Messages to and from the evaluators.
    """

    def __init__(self, job: Job, link: Link, log: "Log", survivable: Iterable[int] = ()) -> None:
        self._job, self.link, self._log = job, link, log
        saved = job.checkpoint.state.get("evaluations") if job.checkpoint is not None else None
        known = saved or {"standing": {}, "pending": None}
        self.standing = Standing(**known["standing"])
        self._next = next_evaluation(job.allocator().epochs_done + ROUNDING, job.config.eval_every)
        self._pending: tuple[int, float] | None = None  # step and epoch, once a snapshot is taken
        self._answers: dict[int, Answer] | None = None  # by rank, once evaluators are asked
        self._asked = 0  # number of the last request
        self._folder = ""
        self._last_step: int | None = None
        self._reason = self.standing.stale(job.config)
        survivable = tuple(survivable)
        link.spare(survivable)
        for rank in link.evaluators:
            link.send(rank, "begin", survivable)
        pending = self._best_end() or known["pending"]  # not finished when it was saved
        if pending is not None:
            step, epoch = pending
            if (step_folder(job.out / CHECKPOINTS, step) / INDEX).exists():
                self._pending = step, epoch
                self.saved(step)

    def _best_end(self) -> tuple[int, float] | None:
        """Return step and epoch of the state that the run had ended with, if it was the best.

        It was evaluated after its checkpoint was saved, so the standing does not contain it.
        """
        step, known = self._job.base_step, self.standing.best_step
        if folder_step((self._job.out / BEST).resolve()) != step or known == step:
            return None
        return step, round(self._job.allocator().epochs_done, 4)

    def due(self, epochs: float) -> bool:
        """Return whether an evaluation is due, and so a checkpoint."""
        due = self._pending is None and epochs >= self._next - ROUNDING
        return due and bool(self.link.living)

    def at_snapshot(self, step: int, epochs: float) -> dict[str, Any]:
        """Return the state of the evaluations for a checkpoint; if one is due, evaluate it.

        Args:
            step: Number of updates that the checkpoint contains.
            epochs: Number of epochs that the checkpoint contains.
        """
        unsaved = self._pending is not None and self._answers is None
        if (unsaved and self.link.living) or self.due(epochs):
            self._pending = step, round(epochs, 4)
            self._next = next_evaluation(epochs + ROUNDING, self._job.config.eval_every)
        return {"evaluations": {"standing": asdict(self.standing), "pending": self._pending}}

    def saved(self, step: int) -> None:
        """Ask the evaluators to evaluate a checkpoint that is complete now, if it is due."""
        folder = self._job.run_folder
        out = folder.path() if folder is not None else None
        due = self._pending is not None and self._pending[0] == step and self._answers is None
        if due and out is not None:  # else the run's folder was removed meanwhile
            self._folder = str(step_folder(out / CHECKPOINTS, step))
            self._ask()

    def _ask(self) -> None:
        """Ask all living evaluators for their shares of the current evaluation."""
        living = self.link.living
        self._answers = {} if living else None
        self._asked += 1
        self.link.overdue.expect()
        for part, rank in enumerate(living):
            asked = Asked(self._asked, self._folder, part, len(living))
            self.link.send(rank, "evaluate", asked)

    @property
    def protected(self) -> Sequence[int]:
        """Steps of old checkpoints that must not be deleted: the best, and the one evaluated."""
        best = self.standing.best_step if self._job.config.keep_best else None
        pending = None if self._pending is None else self._pending[0]
        return [step for step in (best, pending) if step is not None]

    def poll(self) -> str:
        """Handle the messages of evaluators. Blocks: no.

        Returns:
            Why the run must end: ``target``, ``patience``, or the name of a signal that an
            evaluator received; empty if it continues.

        Raises:
            UserError: If the evaluators return different metrics.
            Lost: If no evaluator is left, and the run must end by `patience` or `target_accuracy`.
        """
        for source, kind, payload in self.link.poll():
            if source in self.link.given_up or source not in self.link.evaluators:
                continue  # ranks that train detect each other's deaths themselves
            if kind == "stop":
                self._reason = payload
            elif kind == "lost":
                self._lose(source, "has died")
            else:
                assert kind == "evaluated", f"unknown message {kind!r} from an evaluator"
                number, answer = payload
                if number == self._asked and self._answers is not None:
                    self._answers[source] = answer
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
            Lost: If it was the last one, and the run must end by `patience` or `target_accuracy`.
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

    def _conclude(self, answers: dict[int, Answer]) -> None:
        assert self._pending is not None, "it was asked for"
        step, epoch = self._pending
        self._pending = self._answers = None
        failures = [answer for answer in answers.values() if isinstance(answer, str)]
        if failures:
            self._log.warn(f"no evaluation of step {step}: {failures[0]}")
            return
        sums = {rank: answer for rank, answer in answers.items() if not isinstance(answer, str)}
        totals = add_up(sums, "rank", "the same metrics on every evaluator")
        means = {name: value / self._job.info.n_test for name, value in totals.items()}
        self._note(step, epoch, means)
        self._reason = self._reason or self.standing.reason(self._job.config, means)

    def _note(self, step: int, epoch: float, means: Mapping[str, float]) -> None:
        """Record an evaluation in the log and in the standing."""
        self._last_step = step
        self._log.heard("eval", {"step": step, "epoch": round(epoch, 4), **means})
        if self.standing.note(step, means["loss"]) and self._job.config.keep_best:
            self._point_to(step)

    def _point_to(self, step: int) -> None:
        """Make the link ``best`` in the run's folder point to the checkpoint of a step."""
        out = self._job.run_folder.path() if self._job.run_folder is not None else None
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
        """Wait for the current evaluation to finish.

        Args:
            done: Whether the run is complete. If it was stopped to be resumed, do not wait.

        Blocks: until the evaluators have answered, or those that hang are given up.
        """
        told = -math.inf
        while done and self._answers is not None:
            if time.perf_counter() - told > TELL_S:  # the evaluators have deadlines of their own
                told = time.perf_counter()
                status_board.set_phase(status_board.EVALUATING, told)
            self.poll()
            self._job.cluster.progress()
            time.sleep(PAUSE_S)

    def add_last(self, step: int, epoch: float, means: Mapping[str, float]) -> None:
        """Record the workers' evaluation of the final state, unless an evaluator made it."""
        if means and step != self._last_step:
            self._note(step, epoch, means)
