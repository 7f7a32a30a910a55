"""Time limits of checks, which end a doctor that hangs."""

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable, Iterator

GRACE_S = 10.0


class Watch:
    """Watches over what may hang inside MPI or a file system, where nothing else gets a word in.

    Args:
        limit_s: Seconds that a check may take.
        expired: Called from a thread with the check's name and its limit when it is over. The
            process ends with code 1 when it returns, or half of `GRACE_S` later if it does not.
    """

    def __init__(self, limit_s: float, expired: Callable[[str, float], None]) -> None:
        self._limit_s, self._expired = limit_s, expired
        self._then: Callable[[str], object] = str

    def then(self, end: Callable[[str], object]) -> None:
        """Have `end` called with a message after `expired`, to take the other ranks along."""
        self._then = end

    @contextlib.contextmanager
    def over(self, check: str, least_s: float = 0.0) -> Iterator[None]:
        """Watch over what is done within a ``with`` block, for `least_s` at least."""
        limit_s = max(self._limit_s, least_s)
        timer = threading.Timer(limit_s, self._expire, [check, limit_s])
        timer.daemon = True
        timer.start()
        # Needs no Python: the last resort where the interpreter's lock is held for ever.
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True)
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _expire(self, check: str, limit_s: float) -> None:
        last = threading.Timer(GRACE_S / 2, os._exit, [1])
        last.daemon = True
        last.start()
        try:
            self._expired(check, limit_s)
            self._then(f"doctor: {check} is not over after {limit_s:g} s")
        finally:
            os._exit(1)
