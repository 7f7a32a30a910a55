"""Exchanges with a feature switched on, beside the same exchanges without it."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from mpips.planning.job import Job
from mpips.problems.accumulate import Tasks
from mpips.tools.bench.measure import Options, bytes_text, compare, in_turn
from mpips.tools.bench.pushpull import Exchange

WORK_BYTES = 1 << 30  # bytes of a worker's pulls in one repeat


class BusyExchange(Exchange):
    """An exchange with additional computing time in each step of a worker.

    Args:
        job: The job.
        compute_s: Additional computing time of a step in seconds.
    """

    def __init__(self, job: Job, compute_s: float) -> None:
        super().__init__(job)
        self.compute_s = compute_s

    def tasks(self) -> Tasks[None]:
        """See `Exchange.tasks`; computes before the step."""
        end = time.perf_counter() + self.compute_s
        while self.compute_s and time.perf_counter() < end:
            pass
        return super().tasks()


def with_and_without(
    exchange: BusyExchange,
    size: int,
    bounds: tuple[int, int],
    options: Options,
    switched_on: Callable[[], AbstractContextManager[object]],
) -> tuple[str, float, float, float]:
    """Compare exchanges with a feature switched on with the same exchanges without it.

    Args:
        exchange: The exchange.
        size: Bytes of its parameters.
        bounds: Smallest and largest number of a worker's steps in one repeat.
        options: Options of the bench.
        switched_on: Function that returns a context in which the feature is on.

    Returns:
        The case of a row, pushes/s with and without it, and the first over the second.

    Collective: yes.
    """
    steps = options.times(bounds, WORK_BYTES // size)

    def side(within: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
        def work() -> None:
            with within():
                exchange.exchange(steps)

        return work

    sides = {"with": side(switched_on), "without": side(nullcontext)}
    times = in_turn(exchange.cluster, sides, options.repeats)
    mine, other, ratio = compare(times["with"], times["without"])
    workers = len(exchange.cluster.roles.workers)
    case = f"{bytes_text(size)}, 1 server, {workers} worker{'s' * (workers > 1)}"
    if exchange.compute_s:
        case += f", gradients of {1e3 * exchange.compute_s:g} ms"
    return case, workers * steps / mine, workers * steps / other, ratio
