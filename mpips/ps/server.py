"""The loop of an asynchronous server, and the chief's second duty.

A server takes pushes and applies them, until every worker has said how many it sent and all of
them are applied. Server 0, the chief, also hands out data, starts checkpoints and ends the run.

A checkpoint's cut: the chief says "cut"; each server finishes the far pushes that it has begun to
receive and takes no others; an Allreduce finds the elementwise maximum of the servers'
``applied``; each applies exactly up to it (every push in it was sent to every server), copies its
shard and goes on. So all shards of a checkpoint have seen the same pushes. Where one message holds
the pushes of several workers, a server may have to go beyond the maximum; then they agree again,
until none had to: as all far servers get the same messages, that is after three times at most.
Where workers have state of their own, they come first, and say how many pushes are in the cut: see
`mpips.cut.worker_state`.
"""

import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.cluster import signals
from mpips.cluster.world import Backoff, Comm, Request, begin_maximum
from mpips.cut.saver import LAST_PAUSE_S, LAST_TRIES, RETRY_S, Committer, Saver
from mpips.cut.worker_state import Holding
from mpips.datasets.ledger import HandOut
from mpips.kernels.atomics import observe
from mpips.planning.job import Job
from mpips.ps.feed import Granter
from mpips.ps.store import Server
from mpips.transport.channel import Receiver
from mpips.transport.push import Push

if TYPE_CHECKING:
    from mpips.session.metrics import Log


class Phase(Enum):
    """Where a server is in a cut."""

    FREE = auto()  # no cut: takes any push
    DRAIN = auto()  # takes the far pushes that it has begun to receive
    AGREE = auto()  # takes none, until the servers' maximum is known
    REACH = auto()  # takes pushes up to the maximum
    LAST = auto()  # takes any push: the workers announce none beyond the cut
    HOLD = auto()  # takes none, until the live shard is written (snapshot = "stall")


class Cut:
    """One server's part in agreeing on what a checkpoint holds. Collective: over the servers.

    Args:
        applied: The server's ledger, shape (workers,).
        empty: Whether its shard is.
        beyond: Whether servers may have to apply more than what was agreed on.
    """

    def __init__(self, servers: Comm, applied: np.ndarray, empty: bool, beyond: bool) -> None:
        self._servers, self._applied, self._empty = servers, applied, empty
        self._beyond = beyond
        self._mine = np.zeros(applied.size, "i8")
        self._before = np.zeros(applied.size, "i8")
        self.target = np.zeros(applied.size, "i8")
        self._agreeing: Request | None = None
        self.phase = Phase.FREE

    def begin(self, target: Sequence[int] | None = None) -> None:
        """Start, when the chief says so; with the pushes of each worker if these are agreed on."""
        assert self.phase is Phase.FREE, "a cut is under way"
        self.phase = Phase.DRAIN
        if target is not None:
            self.target[:] = target
            self.phase = Phase.LAST

    def advance(self, bodies: int) -> bool:
        """Get on; returns whether the cut is reached just now. Blocks: no.

        Args:
            bodies: Far pushes received or being received.
        """
        if self.phase is Phase.DRAIN and bodies == 0:
            self._before[:] = -1
            self._agree()
        if self.phase is Phase.AGREE and self._agreeing is not None and self._agreeing.Test():
            self.phase = Phase.REACH
        if self.phase is Phase.LAST and self._reached():
            assert self._empty or self._passed() == 0, "a worker pushed beyond the cut"
            return True
        if self.phase is not Phase.REACH or not self._reached():
            return False
        if not self._beyond or np.array_equal(self.target, self._before):
            return True
        self._before[:] = self.target
        self._agree()
        return False

    def _agree(self) -> None:
        for worker in range(self._applied.size):
            self._mine[worker] = observe(self._applied, worker)
        self._agreeing = begin_maximum(self._servers, self._mine, self.target)
        self.phase = Phase.AGREE

    def _passed(self) -> int:
        """Return how many pushes beyond the maximum are applied."""
        workers = range(self._applied.size)
        return sum(max(0, observe(self._applied, w) - int(self.target[w])) for w in workers)

    def _reached(self) -> bool:
        workers = range(self._applied.size)
        return self._empty or all(observe(self._applied, w) >= self.target[w] for w in workers)


