"""The counting problems of `tests.chaos.counting`, slow or stopping."""

from countdown import Slow, Stopping

from tests.chaos import counting
from tests.chaos.counting import Counting, TableCounting, TableMeanCounting

__all__ = [
    *("Counting", "MeanCounting", "SlowCounting", "SlowStoppingCounting", "SlowTableCounting"),
    *("StoppingCounting", "StoppingTableMeanCounting"),
]


class SlowCounting(Slow, Counting):
    """The same, slow enough to be stopped in the middle of it."""


class SlowTableCounting(Slow, TableCounting):
    """Slow too."""


class StoppingCounting(Stopping, Counting):
    """The same; where ``--epochs`` is endless, each worker asks to stop at a random step."""


class StoppingTableMeanCounting(Stopping, TableMeanCounting):
    """The same in rounds, beside rows."""


class SlowStoppingCounting(Slow, StoppingCounting):
    """Both."""


class MeanCounting(Slow, counting.MeanCounting):
    """Slow too."""
