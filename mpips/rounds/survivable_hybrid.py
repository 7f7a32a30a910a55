"""Rounds of mode hybrid that go on without a dead worker.

All ranks are of one node. Servers own parameters and rows, and the death of a server ends the job,
as does that of the first rank: so no slice is taken over, and nothing is copied. When a worker D
dies in round t, all others come to stand in a barrier that it has not reached
(`mpips.rounds.survivable`), and the first rank decides, once the process of D is gone. For a worker
a round is

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
"""

import math

from mpips.rounds.base import REPORT, Report, Weights
from mpips.rounds.survivable import SurvivableRound
from mpips.tables.hybrid import HybridTables


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
            for rank in self.left if self._leads else ():  # all have read it
                self._window.view(rank, "report").fill(0)
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
