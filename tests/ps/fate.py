"""A server that is killed at a chosen one of the moments at which it changes shared memory."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from mpips.kernels import atomics, rule_loops
from mpips.optim import rules


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

    def store_ordered(self, words: np.ndarray, index: int, value: int) -> None:
        self.passes()
        words[index] = value

    def calls(self, step: Any) -> dict[str, Any]:
        """Return what a loop that keeps old values calls: it dies before it writes a number."""
        return {"store_ordered": self.store_ordered}

    def undoable(self, step: Any, others: int = 0) -> Callable[..., None]:
        """Return such a loop in Python; see `mpips.kernels.rule_loops.undoable`."""
        loop = rule_loops.undoable(step, others).function
        return FunctionType(loop.__code__, {**loop.__globals__, **self.calls(step)})

    def patch_pieces(self, patch: pytest.MonkeyPatch) -> None:
        """Have a server die before the number of each piece of its shard is written."""
        patch.setattr(rules, "undoable", self.undoable)
