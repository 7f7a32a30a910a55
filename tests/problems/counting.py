"""The counting problems of `tests.chaos.counting`, slow or stopping."""

import numpy as np
from countdown import Slow, Stopping

from mpips.datasets import Batch
from mpips.problems.base import Arrays
from mpips.problems.rows import RowReads
from tests.chaos import counting
from tests.chaos.counting import Counting, TableCounting, TableMeanCounting

__all__ = [
    *("Counting", "MeanCounting", "SlowCounting", "SlowStoppingCounting", "SlowTableCounting"),
    *("StoppingCounting", "StoppingTableMeanCounting", "EvaluatedTableMeanCounting"),
]


class SlowCounting(Slow, Counting):
    """The same, slow enough to be stopped in the middle of it."""


class SlowTableCounting(Slow, TableCounting):
    """Slow too."""


class StoppingCounting(Stopping, Counting):
    """The same; where ``--epochs`` is endless, each worker asks to stop at a random step."""


class StoppingTableMeanCounting(Stopping, TableMeanCounting):
    """The same in rounds, beside rows."""


class EvaluatedTableMeanCounting(TableMeanCounting):
    """The same, with the mean of the labels as the loss of what is held out."""

    def evaluate_rows(self, params: Arrays, rows: RowReads, batch: Batch) -> dict[str, float]:
        return {"loss": float(np.mean(batch.y))}


class SlowStoppingCounting(Slow, StoppingCounting):
    """Both."""


class MeanCounting(Slow, counting.MeanCounting):
    """Slow too."""
