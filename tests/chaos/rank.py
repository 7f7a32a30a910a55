"""A rank that can be made to raise: ``python -m tests.chaos.rank (-m MODULE | PROGRAM) ...``.

It runs what it is given as `mpips.launch.rank` does. At a signal an exception is raised wherever
its main thread is, as a mistake in the user's code would.
"""

import signal
import sys
from types import FrameType

from mpips.launch.rank import run

RAISE = signal.SIGVTALRM  # which neither mpips nor an MPI uses


class InjectedFault(Exception):
    """What is raised."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise InjectedFault("of tests.chaos")


if __name__ == "__main__":
    signal.signal(RAISE, _raise)
    run(sys.argv[1:])
