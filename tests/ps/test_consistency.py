"""Reads that wait for other workers' pushes."""

import numpy as np

from mpips.ps.consistency import ReadRequirement, VectorClock


def test_a_cancelled_wait_ends_between_two_updates() -> None:
    """Also if it was cancelled during one, in which no read is answered."""
    answered = list[int]()
    header, applied = np.zeros(8, "i8"), np.zeros(2, "i8")
    clock = VectorClock(header, applied, (4, 5), lambda rank, consistent: answered.append(rank))
    clock.held += [(rank, False, ReadRequirement(clock=1)) for rank in (4, 5)]
    clock.cancel_wait(5)
    assert not answered
    clock.let()
    assert answered == [5]
    clock.held.append((5, False, ReadRequirement(clock=2)))
    clock.let()
    assert answered == [5], "a later read waits again"
