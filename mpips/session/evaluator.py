"""Evaluator ranks: evaluation of checkpoints during training (`mpips.snapshot.evaluations`)."""

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.checkpoint import open_checkpoint
from mpips.config import Config
from mpips.datasets import Batch, Source
from mpips.datasets.base import iterate
from mpips.errors import UserError
from mpips.health import status_board
from mpips.mpi import signals
from mpips.mpi.collective_errors import raise_on_all
from mpips.mpi.evaluator_link import Link
from mpips.mpi.world import Cluster
from mpips.problems import Problem, load_problem
from mpips.problems.evaluation import CHUNK, metric_sums, share
from mpips.problems.rows import evaluation
from mpips.session.data import open_data
from mpips.session.folder import Run
from mpips.session.setup import traced
from mpips.snapshot.evaluations import Asked

if TYPE_CHECKING:
    from mpips.tables.saved_rows import SavedRows

IDLE_S = 0.02


class _Over(Exception):
    """The run has ended during an evaluation."""


def evaluate_for(found: Run, ranks: Cluster, link: Link) -> int:
    """Evaluate checkpoints on the coordinator's request until the run ends; return the exit code.

    Raises:
        CollectiveError: If the job is refused, on every rank.
        UserError: If the problem's metrics are invalid.

    Collective: yes, over training ranks and evaluators at the start. Blocks: until the run ends.
    """
    link.agreed(lambda: None)  # the training ranks prepare the job, and count the data's files
    evaluator = link.agreed(lambda: _prepared(found, ranks, link))
    with traced(found.config, ranks, found.out, link):
        code = evaluator.serve()
    link.part(code)
    return code


def _prepared(found: Run, ranks: Cluster, link: Link) -> "Evaluator":
    """Open the data, and build the problem. Collective: yes, over the evaluators."""
    config = found.config
    known = dataclasses.replace(found, resumed=True)  # the training ranks have counted the files
    info, dataset = open_data(known, ranks)
    assert dataset is not None, "every evaluator opens it"
    held_out = dataset.test if info.n_test else None

    def make() -> Evaluator:
        samples = checked_samples(held_out, config, "give --test-dataset")
        return Evaluator(link, ranks, samples, load_problem(config.problem, info, config), config)

    evaluator = raise_on_all(ranks.comm, make)
    ranks.limit_threads(config.threads)  # also of libraries that a user's file has imported
    return evaluator


def checked_samples(held_out: Source | None, config: Config, remedy: str) -> Source:
    """Return the held-out samples.

    Args:
        held_out: The held-out samples, or None.
        config: The job.
        remedy: How to provide them.

    Raises:
        UserError: If there are none.
    """
    if held_out is None:
        got = f"evaluators {config.evaluators} without held-out samples"
        raise UserError(got, "samples to evaluate", f"{remedy}, or leave out evaluators")
    return held_out


class _Unreadable(Exception):
    """Rows of a checkpoint cannot be read."""


class Evaluator:
    """Evaluates checkpoints on the coordinator's request.

    Args:
        link: Link to the coordinator.
        ranks: The evaluators.
        held_out: Held-out samples, of which it evaluates a share.
        problem: The model.
        config: The job.

    Attributes:
        samples: Number of held-out samples.
    """

    def __init__(
        self, link: Link, ranks: Cluster, held_out: Source, problem: Problem, config: Config
    ) -> None:
        self._link, self._held_out, self._problem = link, held_out, problem
        self.samples = held_out.n
        self._params = np.empty(problem.layout.size, config.dtype)
        self._average = config.eval_ema
        self._rows: SavedRows | None = None
        self._reported_signal = False
        self._coordinator: int | None = None
        self._asked: list[Asked] = []
        self._code: int | None = None

    def serve(self) -> int:
        """Evaluate until the run ends, and return the job's exit code.

        Without a request, it sleeps between polls.
        """
        evaluations = 0
        status_board.set_phase(status_board.EVALUATION, time.perf_counter())
        while self._code is None:
            self._attend()
            if not self._asked:
                time.sleep(IDLE_S)
                continue
            asked = self._asked.pop()
            self._asked.clear()  # earlier requests were sent before an evaluator was lost
            try:
                sums = self._evaluate(asked)
            except _Over:
                break
            assert self._coordinator is not None, "it has asked"
            self._link.send(self._coordinator, "evaluated", (asked.number, sums))
            evaluations += 1
            status_board.report(status_board.CLOCK, evaluations)
            status_board.set_phase(status_board.EVALUATION, time.perf_counter())
        status_board.set_phase(status_board.ENDING, time.perf_counter())
        assert self._code is not None
        return self._code

    def _attend(self) -> None:
        """Handle messages and signals."""
        for source, kind, payload in self._link.poll():
            if kind == "lost":
                continue  # the coordinator handles it
            self._coordinator = source
            if kind == "begin":
                self._link.spare(payload)
            elif kind == "evaluate":
                self._asked.append(payload)
            else:
                assert kind == "end", f"unknown message {kind!r} to an evaluator"
                self._code = payload
        name = signals.received()
        if name is not None and self._coordinator is not None and not self._reported_signal:
            self._reported_signal = True
            self._link.send(self._coordinator, "stop", name)

    def _evaluate(self, asked: Asked) -> dict[str, float] | str:
        """Return the sums of metrics over this share of the samples, or the reason of a failure."""
        from mpips.tables.saved_rows import SavedRows

        status_board.set_phase(status_board.LOADING, time.perf_counter())
        try:
            saved = open_checkpoint(asked.folder)
            saved.read_model(self._average, out=self._params)
        except UserError as problem:
            return str(problem)
        status_board.set_phase(status_board.EVALUATING, time.perf_counter())
        self._rows = SavedRows(saved)
        params = self._problem.layout.views(self._params, writable=False)
        batches = self._batches(*share(self.samples, asked.part, asked.parts))
        try:
            return metric_sums(batches, evaluation(self._problem, params, self))
        except _Unreadable as problem:
            return str(problem)
        finally:
            self._rows = None  # frees their memory before the next rows are read

    def pull(self, name: str, ids: Any) -> np.ndarray:
        """Return rows of the current checkpoint; see `mpips.problems.rows.RowReads`."""
        assert self._rows is not None, "a checkpoint is evaluated"
        try:
            return self._rows.pull(name, ids)
        except UserError as problem:
            raise _Unreadable(str(problem)) from None

    def _batches(self, begin: int, end: int) -> Iterator[Batch]:
        for batch in iterate(self._held_out, begin, end, CHUNK, self._params.dtype):
            self._attend()
            if self._code is not None:
                raise _Over
            yield batch
