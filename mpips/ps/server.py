"""The loop of an asynchronous server.

A server takes pushes and applies them, until every worker has said how many it sent and all of
them are applied. Server 0, the chief, has a second duty: see `mpips.ps.coordinator`. How a cut
comes about: see `mpips.cut.agreement`.
"""

import time
from collections.abc import Callable
from typing import Any

from mpips.cluster import signals
from mpips.cluster.waiting import take_turns
from mpips.cut.agreement import Cut, Phase
from mpips.cut.saver import Saver
from mpips.planning.job import Job
from mpips.ps.assemble import ServerHalf
from mpips.ps.coordinator import Chief
from mpips.ps.survival import spared
from mpips.transport.push import Push

TURN_S = 50e-6  # after which a server that applies pushes attends to all else


class AsyncServer:
    """Serves one shard until the chief ends the run.

    Args:
        job: The run.
        half: The server's half of the store.
        saver: Saves the shard.
        chief: On server 0 of a run that hands out data, its second duty.

    Attributes:
        reason: Why the run ended, once `serve` has returned.
    """

    def __init__(
        self, job: Job, half: ServerHalf, saver: Saver, chief: Chief | None = None
    ) -> None:
        self._job, self._cluster, self._half, self.store = job, job.cluster, half, half.server
        self._receiver, self._saver, self.chief = half.receiver, saver, chief
        beyond = job.config.node_aggregation
        store = half.server
        self.cut = Cut(half.servers, store.applied, store.shard.size == 0, beyond)
        self._final: dict[int, int] = {}
        self._told_done = self._told_signal = False
        self.reason: str | None = None

    def start(self) -> None:
        """Save the state before the first step, in a run that is not resumed."""
        if self._job.checkpoint:
            return
        self._saver.snapshot(0)
        self.cut.phase = Phase.HOLD if self._saver.holds else Phase.FREE
        if self.chief:
            self.chief.cut_reached(0)

    def serve(self) -> str:
        """Apply pushes until the chief ends the run; returns why it ended.

        Raises:
            Lost: If a rank dies that the run cannot do without.
        """
        self._cluster.failures.spare(spared(self._job))
        self.serve_until(lambda: self.reason is not None)
        self.close()
        assert self.reason is not None
        return self.reason

    def serve_until(self, done: Callable[[], bool]) -> None:
        """Serve until `done()`; what it asks for has to come from elsewhere, or from a turn."""
        take_turns(self.turn, done, self._cluster.ranks_per_core)

    def close(self) -> None:
        """Serve no more. Collective: over the servers."""
        self._half.close()

    def turn(self) -> bool:
        """Do what there is to do; returns whether there was anything. Blocks: for reads only."""
        busy = self._apply_some()
        self.store.serve_reads()
        messages = self._cluster.poll()
        for source, kind, payload in messages:
            self._handle(source, kind, payload)
        self._advance()
        return busy or bool(messages)

    def _apply_some(self) -> bool:
        """Apply pushes that are here, for a while at most; returns whether there was one."""
        push = self._take()
        if push is None:
            return False
        self._job.begun = True
        end = time.perf_counter() + TURN_S
        while push is not None:
            self.store.apply(push)
            if self.chief:
                for part in push:
                    self.chief.applied(part)
            push = self._take() if time.perf_counter() < end else None
        return True

    def _take(self) -> Push | None:
        phase = self.cut.phase
        if phase in (Phase.FREE, Phase.LAST):
            return self._receiver.take()
        if phase is Phase.DRAIN:
            return self._receiver.take(fetch=False)
        return self._receiver.take(limit=self.cut.target) if phase is Phase.REACH else None

    def _handle(self, source: int, kind: str, payload: Any) -> None:
        if kind == "fin":
            self._final[source] = payload
            self.store.finished(source, payload)
        elif kind == "read":
            self.store.want_read(source, payload)
        elif kind == "frozen":
            self.store.told.note(self._cluster.roles.workers.index(source), *payload)
            self._cluster.send(source, "noted")
        elif kind == "hurry":
            self.store.clocks.hurry(source)
        elif kind == "cut":
            self.cut.begin(payload)
        elif kind == "write":
            self._saver.write_into(payload)
        elif kind == "end":
            self.reason, lost = payload
            self._cluster.failures.leave_out(lost)
        elif kind == "lost":
            self._lose(source)
        elif kind == "void":
            self.store.void(payload)
        else:
            assert self.chief is not None, f"{kind} sent to a server that is not the chief"
            self.chief.handle(source, kind, payload)

    def _advance(self) -> None:
        if self.cut.advance(self._receiver.bodies):
            step = self.store.settle(self._job.base_step + int(self.cut.target.sum()))
            self._saver.snapshot(step)
            if self.cut.phase is Phase.LAST:
                self._cluster.send(self._cluster.roles.chief, "reached")
            self.cut.phase = Phase.HOLD if self._saver.holds else Phase.FREE
            if self.chief:
                self.chief.cut_reached(step)
        self._saver.poll()
        if self.cut.phase is Phase.HOLD and not self._saver.holds:
            self.cut.phase = Phase.FREE
        if not self._told_signal and (name := signals.received()):
            self._told_signal = True
            self._cluster.send(self._cluster.roles.chief, "stop", name)
        if not self._told_done and self._done():
            self._told_done = True
            self._cluster.send(self._cluster.roles.chief, "done")
        if self.chief:
            self.chief.advance()

    def _lose(self, rank: int) -> None:
        """Count a worker that has died as one that has finished, with all that it has announced."""
        pushes = self._receiver.announced(self._cluster.roles.workers.index(rank))
        self._handle(rank, "fin", pushes)
        if self.chief:
            self.chief.lose(rank, pushes)

    def _done(self) -> bool:
        """Whether every push was applied that any worker sent."""
        workers, final = self._cluster.roles.workers, self._final
        return len(final) == len(workers) and self.store.has_applied([final[r] for r in workers])
