"""Rounds of mode hybrid that continue without a dead worker.

Servers own parameters and rows. The death of a server ends the job, and so does that of the first
rank of a node; so no slice is taken over. When a worker D dies in round t, all others come to wait
in a barrier that it has not reached (`mpips.rounds.survivable`). The first rank of its node acts
once the process of D is gone. A worker's round has these steps:

    1  read rows, compute: gradient and rows of t are written, in memory that no other rank reads
    2  announce the rows: one word for all servers, `Sender.push` of number t
    3  first barrier
    4  second barrier

The word of step 2 decides about gradient and rows, since the gradient is complete when it is
published:

    before 2   Neither counts: no server takes rows that are not announced, and D has not reached
               the first barrier. Its samples are assigned again.
    after 2    Both count. The rows stay in the memory of the node, and each server applies them
               once. If D was not in the first barrier, the first rank writes its report from the
               header of the push, and releases the barrier.
    after 4    As before 2 of round t + 1.

The servers' progress does not matter: each server applies each push once. Every worker that has
passed round t has announced its rows of t. So a rank that waits for rows of D waits only for
servers. After the round without D, servers apply its remaining announced rows. Then they mark in
their ledgers that D announces no more (`mpips.tables.hybrid`).

In the round without D, the others have already pushed their rows, weighted by their share of the
whole batch. The mean gradient is over the remaining samples.

**On several nodes** the same word decides, and the round is repeated as in
`mpips.rounds.survivable_nodes`. The gradient of D counts if it has announced the rows of t. Remote
servers apply exactly the pushes that D has announced, for these reasons:

- D sends rows after it has published its word. So all that a remote server receives is announced,
  in whole or in part.
- A buffer of D is free once all remote servers have applied it (`mpips.transport.acknowledged`). So
  a push that one of them lacks is in the memory of D's node.
- A server that detects the death drops unfinished messages, and asks the first rank of D's node,
  wherever both wait (ASK). That rank ensures that the process of D is gone, so that the word is
  final, and sends the rest. It sends the rest to each server once, and stays alive, or the job
  ends. So every push arrives, once.

A server asks between two pushes, and before any verdict: workers of its node may wait for those
rows, before they reach a barrier. It applies them once it is in their round, as it does the rows of
living workers. So a checkpoint has them together with the gradients of their round. The verdict
tells the server the number of these pushes: one fewer than the first round without D.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpips.failover.resending import Resender
from mpips.failover.takeover import fence
from mpips.mpi.collectives import Mailbox
from mpips.planning.job import Job
from mpips.rounds.base import REPORT, Report, Weights
from mpips.rounds.survivable import SurvivableRound
from mpips.rounds.survivable_nodes import NodesRound
from mpips.tables.hybrid import HybridTables

ASK = "ask"


class HybridRound(SurvivableRound):
    """Rounds of mode hybrid in the memory of one node, whose workers may die."""

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        known = self.left
        agreed = super().exchange(step, weights, report)
        if self.left is not known:
            if (owned := self._pushed.owned) is not None:
                workers = self._cluster.roles.workers
                owned.leave_out({workers.index(r): first - 1 for r, first in self.left.items()})
            for rank in filter(self._cluster.is_local, self.left if self._leads else ()):
                self._window.view(rank, "report").fill(0)  # all ranks have read it
        return agreed

    @property
    def _pushed(self) -> HybridTables:
        assert isinstance(self.tables, HybridTables), "a job without tables is refused"
        return self.tables

    def _apply(self, number: int) -> None:
        for part in self._slices.parts if not self._known or self._weights.any() else ():
            self._update(self._step, self._weights, part, self._weights)

    def _counts(self, rank: int) -> bool:
        if self._updates:
            return True
        push = self._pushed.find(rank, self._step)
        if push is None:
            return False
        report = Report(push.loss * push.samples, diverged=not math.isfinite(push.loss))
        REPORT.pack_into(self._window.view(rank, "report").data, 0, *report)
        return True


class HybridNodesRound(HybridRound, NodesRound):
    """Rounds of mode hybrid on several nodes: exchanges of `NodesRound`, with resending of rows."""

    def __init__(self, job: Job, *args: Any) -> None:
        """See `SurvivableRound`."""
        super().__init__(job, *args)
        self._asked: set[int] = set()  # dead ranks for whose rows this server has asked
        self._mailbox = Mailbox(self._cluster.comm, self._cluster.failures)
        self._resender: Resender | None = None
        if self._pushed.owned is not None:
            self._pushed.owned.between = self._ask
        if self._recovery is not None:
            tables = self._pushed
            self._resender = Resender(self._cluster, tables.window, tables.design)
            self._recovery.hear(self._cluster.roles.servers, ASK, self._resend)

    def counts(self, rank: int, entered: bool) -> bool:
        """See `NodesRound.counts`."""
        return entered or self._pushed.find(rank, self._step) is not None

    def leave_out(self, first: Mapping[int, int], owners: Sequence[int]) -> None:
        """See `NodesRound.leave_out`; also writes the reports of ranks that have announced rows."""
        super().leave_out(first, owners)
        for rank in filter(self._cluster.is_local, first):
            self._counts(rank)

    def _ask(self) -> None:
        """Ask for missing rows of dead remote workers."""
        cluster, owned = self._cluster, self._pushed.owned
        assert owned is not None, "servers ask"
        for rank in sorted(cluster.failures.lost - self._asked):
            self._asked.add(rank)
            if not cluster.is_local(rank):
                got = owned.lose(rank, cluster.roles.workers.index(rank))
                lacking = [(cluster.roles.servers.index(cluster.rank), got)]
                leader = cluster.node_of.index(cluster.node_of[rank])
                self._mailbox.bring(leader, (ASK, cluster.rank, rank, lacking))

    def _resend(self, server: int, rank: int, lacking: list[tuple[int, int]]) -> None:
        """Send a server the missing rows of a dead worker. Blocks: until its process is gone."""
        assert self._resender is not None, "leaders are asked"
        fence(self.memory, rank)
        self._resender.resend(server, rank, lacking)

    def free(self) -> None:
        """See `Round.free`."""
        self._resender = None
        super().free()