class AsyncServer:
    """Serves one shard until the chief ends the run.

    Attributes:
        reason: Why the run ended, once `serve` has returned.
    """

    def __init__(
        self, job: Job, servers: Comm, store: Server, receiver: Receiver, saver: Saver
    ) -> None:
        self._job, self._cluster, self.store = job, job.cluster, store
        self._receiver, self._saver = receiver, saver
        self._servers = servers
        beyond = job.config.node_aggregation
        self.cut = Cut(self._servers, store.applied, store.shard.size == 0, beyond)
        self._final: dict[int, int] = {}
        self._told_done = self._told_signal = False
        self.reason: str | None = None
        self.chief: Chief | None = None

    def start(self) -> None:
        """Save the state before the first step, in a run that is not resumed."""
        if self._job.resumed:
            return
        self._saver.snapshot(0)
        self.cut.phase = Phase.HOLD if self._saver.holds else Phase.FREE
        if self.chief:
            self.chief.cut_reached(0)

    def serve(self) -> str:
        """Apply pushes until the chief ends the run; returns why it ended."""
        self.serve_until(lambda: self.reason is not None)
        self.close()
        assert self.reason is not None
        return self.reason

    def serve_until(self, done: Callable[[], bool]) -> None:
        """Serve until `done()`; what it asks for has to come from elsewhere, or from a turn."""
        backoff = Backoff(self._cluster.crowding)
        while not done():
            if self.turn():
                backoff.reset()
            else:
                backoff.pause()

    def close(self) -> None:
        """Serve no more. Collective: over the servers."""
        self.store.close()
        self._receiver.close()
        self._servers.Free()

    def turn(self) -> bool:
        """Do what there is to do; returns whether there was anything. Blocks: for reads only."""
        push = self._take()
        if push is not None:
            self.store.apply(push)
            self._job.begun = True
            if self.chief:
                for part in push:
                    self.chief.applied(part)
        self.store.serve_reads()
        messages = self._cluster.poll()
        for source, kind, payload in messages:
            self._handle(source, kind, payload)
        self._advance()
        return push is not None or bool(messages)

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
        elif kind == "hurry":
            self.store.clocks.hurry(source)
        elif kind == "cut":
            self.cut.begin(payload)
        elif kind == "write":
            self._saver.write_into(payload)
        elif kind == "end":
            self.reason = payload
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

    def _done(self) -> bool:
        """Whether every push was applied that any worker sent."""
        workers = self._cluster.roles.workers
        if len(self._final) < len(workers):
            return False
        return self.store.shard.size == 0 or all(
            observe(self.store.applied, w) == self._final[r] for w, r in enumerate(workers)
        )


