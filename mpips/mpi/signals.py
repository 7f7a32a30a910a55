"""Requests to stop: SIGUSR1, SIGTERM and SIGINT set a flag.

The handlers only note the signal. The rank then finishes its step, and the whole job saves and ends
with `mpips.errors.Exit.SAVED`. Python calls a handler only between two bytecodes. So no loop of
mpips may block in MPI. Calls of the user's program may block. For them, signals are also written to
a pipe, which a thread reads (`again`).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

AGAIN_S = 3.0  # launchers repeat a signal sooner; later it is a second request

_received: list[int] = []
_pipe: list[int] = []  # file descriptors of both ends
_asked: list[float] = []  # times when `again` has seen SIGTERM or SIGINT


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(number)


def install() -> None:
    """Note SIGUSR1, SIGTERM and SIGINT from now on; they no longer end the process."""
    for number in SIGNALS:
        signal.signal(number, _note)
    if not _pipe:
        _pipe.extend(os.pipe())
        os.register_at_fork(after_in_child=_write_nothing)
        for end in _pipe:
            os.set_blocking(end, False)
    signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)


def _write_nothing() -> None:
    """Keep signals of a forked child out of this process's pipe."""
    before = signal.set_wakeup_fd(-1)
    if before != _pipe[1]:
        signal.set_wakeup_fd(before)


def again(now: float) -> str | None:
    """Return the name of SIGTERM or SIGINT if it has come again at least `AGAIN_S` seconds later.

    Any thread may call it repeatedly. It also sees signals while the main thread is in a call of C.

    Args:
        now: The present time, in seconds.
    """
    try:
        found = os.read(_pipe[0], 4096) if _pipe else b""
    except BlockingIOError:
        return None
    for number in found:
        if number != signal.SIGUSR1 and number in SIGNALS:
            if _asked and now - _asked[0] >= AGAIN_S:
                return signal.Signals(number).name
            _asked.append(now)
    return None


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note signals within the block, as `install` does, and forget earlier ones.

    Outside of the main thread nothing can be installed, and nothing changes.
    """
    again(0.0)  # empties the pipe
    _received.clear()
    _asked.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup_fd = signal.set_wakeup_fd(-1)
    install()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        with contextlib.suppress(ValueError, OSError):  # the program has closed it
            signal.set_wakeup_fd(wakeup_fd)
        _received.clear()


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block the signals within the block; processes started there keep them blocked.

    The signals are meant for ranks, but a launcher may send them to all processes of a job. This
    process notes signals of that time after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def divert() -> None:
    """Note signals in another thread from now on, so that they interrupt no call of this thread.

    Intel MPI's calls fail if a signal interrupts them. Without `install`, nothing changes.
    Processes started afterwards have the signals blocked.
    """
    if signal.getsignal(SIGNALS[0]) is _note:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_take, name="signals", daemon=True).start()


def _take() -> None:
    while True:
        number = signal.sigwait(SIGNALS)
        _received.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(_pipe[1], bytes([number]))


def received() -> str | None:
    """Return the name of the first signal that came, or None."""
    return signal.Signals(_received[0]).name if _received else None


def count(number: int) -> int:
    """Return how often a signal came."""
    return _received.count(number)
