"""The loop of an asynchronous server.

A server takes pushes and applies them, until every worker has said how many it sent and all of
them are applied. The chief has a second duty: see `mpips.ps.coordinator`. How a cut comes about:
see `mpips.cut.agreement`.
"""

import time
from collections.abc import Callable
from typing import Any

from mpips.cluster import signals, words
from mpips.cluster.waiting import take_turns
from mpips.cut.agreement import Cut, Phase
from mpips.cut.saver import Saver
from mpips.planning.job import Job
from mpips.ps.adoption import Adopter, Adoption
from mpips.ps.assemble import ServerHalf
from mpips.ps.bequest import Afar
from mpips.ps.coordinator import Chief
from mpips.ps.served import Served
from mpips.ps.survival import follow_heir, groups, spared


class AsyncServer:
    """Serves a shard until the chief ends the run.

    Args:
        job: The run.
        half: The server's half of the store.
        saver: Saves the shard.
        chief: On server 0 of a run that hands out data, its second duty.
        succeed: Makes this server the chief, given its own shard; see `mpips.ps.succession`.

    Attributes:
        reason: Why the run ended, once `serve` has returned.
        adopter: Takes over the shards of servers that have died.
    """

    def __init__(
        self,
        job: Job,
        half: ServerHalf,
        saver: Saver,
        chief: Chief | None = None,
        succeed: Callable[[Served], tuple[Chief, Adoption]] | None = None,
    ) -> None:
        self._job, self._cluster, self._half, self.store = job, job.cluster, half, half.server
        self.chief, self._succeed, store = chief, succeed, half.server
        beyond = job.config.node_aggregation
        cut = Cut(half.maximum, store.applied, store.idle, beyond)
        self._own = Served(job.cluster.rank, store, half.receiver, cut, saver)
        self._all = [self._own]
        self._afar = Afar(self._cluster, half.design, self._all)
        self.adopter = Adopter(job, half, self._all, self._afar)
        self._final: dict[int, int] = {}
        self._early: list[tuple[int, str, Any]] = []  # to the chief that this server will be
        self._told_signal = self._settling = False
        self.reason: str | None = None

    def start(self) -> None:
        """Save the state before the first step, in a run that is not resumed."""
        if self._job.checkpoint:
            return
        self._own.saver.snapshot(0)
        self._own.hold_or_go_on()
        if self.chief:
            self.chief.cut_reached(0)

    def serve(self) -> str:
        """Apply pushes until the chief ends the run; returns why it ended.

        Raises:
            Lost: If a rank dies that the run cannot do without.
        """
        self._cluster.failures.spare(spared(self._job), groups(self._job))
        words.enter(words.SERVING, time.perf_counter())
        self.serve_until(lambda: self.reason is not None and self._afar.all_whole())
        self.close()
        assert self.reason is not None
        return self.reason

    def serve_until(self, done: Callable[[], bool]) -> None:
        """Serve until `done()`; what it asks for has to come from elsewhere, or from a turn."""
        take_turns(self.turn, done, self._cluster.ranks_per_core)

    def close(self) -> None:
        """Serve no more. Collective: over the servers."""
        for served in self._all[1:]:
            served.close()
        self._half.close()

    def turn(self) -> bool:
        """Do what there is to do; returns whether there was anything. Blocks: for reads only."""
        busy = self._apply_some()
        for served in self._all:
            busy |= served.store.serve_reads()
        messages = self._cluster.poll()
        for source, kind, payload in messages:
            self._handle(source, kind, payload)
        self._advance()
        return busy or bool(messages)

    def _apply_some(self) -> bool:
        """Apply pushes that are here, for a while at most; returns whether there was one."""
        busy, chief = False, self.chief
        for served in self._all:
            note = chief.applied if chief and served.store is chief.server else None
            busy |= served.apply_some(note)
        if busy:
            self._job.begun = True
            words.tell(words.CLOCK, self.store.version)
            words.tell(words.HANDLED, self.store.tally.handled)
        return busy

    def _handle(self, source: int, kind: str, payload: Any) -> None:
        if kind == "fin":
            self._final[source] = payload
            for served in self._all:
                served.store.finished(source, payload)
        elif kind == "read":
            self.store.want_read(source, payload)
        elif kind == "frozen":
            for served in self._all:
                served.store.frozen.note(self._cluster.roles.workers.index(source), *payload)
            self._cluster.send(source, "noted")
        elif kind == "hurry":
            for served in self._all:
                served.store.clocks.hurry(source)
        elif kind in ("cut", "write", "saved", "over", "settle", "end"):
            self._follow(source, kind, payload)
        elif kind == "lost":
            self._lose(source)
        elif kind == "void":
            for served in self._all:
                served.store.void(payload)
        elif kind == "left":
            self._afar.answered(payload[0])
            self._bury(*payload)
        elif any(one.handle(source, kind, payload) for one in (self._half, self._afar)):
            return
        elif self.chief is None:
            assert self._succeed is not None, f"{kind} sent to a server that is not the chief"
            self._early.append((source, kind, payload))  # its news of a death came first
        else:
            self.chief.handle(source, kind, payload)

    def _follow(self, source: int, kind: str, payload: Any) -> None:
        """Do what the chief says, but for one that has died."""
        if source != self._cluster.roles.chief:
            return
        if kind == "cut":
            for served in self._all:
                served.begin_cut(*payload)
        elif kind == "write":
            for served in self._all:
                served.write_into(payload)
        elif kind == "saved":
            for served in self._all:
                served.saver.committed(payload)
        elif kind == "over":
            for served in self._all:
                served.store.epochs_over(*payload)
        elif kind == "settle":
            self._settling = True
            for served in self._all:
                served.settle(payload)
        else:
            self.reason, lost = payload
            self._cluster.failures.leave_out(lost)

    def _advance(self) -> None:
        for served in self._all:
            self._advance_one(served)
        if not self._told_signal and (name := signals.received()):
            self._told_signal = True
            self._cluster.send(self._cluster.roles.chief, "stop", name)
        if self._settling and all(served.at_rest for served in self._all):
            self._settling = False
            self._cluster.send(self._cluster.roles.chief, "settled")
        if self.chief:
            self.chief.advance()

    def _advance_one(self, served: Served) -> None:
        step = served.reach(self._job.base_step)
        if step is not None:
            if served.cut.phase is Phase.LAST:
                self._cluster.send(self._cluster.roles.chief, "reached")
            served.hold_or_go_on()
            if self.chief and served.store is self.chief.server:
                self.chief.cut_reached(step)
        served.advance_saver()
        if not served.reported_done and served.store.is_done(self._final):
            served.reported_done = True
            self._cluster.send(self._cluster.roles.chief, "done", served.rank)

    def _lose(self, rank: int) -> None:
        """Go on without a rank that has died."""
        workers = self._cluster.roles.workers
        self._afar.lose(rank)
        if rank in workers:
            if self._cluster.near(rank):
                self._bury(rank, self._own.receiver.announced(workers.index(rank)))
            return
        if self._cluster.roles.chief in self._cluster.failures.lost:  # before what it has served
            self._lose_chief()
        self.adopter.take_dead(rank, self._final)

    def _bury(self, rank: int, pushes: int) -> None:
        """Count a worker that has died as one that has finished, with all that it has announced."""
        self._handle(rank, "fin", pushes)
        if self.chief and rank not in self.chief.lost:
            self.chief.lose(rank, pushes)

    def _lose_chief(self) -> None:
        """Have another server be the chief, and tell it again what the dead one may not have heard.

        If it is this one: take over what that did.
        """
        heir = follow_heir(self._job)
        self._told_signal = self._settling = False
        for served in self._all:
            served.reported_done = False
        self._cluster.send(heir, "begun", self._own.cut.begun)
        self.adopter.tell()
        if heir != self._cluster.rank:
            return
        assert self._succeed is not None, "else the death of a server ends the job"
        self.chief, home = self._succeed(self._own)
        self.adopter.take(home, self._final)
        for rank in set(self._final) & self._cluster.failures.lost - set(self.chief.lost):
            self.chief.lose(rank, self._final[rank])
        for message in self._early:
            self.chief.handle(*message)
        self._early.clear()
