"""Requests to stop: SIGUSR1, SIGTERM and SIGINT set a flag, and the loops act on it.

The handlers only note the signal. The rank then finishes its step, and the whole job saves and
ends with `EXIT_SAVED`. A Python handler runs between bytecodes, so no loop may block in MPI.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_SAVED = 85
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

_received: list[int] = []


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(number)


def install() -> None:
    """Note SIGUSR1, SIGTERM and SIGINT from now on, instead of dying by them."""
    for number in SIGNALS:
        signal.signal(number, _note)


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note the signals within the block, as `install` does, and forget those that came before.

    In a thread that is not the main one nothing can be installed, and nothing changes.
    """
    _received.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    install()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        _received.clear()


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block the signals within the block: what is started there is never interrupted by them.

    They are for ranks, but a launcher may send them to all processes of a job. What comes to this
    process meanwhile is noted behind the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def divert() -> None:
    """Take what `install` notes in a thread of its own: no call of this thread is interrupted.

    For Intel MPI, whose calls fail where a signal interrupts them. Where nothing is noted, nothing
    changes. What this process starts from then on has the signals blocked.
    """
    if signal.getsignal(SIGNALS[0]) is _note:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_take, name="signals", daemon=True).start()


def _take() -> None:
    while True:
        _received.append(signal.sigwait(SIGNALS))


def received() -> str | None:
    """Return the name of the first signal that came, or None."""
    return signal.Signals(_received[0]).name if _received else None


def count(number: int) -> int:
    """Return how often a signal came."""
    return _received.count(number)
