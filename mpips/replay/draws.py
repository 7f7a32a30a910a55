"""The random generators that a process has once, shared by ranks that had one each."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class Draws:
    """Python's `random`, NumPy's legacy generator and torch's, as one rank has them.

    They are kept as they are when this is made, and after each block.
    """

    def __init__(self) -> None:
        self._kept = _states()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Have the generators be this rank's within the block."""
        before = _states()
        _set(self._kept)
        try:
            yield
        finally:
            self._kept = _states()
            _set(before)


def _states() -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    theirs = torch.get_rng_state() if torch is not None else None
    return random.getstate(), np.random.get_state(), theirs


def _set(states: tuple[Any, ...]) -> None:
    ours, legacy, theirs = states
    random.setstate(ours)
    np.random.set_state(legacy)
    if theirs is not None:
        sys.modules["torch"].set_rng_state(theirs)
