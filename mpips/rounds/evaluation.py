"""Evaluation between rounds, in parts on all workers."""

import time

import numpy as np

from mpips.health import status_board
from mpips.mpi.collectives import cluster_subset, free, gather_polled
from mpips.planning.job import Job
from mpips.problems.evaluation import evaluate, mean_evaluation, next_evaluation, share


class RoundEvaluation:
    """Evaluates when it is time; all workers know the result. Collective: construction, `free`.

    Args:
        job: The run.
        replica: The parameters between rounds, shape (n_params,), on workers.
        epochs: Epochs done.

    Where there are evaluators they do it, and the coordinator asks what has come of that.
    """

    def __init__(self, job: Job, replica: np.ndarray, epochs: float) -> None:
        self._job, self._cluster = job, job.cluster
        self._workers = cluster_subset(self._cluster, self._cluster.roles.workers)
        has_replica = job.worker_id is not None
        self._params = job.layout.views(replica, writable=False) if has_replica else {}
        every = 0.0 if job.config.evaluators else job.config.eval_every
        self._next = next_evaluation(epochs, every)
        self._reached = False

    def asked(self) -> str:
        """Return why the run is to end, as far as this rank knows, or an empty text.

        That is ``target``, ``patience``, or the name of a signal.
        """
        if self._job.evaluations is not None:
            return self._job.evaluations.poll()
        return "target" if self._reached else ""

    def run_when_due(self, step: int, epochs: float) -> None:
        """Evaluate after update `step`, if so many epochs done make it time.

        Raises:
            UserError: If a metric is some workers' only.
        """
        config, info, worker = self._job.config, self._job.info, self._job.worker_id
        if not info.n_test or epochs < self._next:
            return
        self._next = next_evaluation(epochs, config.eval_every)
        if worker is None:
            return
        status_board.set_phase(status_board.EVALUATING, time.perf_counter())
        begin, end = share(info.n_test, worker, len(self._cluster.roles.workers))
        mine = evaluate(self._job, self._params, begin, end)
        means = mean_evaluation(
            self._job, gather_polled(self._workers, mine, self._cluster.wait_request)
        )
        target = config.target_accuracy
        self._reached = bool(target) and means.get("accuracy", 0.0) >= target
        if worker == 0:
            payload = {"step": step, "epoch": round(epochs, 4), **means}
            self._cluster.send(self._cluster.roles.coordinator, "eval", payload)

    def free(self) -> None:
        """Free the workers' communicator; may be called twice."""
        self._params = {}
        free(self._workers)
