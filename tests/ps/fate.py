"""A server that is killed at a chosen one of the moments at which it changes shared memory."""

import numpy as np

from mpips.kernels import atomics


class Death(BaseException):
    """Of the server."""


class Fate:
    """Counts what a server does to shared memory, and kills it at one of these moments.

    Attributes:
        left: How many moments are left to it; below 0 it has died.
    """

    def __init__(self, moment: int) -> None:
        self.left = moment

    def passes(self) -> None:
        """Count a moment; raises `Death` at the last one."""
        self.left -= 1
        if self.left < 0:
            raise Death

    def publish(self, words: np.ndarray, index: int, value: int) -> None:
        self.passes()
        atomics.publish(words, index, value)
