"""Hybrid mode: parameters in synchronous rounds, rows of tables asynchronously.

As in mode sync, the mean gradient of a round updates the parameters. As in mode async, servers
apply each worker's gradient of rows separately. It is weighted by the worker's share of the round's
samples. So with rule sgd, a round changes the rows by as much as in mode sync.

References: Lian et al., KDD 2022 (Persia); Jiang et al., OSDI 2020 (BytePS).
"""

import math
from typing import TYPE_CHECKING

from mpips.datasets.ledger import Range
from mpips.planning.job import Job
from mpips.planning.outcome import Outcome
from mpips.problems.accumulate import Tasks
from mpips.rounds.base import Round
from mpips.rounds.loop import GradientWorker
from mpips.strategies.sync_sgd import run_rounds
from mpips.tables.hybrid import HybridTables

if TYPE_CHECKING:
    from mpips.session.metrics import Log


class HybridWorker(GradientWorker):
    """Pushes its gradients of rows before the round sums its gradient of the parameters."""

    def __init__(self, job: Job, rounds: Round) -> None:
        super().__init__(job, rounds)
        assert isinstance(rounds.tables, HybridTables), "a job without tables is refused"
        self._pusher = rounds.tables.pusher

    def compute(self, batch: Range, step: int) -> Tasks[tuple[float, int]]:
        """See `mpips.rounds.loop.RoundWorker.compute`. Blocks: until the staleness bound holds."""
        self.times.wait_s += self._pusher.begin_step(step)
        loss, samples = yield from super().compute(batch, step)
        if self._job.rows is not None and not math.isfinite(loss):
            self._job.rows.begin(step + 1)  # drops the gradients
        mine = self.part(batch)
        self._pusher.push(mine, samples, loss, (mine[2] - mine[1]) / (batch[2] - batch[1]))
        return loss, samples


def run(job: Job, log: "Log") -> Tasks[Outcome]:
    """Train. Collective: yes.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    return (yield from run_rounds(job, log, HybridWorker))
