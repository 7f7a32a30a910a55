"""Waiting of a rank, and progress of MPI while it computes."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from mpips.mpi.start import MPI, Request

SPIN_S = 20e-6
YIELD_S = 200e-6
SLEEP_S = 20e-6
SLEEP_MAX_S = 1e-3
IDLE_S = 1.0
BACKGROUND_S = 200e-6
CROWDED = 2  # ranks per core; with more, a rank that polls takes the core from one that works

duties: list[Callable[[], object]] = []  # called while this process waits; they serve other ranks


def attend() -> None:
    """Call the `duties` of this process. Blocks: no."""
    for duty in duties:
        duty()


class Backoff:
    """Waiting in small steps: a rank spins, then yields, then sleeps longer and longer.

    A sleep frees the core; ``sched_yield`` alone does not do so under Linux's fair scheduler. If
    ranks outnumber cores, the rank does not spin, and its first sleep is longer the more ranks
    share a core. Each poll costs the working ranks 10 to 20 us.

    Args:
        ranks_per_core: Ranks of the host, divided by its cores.
    """

    def __init__(self, ranks_per_core: float) -> None:
        oversubscribed = ranks_per_core > 1
        self._spin_s = 0.0 if oversubscribed else SPIN_S
        self._yield_s = SPIN_S if oversubscribed else YIELD_S
        self._sleep_s = min(SLEEP_MAX_S, SLEEP_S * max(1.0, 2 * (ranks_per_core - 1)))
        self._since: float | None = None

    def reset(self) -> None:
        """Start over with the shortest wait."""
        self._since = None

    def pause(self) -> None:
        """Wait a little, longer the more time has passed since `reset`."""
        now = time.perf_counter()
        if self._since is None:
            self._since = now
        idle_s = now - self._since
        if idle_s < self._spin_s:
            return
        if idle_s < self._yield_s:
            os.sched_yield()
        else:
            more = SLEEP_MAX_S - self._sleep_s
            time.sleep(self._sleep_s + more * min(1.0, idle_s / IDLE_S))


def patience_ns(ranks_per_core: float) -> int:
    """Return how long a compiled loop polls before its rank waits by `Backoff`, in nanoseconds.

    Compiled loops do not yield: under Linux 6.18, a rank that yields to other programs gets the
    core back only after milliseconds.
    """
    return int(SPIN_S * 1e9) if ranks_per_core <= CROWDED else 0


def take_turns(turn: Callable[[], object], done: Callable[[], bool], ranks_per_core: float) -> None:
    """Call `turn` until `done()`, and wait after each turn without work.

    Args:
        turn: Does the present work; returns whether there was any.
        done: Called before each turn.
        ranks_per_core: See `Backoff`.
    """
    backoff = Backoff(ranks_per_core)
    while not done():
        if turn():
            backoff.reset()
        else:
            backoff.pause()


class Background:
    """Thread that calls `advance` now and then, within a ``with`` block.

    So MPI progresses while this rank computes. Thread and rank never call MPI at the same time: the
    block hands MPI over to the thread, and its end waits for the thread. Without
    MPI_THREAD_MULTIPLE, nothing is called. The thread starts with the first block, and ends with
    `end`.

    Args:
        advance: The function to call.
        every_s: Seconds between two calls. Each takes the GIL from the rank for about 20 us.
    """

    def __init__(self, advance: Callable[[], object], every_s: float = BACKGROUND_S) -> None:
        self._advance, self._every_s = advance, every_s
        self._wanted, self._turn = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended, self._error = False, list[BaseException]()
        self._allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def __enter__(self) -> None:
        if self._allowed and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()
        self._wanted.set()

    def __exit__(self, *_: object) -> None:
        self._wanted.clear()
        with self._turn:
            if self._error:  # raise the thread's error on the rank
                raise self._error.pop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Call nothing from the thread within the block: this rank calls MPI. Usable anywhere."""
        wanted = self._wanted.is_set()
        self.__exit__()
        try:
            yield
        finally:
            if wanted:
                self.__enter__()

    def end(self) -> None:
        """End the thread, if there is one; no block may follow."""
        self._ended = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._wanted.wait() and not self._ended:
            with self._turn:
                if self._wanted.is_set():
                    try:
                        self._advance()
                    except BaseException as error:
                        self._error.append(error)
                        return
            time.sleep(self._every_s)


def all_done(requests: list[Request]) -> bool:
    """Advance operations, and return whether all are complete. Blocks: no."""
    return MPI.Request.Testall(requests)
