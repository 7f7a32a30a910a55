"""Pushes of dead workers: who is asked for them, and when nobody has them."""

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


class Server:
    """A server of the only shard: what it has received, and what it sends."""

    def __init__(self, nodes: list[int], roles: Roles, *lost: int) -> None:
        self.sent, self.received = list[tuple[Any, ...]](), APPLIED
        failures = SimpleNamespace(lost={*lost}, needed=lambda: Lost("they died", "all", "resume"))
        cluster: Any = SimpleNamespace(
            roles=roles, node_of=nodes, is_local=lambda rank: not nodes[rank],
            send=lambda *what: self.sent.append(what), failures=failures,
        )  # fmt: skip
        receiver = SimpleNamespace(received=lambda worker: self.received, lose=lambda rank: None)
        self.shard: Any = SimpleNamespace(
            rank=OWNER, receiver=SimpleNamespace(acknowledged=receiver),
            store=SimpleNamespace(idle=False, resumes=None, applied=np.array([9, APPLIED])),
        )  # fmt: skip
        design: Any = SimpleNamespace(
            kept=True, shards=[Shard(0, 8), Shard(8, 8)][: len(roles.servers)]
        )
        self.resender, self._lost = RemoteResender(cluster, design, [self.shard]), failures.lost

    def lose(self, rank: int) -> list[tuple[Any, ...]]:
        """Hear of a death; returns what is sent."""
        before = len(self.sent)
        self._lost.add(rank)
        self.resender.lose(rank)
        return self.sent[before:]


@pytest.mark.parametrize(
    ("left", "resumes", "ends"),
    [
        ({}, None, False),  # as many count as have been applied
        ({}, (0, APPLIED + 1), False),  # a push of the local worker
        ({REMOTE: APPLIED}, None, False),
        ({REMOTE: APPLIED + 1}, None, True),  # the dead owner had it, and all count on it
        ({}, (1, APPLIED + 1), True),  # a part of it is in the shard
    ],
)
def test_a_shard_that_needs_a_lost_push(
    left: dict[int, int], resumes: tuple[int, int] | None, ends: bool
) -> None:
    """The worker and the owner have died; another server takes the only shard over."""
    roles = Roles((OWNER, TAKER), (LOCAL, REMOTE))
    server = Server([0, 0, 0, 1], roles, OWNER, REMOTE)
    server.shard.store.resumes = resumes
    server.resender.left.update(left)
    if ends:
        with pytest.raises(Lost, match="they died"):
            server.resender.catch_up(server.shard)
    else:
        server.resender.catch_up(server.shard)
    answer = roles.servers, "left", (REMOTE, APPLIED)
    assert server.sent == [answer] * (not ends and not left)


def test_a_resender_that_dies_behind_its_answer() -> None:
    """The next one is asked for the pushes that had not left, and for none that are here."""
    server = Server([0, 1, 1, 1], Roles((OWNER,), (1, 2, 3)))
    asked = "lacking", (1, [(OWNER, APPLIED)])
    assert server.lose(1) == [(2, *asked)]
    server.resender.left[1] = APPLIED + 1
    assert (3, *asked) in server.lose(2)
    server.received = server.resender.left[2] = APPLIED + 1
    assert [what[1:] for what in server.lose(3)] == [("left", (3, APPLIED + 1))]
