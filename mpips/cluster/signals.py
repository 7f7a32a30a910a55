"""Requests to stop: SIGUSR1, SIGTERM and SIGINT set a flag, and the loops act on it.

The handlers only note the signal. The rank then finishes its step, and the whole job saves and
ends with `EXIT_SAVED`. A Python handler runs between bytecodes, so no loop may block in MPI.
"""

import signal
import threading
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
