"""Artificial delays of workers, for tests and teaching (``--inject-delay``).

A worker with factor f computes its gradient in t seconds and then sleeps for (f - 1) t. So its core
is free for the other ranks, as if this worker had a slower core of its own.
"""

import re
import time
from collections.abc import Callable, Mapping

from mpips.errors import UserError

_ONE = r"[0-9]{1,9}:[1-9][0-9]{0,5}(\.[0-9]{1,6})?"
DELAYS = re.compile(rf"({_ONE}(,{_ONE})*)?")
FORM = "WORKER:FACTOR[,WORKER:FACTOR...] with factors >= 1 (such as 0:5)"
SLICE_S = 1e-3


def parse_delays(text: str) -> dict[int, float]:
    """Return the factor of each worker in a text that `DELAYS` matches.

    Raises:
        UserError: If a worker is named twice.
    """
    pairs = [one.split(":") for one in text.split(",") if one]
    found = {int(worker): float(factor) for worker, factor in pairs}
    if len(found) < len(pairs):
        raise UserError(f"inject_delay {text!r}", "distinct workers", "name each worker once")
    return found


def check_delays(delays: Mapping[int, float], workers: int) -> None:
    """Check that all workers in `delays` exist.

    Raises:
        UserError: For the first worker that does not exist.
    """
    for worker in sorted(delays):
        if worker >= workers:
            got = f"inject_delay names worker {worker}"
            raise UserError(got, f"workers 0 to {workers - 1}", "see the table of roles")


def delays_text(delays: Mapping[int, float]) -> str:
    """Return the slowed workers as text: ``worker 0 5 x, worker 3 2.5 x``."""
    return ", ".join(f"worker {worker} {factor:g} x" for worker, factor in sorted(delays.items()))


def linger(seconds: float, progress: Callable[[], object]) -> None:
    """Sleep in slices of a millisecond; signals are handled.

    Args:
        seconds: Duration; 0 or less returns at once.
        progress: Called between slices; enters MPI, so that messages make progress.
    """
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(min(left, SLICE_S))
        progress()
