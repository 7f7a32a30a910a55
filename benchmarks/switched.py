"""Exchanges while something is switched on, beside the same ones without it."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from mpips.planning.job import Job
from mpips.problems.accumulate import Tasks
from mpips.tools.bench.measure import Options, bytes_text, compare, in_turn
from mpips.tools.bench.pushpull import Exchange

WORK_BYTES = 1 << 30  # moved by a worker's pulls in one repeat


class BusyExchange(Exchange):
    """An exchange in whose steps a worker's core is busy for a while.

    Args:
        job: The run.
        compute_s: Seconds of a step, beside the step's own work.
    """

    def __init__(self, job: Job, compute_s: float) -> None:
        super().__init__(job)
        self.compute_s = compute_s

    def tasks(self) -> Tasks[None]:
        """See `Exchange.tasks`; computes first."""
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
    """Compare exchanges while something is switched on to the same ones without it.

    Args:
        exchange: What is measured.
        size: Bytes of its parameters.
        bounds: Steps of a worker in one repeat, at least and at most.
        options: How often each side is measured.
        switched_on: Makes what each rank exchanges within.

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