class Chief:
    """Server 0's second duty: data, checkpoints, the end. Attached to an `AsyncServer`.

    With `holding`, workers have state of their own.
    """

    def __init__(
        self,
        job: Job,
        server: AsyncServer,
        granter: Granter,
        handout: HandOut,
        committer: Committer,
        log: "Log",
        holding: Holding | None = None,
    ) -> None:
        self._job, self._cluster, self._server = job, job.cluster, server
        self._holding = holding
        self._granter, self._handout, self._committer, self._log = granter, handout, committer, log
        self._done: set[int] = set()
        self._last_s, self._last_step = time.perf_counter(), job.base_step
        self._cutting = False
        self._stop: str | None = None
        self._ended = False
        self._tries = 0  # to write the last checkpoint
        committer.saved_step = job.base_step if job.resumed else None
        self.samples = self._saved_samples = self._cut_samples = job.base_samples
        self.diverged: str | None = None
        self.unsaved = ""

    @property
    def step(self) -> int:
        """Updates applied, in resumed runs too."""
        return self._server.store.version

    def applied(self, push: Push) -> None:
        """Note a push that was applied here: its batch is done."""
        self._handout.applied(push.worker, push.batch)
        self.samples += push.samples
        self._log.count(push.loss, push.samples)

    def handle(self, source: int, kind: str, payload: Any) -> None:
        """Act on a message to the chief."""
        if kind == "more":
            self._granter.answer(source)
        elif kind == "stop":
            self.stop(payload)
        elif kind == "done":
            self._done.add(source)
        elif kind == "shard":
            self._committer.collect(payload)
        elif kind == "own":
            self._committer.collect_own(payload)
        elif kind == "eval":
            self._evaluated(payload)
        elif kind == "diverged":
            self.diverged = self.diverged or payload
            self.stop("diverged")
        elif self._holding is None or not self._holding.handle(source, kind, payload):
            raise AssertionError(f"unknown message {kind!r} from rank {source}")

    def stop(self, reason: str) -> None:
        """Hand out nothing more and have the workers finish their steps."""
        if self._stop is None:
            self._stop, self._handout.stopped = reason, True
            self._log.event("stop", self.step, reason=reason)
            for rank in self._cluster.roles.workers:
                self._cluster.send(rank, "stop")

    def _evaluated(self, metrics: dict[str, float]) -> None:
        self._log.evaluation(metrics)
        target = self._job.config.target_accuracy
        if target and metrics.get("accuracy", 0.0) >= target:
            self.stop("target")

    def advance(self) -> None:
        """Get on with everything. Blocks: no."""
        self._granter.serve()
        if self._committer.poll():
            self._saved_samples = self._cut_samples
        if self._committer.refused:
            self._refuse()
        if self._log.due():
            self._log.progress(self.step, self._handout.epochs_done, self.samples)
        if self._cutting or self._committer.busy or self._ended:
            return
        if len(self._done) == len(self._cluster.roles.servers):
            self._end()
        elif not self._stop and self._due():
            self._begin_cut()

    def _refuse(self) -> None:
        self._committer.refused = False
        step = self.step
        self.diverged = self.diverged or f"parameters not finite at step {step}"
        self.stop("diverged")

    def _due(self) -> bool:
        seconds, steps = self._job.config.checkpoint_period
        if self._committer.failed_for(RETRY_S):
            return True
        if seconds is not None and time.perf_counter() - self._last_s >= seconds:
            return self.step > self._last_step
        return steps is not None and self.step - self._last_step >= steps

    def _begin_cut(self) -> None:
        self._cutting = True
        self._last_s, self._last_step = time.perf_counter(), self.step
        if self._holding is not None:
            self._holding.begin()
            return
        for rank in self._cluster.roles.servers:
            self._cluster.send(rank, "cut")

    def cut_reached(self, step: int) -> None:
        """Open the checkpoint of `step`: this server has just reached the cut."""
        self._cutting = False
        self._last_step, self._cut_samples = step, self.samples
        own = self._holding.numbers if self._holding else []
        state = self._job.state(step, self._handout.state(), self.samples)
        self._committer.open(step, state | ({"own": own} if own else {}), bool(own))

    def _end(self) -> None:
        """Save the final state if that is not done, then end the run."""
        saved = self._saved_samples == self.samples and self._committer.has_saved(self.step)
        if self.diverged is None and not saved:  # what was dropped makes no step, but is handled
            failed = bool(self._committer.failure)
            if failed and not self._committer.failed_for(LAST_PAUSE_S):
                return
            if self._tries < LAST_TRIES:
                self._tries += 1
                self._begin_cut()
                return
            self.unsaved = f"{self._committer.failure}; {self._committer.kept}"
        self._ended = True
        reason = self._stop or ("steps" if self._job.config.steps else "epochs")
        if self.diverged is not None:
            reason = "diverged"
        for rank in range(self._cluster.world):
            self._cluster.send(rank, "end", reason)
