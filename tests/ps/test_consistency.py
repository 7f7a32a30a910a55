"""Reads that wait for other workers' pushes."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpips.layout import Shard
from mpips.layout.roles import Roles
from mpips.optim import Sgd
from mpips.ps.assemble import agree
from mpips.ps.consistency import ReadRequirement, VectorClock
from mpips.ps.design import Design


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


def test_reads_between_nodes_whose_ranks_may_die_are_not_measured() -> None:
    """They are by reply in any case."""
    cluster: Any = SimpleNamespace(roles=Roles((0,), (1,)), node_of=[0, 1], hosts="ab", nodes=2)
    design = Design([Shard(0, 8)], "float32", Sgd(), lambda step: 1.0, kept=True)
    assert agree(cluster, design, None, lambda request: None) is None
