"""Pushes of a dead worker that no rank of its node can resend."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpips.failover.resending import RemoteResender
from mpips.layout import Shard
from mpips.layout.roles import Roles
from mpips.mpi.abort import Lost

OWNER, TAKER, LOCAL, REMOTE = range(4)  # the remote worker is alone on its node
APPLIED = 4


@pytest.mark.parametrize(
    ("final", "resumes", "ends"),
    [
        ({}, None, False),  # as many count as have been applied
        ({}, (0, APPLIED + 1), False),  # a push of the local worker
        ({REMOTE: APPLIED}, None, False),
        ({REMOTE: APPLIED + 1}, None, True),  # the dead owner had it, and all count on it
        ({}, (1, APPLIED + 1), True),  # a part of it is in the shard
    ],
)
def test_a_shard_that_needs_a_lost_push(
    final: dict[int, int], resumes: tuple[int, int] | None, ends: bool
) -> None:
    """The worker and the owner have died; another server takes the only shard over."""
    sent = list[tuple[str, Any]]()
    cluster: Any = SimpleNamespace(
        roles=Roles((OWNER, TAKER), (LOCAL, REMOTE)), node_of=[0, 0, 0, 1],
        is_local=lambda rank: rank != REMOTE, send=lambda to, *what: sent.append(what),
        failures=SimpleNamespace(
            lost={OWNER, REMOTE}, needed=lambda: Lost("ranks 0, 3 have died", "all", "resume")
        ),
    )  # fmt: skip
    design: Any = SimpleNamespace(kept=True, shards=[Shard(0, 8), Shard(8, 8)])
    received = SimpleNamespace(received=lambda worker: APPLIED)
    taken: Any = SimpleNamespace(
        rank=OWNER, receiver=SimpleNamespace(acknowledged=received),
        store=SimpleNamespace(idle=False, resumes=resumes, applied=np.array([9, APPLIED])),
    )  # fmt: skip
    resender = RemoteResender(cluster, design, [taken])
    if ends:
        with pytest.raises(Lost, match="ranks 0, 3 have died"):
            resender.catch_up(taken, final)
    else:
        resender.catch_up(taken, final)
    assert sent == [("left", (REMOTE, APPLIED))] * (not ends and not final)
