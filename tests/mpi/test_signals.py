"""Signals that ask a job to stop."""

import pytest
from launch import python

INTERRUPTS = """
import ctypes, os, sys, threading
from mpips.mpi import signals
if sys.argv[1] != "nobody":
    signals.install()
if sys.argv[1] != "itself":
    signals.divert()
number = signals.SIGNALS[int(sys.argv[2])]
if sys.argv[1] != "nobody":
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
slept = ctypes.CDLL(None).usleep(400_000)
print(slept, signals.received(), threading.active_count())
"""


@pytest.mark.parametrize(
    ("notes", "printed", "number"),
    [
        ("itself", "-1 {} 1", 0), ("itself", "-1 {} 1", 1), ("a thread", "0 {} 2", 2),
        ("nobody", "0 None 1", 0),
    ],
)  # fmt: skip
def test_who_notes_a_signal(notes: str, printed: str, number: int) -> None:
    """A call of C is interrupted, unless a thread of its own takes what comes."""
    name = ("SIGUSR1", "SIGTERM", "SIGINT")[number]
    assert python("-c", INTERRUPTS, notes, str(number)).stdout == printed.format(name) + "\n"


AGAIN = """
import os
from mpips.mpi import signals

def sent(name, now):
    os.kill(os.getpid(), getattr(signals.signal, name))
    return signals.again(now)

assert signals.again(0.0) is None
signals.install()
assert [sent("SIGTERM", 10.0), sent("SIGTERM", 11.0), sent("SIGUSR1", 20.0)] == [None] * 3
if not os.fork():
    sent("SIGTERM", 20.0)
    os._exit(0)
os.wait()
assert signals.again(20.0) is None
print(sent("SIGINT", 20.0))
with signals.noted():
    print(sent("SIGTERM", 30.0), sent("SIGTERM", 40.0))
    os.kill(os.getpid(), signals.signal.SIGINT)  # nobody reads it in this block
with signals.noted():
    print(signals.again(50.0), sent("SIGTERM", 60.0))
before = signals.signal.getsignal(signals.signal.SIGTERM)
ends = os.pipe()
os.set_blocking(ends[1], False)
signals.signal.set_wakeup_fd(ends[1])
with signals.noted():
    os.close(ends[1])
assert signals.signal.getsignal(signals.signal.SIGTERM) is before
"""


def test_a_signal_that_comes_again() -> None:
    """Not one that follows at once, nor SIGUSR1, nor that of another process."""
    assert python("-c", AGAIN).stdout == "SIGINT\nNone SIGTERM\nNone None\n"
