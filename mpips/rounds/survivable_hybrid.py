"""Rounds of mode hybrid that go on without a dead worker.

Servers own parameters and rows, and the death of a server ends the job, as does that of the first
rank of a node: so no slice is taken over. When a worker D dies in round t, all others come to stand
in a barrier that it has not reached (`mpips.rounds.survivable`), and the first rank of its node
acts, once the process of D is gone. For a worker a round is

    1  read rows, compute: gradient and rows of t are being written, in memory that nobody reads
    2  announce the rows: one word for all servers, `Sender.push` of number t
    3  first barrier
    4  second barrier

The word of 2 alone decides about both, for when it is published the gradient is whole too:

    before 2   Neither counts: no server takes rows that are not announced, and D has not reached
               the first barrier. Its samples are assigned again.
    behind 2   Both count. Rows stay in the memory of the node, so each server applies them: now,
               later, or it has done so. If D was not in the first barrier, the first rank writes
               its report from the header of the push, and lets the others pass.
    behind 4   As before 2 of round t + 1.

What servers have applied does not matter: of each push all do, or will, apply all of it once. Every
worker that has passed round t has announced the rows of t, so whoever waits for rows of D waits for
servers alone. Behind the round without D, servers apply the rest that it has announced and say in
their ledgers that nothing comes any more (`mpips.tables.hybrid`).

Rows that the others had pushed in the round in which D is missing counted by their share of the
whole batch, while the mean of their gradients is one over the samples that are left.

**On several nodes** the same word decides, and the round is made again as others are
(`mpips.rounds.survivable_nodes`): with the gradient of D if it has announced the rows of t. What is
to be shown is that remote servers apply what D has announced, and no more.

- Rows leave D behind its word: what has come to a remote server is announced, in whole or in part.
- A buffer of D is free when all remote servers have applied it (`mpips.transport.acknowledged`), so
  what one of them is without lies in the memory of D's node.
- A server that sees the death drops what has come in part, and asks the first rank of D's node, in
  whatever both wait for (ASK). That one sees to it that D is gone, so that the word is the last,
  and sends the rest. It sends to nobody twice, and lives, or the job ends: so all comes, once.

A server asks between two pushes, and before any verdict: workers of its node may wait for those
rows, and be in no barrier before they have read them. It takes them when it is in their round, as
those of the living, so that a checkpoint has them with the gradients of their round, or neither.
From the verdict a server learns how many there are: one fewer than the first round without D.
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
                self._window.view(rank, "report").fill(0)  # all have read it
        return agreed

    @property
    def _pushed(self) -> HybridTables:
        assert isinstance(self.tables, HybridTables), "a job without tables is refused"
        return self.tables

    def _apply(self, number: int) -> None:
        for part in self._slices.parts if not self._known or self._weights.any() else ():
            self._update(part, self._step, self._weights, self._weights)

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
    """The same on several nodes: an exchange is that of `NodesRound`, and rows are sent again."""

    def __init__(self, job: Job, *given: Any) -> None:
        """See `SurvivableRound`."""
        super().__init__(job, *given)
        self._asked: set[int] = set()  # of whom this server has asked for rows
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
        """See `NodesRound.leave_out`; who has announced rows has a report, too."""
        super().leave_out(first, owners)
        for rank in filter(self._cluster.is_local, first):
            self._counts(rank)

    def _ask(self) -> None:
        """Ask for rows that this server is without, of remote workers that have died."""
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
        """Send a server what it is without of a worker of this node. Blocks: until that is gone."""
        assert self._resender is not None, "leaders are asked"
        fence(self.memory, rank)
        self._resender.resend(server, rank, lacking)

    def free(self) -> None:
        """See `Round.free`."""
        self._resender = None
        super().free()
