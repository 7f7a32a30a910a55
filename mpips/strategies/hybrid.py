"""Hybrid: parameters in synchronous rounds, rows of tables asynchronously.

The parameters are updated as in mode sync, by the mean gradient of a round. Each worker's gradient
of rows counts by its share of the round's samples, and is applied by itself, as in mode async: with
rule sgd the rows of a round change by as much as in mode sync.

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
    """Pushes its rows before the round in which its gradient is summed."""

    def __init__(self, job: Job, rounds: Round) -> None:
        super().__init__(job, rounds)
        assert isinstance(rounds.tables, HybridTables), "a job without tables is refused"
        self._pusher = rounds.tables.pusher

    def compute(self, batch: Range, step: int) -> Tasks[tuple[float, int]]:
        """See `mpips.rounds.loop.RoundWorker.compute`. Blocks: as the staleness bound says."""
        self.times.wait_s += self._pusher.begin_step(step)
        loss, samples = yield from super().compute(batch, step)
        if self._job.rows is not None and not (samples and math.isfinite(loss)):
            self._job.rows.begin(step + 1)  # nothing is pushed of what its program has left
        mine = self.part(batch)
        self._pusher.push(mine, samples, loss, (mine[2] - mine[1]) / (batch[2] - batch[1]))
        return loss, samples


def run(job: Job, log: "Log") -> Tasks[Outcome]:
    """Train. Collective: yes.

    Raises:
        UserError: If shared memory is too small, or a file cannot be read or written.
    """
    return (yield from run_rounds(job, log, HybridWorker))
