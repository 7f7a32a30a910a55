"""Artificial delays of workers, for tests and teaching (``--inject-delay``).

A worker of factor f computes its gradient in t seconds and then sleeps for (f - 1) t, so that the
core is free for the others, as it would be if this worker had a slower one of its own.
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
    """Return the factor of each worker named in a text that `DELAYS` matches.

    Raises:
        UserError: If a worker is named twice.
    """
    pairs = [one.split(":") for one in text.split(",") if one]
    found = {int(worker): float(factor) for worker, factor in pairs}
    if len(found) < len(pairs):
        raise UserError(f"inject_delay {text!r}", "distinct workers", "name each worker once")
    return found


def check_delays(delays: Mapping[int, float], workers: int) -> None:
    """Check that the workers named are there.

    Raises:
        UserError: For the first one that is not.
    """
    for worker in sorted(delays):
        if worker >= workers:
            got = f"inject_delay names worker {worker}"
            raise UserError(got, f"workers 0 to {workers - 1}", "see the table of roles")


def delays_text(delays: Mapping[int, float]) -> str:
    """Return who was slowed, in words: ``worker 0 5 x, worker 3 2.5 x``."""
    return ", ".join(f"worker {worker} {factor:g} x" for worker, factor in sorted(delays.items()))


def linger(seconds: float, progress: Callable[[], object]) -> None:
    """Sleep for so long, in slices of a millisecond. Signals are noted.

    Args:
        seconds: How long; 0 or less returns at once.
        progress: Called between the slices: enters MPI, so that messages get on.
    """
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(min(left, SLICE_S))
        progress()
