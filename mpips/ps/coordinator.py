"""The chief's second duty beside its shard: it hands out data, starts checkpoints, ends runs.

The chief is server 0, and after its death its heir, who then serves server 0's shard as well.
"""

import time
from typing import TYPE_CHECKING, Any

from mpips.cluster import words
from mpips.cluster.failures import Lost
from mpips.cut.committer import LAST_PAUSE_S, LAST_TRIES, RETRY_S, Committer
from mpips.cut.worker_state import Holding
from mpips.datasets.ledger import HandOut, epochs_over
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.ps.feed import Granter
from mpips.ps.record import Record
from mpips.ps.shard import Server
from mpips.transport.push import Push

if TYPE_CHECKING:
    from mpips.ps.succession import Settling
    from mpips.session.metrics import Log


class Chief:
    """Data, checkpoints, the end; an `AsyncServer` calls it.

    It has an attribute for each who takes part, and a word for each of its decisions.

    Args:
        job: The run.
        server: Server 0's shard.
        granter: Gives batches to workers.
        handout: Which batches there are.
        committer: Writes what a cut holds.
        log: Where it is told.
        holding: Where workers have state of their own.
        record: Where it notes what an heir has to know.
    """

    def __init__(
        self,
        job: Job,
        server: Server,
        granter: Granter,
        handout: HandOut,
        committer: Committer,
        log: "Log",
        holding: Holding | None = None,
        record: Record | None = None,
    ) -> None:
        self._job, self._cluster, self.server = job, job.cluster, server
        self._holding, self._record = holding, record
        self._granter, self.handout, self._committer, self._log = granter, handout, committer, log
        self._done: set[int] = set()
        self.lost: dict[int, int] = {}  # pushes of each rank that has died
        self._period = job.config.checkpoint_period
        self._last_s, self._last_step = time.perf_counter(), job.base_step
        self._cutting = False
        self._stop: str | None = None
        self._ended = False
        self._tries = 0  # to write the last checkpoint
        self.cuts = 0  # begun
        self._serving: dict[int, int] = {}  # by rank of a server that has died, that of who serves
        self._gone: set[int] = set()  # servers of which nothing is heard any more
        self._absent: set[int] = set()  # shards without which a checkpoint is being cut
        self._again = False  # it is given up, and another one is due
        committer.saved_step = job.base_step if job.checkpoint else None
        if job.checkpoint:
            words.tell(words.SAVED, job.base_step)
        self.samples = self._saved_samples = self._cut_samples = job.base_samples
        self.diverged: str | None = None
        self.unsaved = ""
        self._settling: Settling | None = None  # the servers, behind the death of a chief
        evicts = any(table.table.evict_after is not None for table in tables_of(job))
        self._over: int | None = 0 if evicts else None  # epochs, as servers were told last

    def go_on(self, state: dict[str, Any], settling: "Settling") -> None:
        """Go on where a chief has died.

        Args:
            state: What it has noted beside the hand-out.
            settling: Brings what it had under way to an end.
        """
        self.samples = self.handout.samples_done + state["samples_more"]
        self._saved_samples = -1  # what the last checkpoint holds is not known
        self.lost, self._stop, self.diverged = state["lost"], state["stop"], state["diverged"]
        self._serving = state["serving"]
        self._gone.update(self._serving)
        self._settling = settling
        self._log.start_at(self.samples)
        for rank in self._cluster.roles.servers:
            self._cluster.send(rank, "void", self.handout.taken_back)
        self.note()
        if self._stop is not None:
            self._tell_stop()

    def note(self) -> None:
        """Note what an heir has to know, but for what is handed out from now on."""
        if self._record is not None:
            more = {
                "stop": self._stop, "diverged": self.diverged, "lost": self.lost,
                "serving": self._serving,
                "samples_more": self.samples - self.handout.samples_done,
                "warnings": list(self._log.warnings), "eval": self._log.last_eval,
            }  # fmt: skip
            self._record.save(self.handout, more)

    @property
    def step(self) -> int:
        """Updates applied, in resumed runs too."""
        return self.server.version

    def applied(self, push: Push) -> None:
        """Note a push that was applied here: its batch is done."""
        self.handout.applied(push.worker, push.batch)
        self.samples += push.samples
        self._log.count(push.loss, push.samples)

    def handle(self, source: int, kind: str, payload: Any) -> None:
        """Act on a message to the chief."""
        if source in self._gone:
            return  # sent before it died, and answered for
        if self._settling is not None and self._settling.handle(source, kind, payload):
            return
        if kind == "more":
            self._granter.answer(source)
        elif kind == "asked":
            self._granter.go_on_afar(source, *payload)
        elif kind == "stop":
            self.stop(payload)
        elif kind == "done":
            self._done.add(payload)
        elif kind == "adopted":
            dead, *adoption = payload
            self._gone |= dead
            self._lose_server(source, *adoption)
        elif kind == "shard":
            self._committer.collect(*payload)
        elif kind == "own":
            self._committer.collect_own(payload)
        elif kind == "eval":
            self._evaluated(payload)
        elif kind == "log":
            self._log.heard(kind, payload)
        elif kind == "diverged":
            self._diverge(payload)
        elif self._holding is None or not self._holding.handle(source, kind, payload):
            raise AssertionError(f"unknown message {kind!r} from rank {source}")

    def stop(self, reason: str) -> None:
        """Hand out nothing more and have the workers finish their steps."""
        if self._stop is None:
            self._stop, self.handout.stopped = reason, True
            self.note()
            self._log.event("stop", self.step, reason=reason)
            self._tell_stop()

    def _tell_stop(self) -> None:
        for rank in self._cluster.roles.workers:
            self._cluster.send(rank, "stop")

    def _diverge(self, text: str) -> None:
        self.diverged = self.diverged or text
        self.stop("diverged")

    def lose(self, rank: int, pushes: int) -> None:
        """Go on without a worker that has died, all of whose pushes are applied in the end.

        Raises:
            Lost: If it was the last one.
        """
        workers = self._cluster.roles.workers
        worker = workers.index(rank)
        self.lost[rank] = pushes
        if len(self.lost) == len(workers) and not self._ended:
            got, remedy = "every worker has died", "the run goes on by --resume"
            raise Lost(got, "one that goes on", remedy)
        numbers = self._granter.take_back(worker, pushes)
        self.note()
        for server in self._cluster.roles.servers:
            self._cluster.send(server, "void", numbers)
        host = self._cluster.hosts[rank]
        text = f"worker {worker} (rank {rank} on {host}) has died; its {len(numbers)} open batches "
        self._log.warn(text + "go to the others")
        self._log.event("lost", self.step, rank=rank, worker=worker, batches=len(numbers))

    def _lose_server(
        self, source: int, rank: int, begun: int, ledger: list[int], took: float, continued: bool
    ) -> None:
        """Go on without a server whose shard has just been taken over.

        Args:
            source: By whom.
            rank: Of the server that has died.
            begun: Cuts that have begun for the shard; it is in the next one.
            ledger: Its pushes of each worker.
            took: Seconds that it took.
            continued: Whether an update was under way.
        """
        number, host = self._cluster.roles.servers.index(rank), self._cluster.hosts[rank]
        self._done.discard(rank)
        if begun >= self.cuts and self._cutting:
            self._absent.add(number)
        elif begun >= self.cuts and self._committer.lacks(number):
            self._give_up(number)
        self._cluster.send(source, "open", (number, *self._still_open(ledger)))
        if self._serving.get(rank) == source:
            return  # which the chief before has heard as well
        self._serving[rank] = source
        self.note()
        its = self._cluster.roles.servers.index(source)
        known = {"rank": rank, "server": number, "seconds": round(took, 6)}
        self._log.event("lost", self.step, **known, continued=continued)
        text = f"server {number} (rank {rank} on {host}) has died; server {its} has taken its "
        self._log.warn(f"{text}{'shard' if number else 'duties'} over in {took:.3f} s")

    def _still_open(self, ledger: list[int]) -> tuple[int, list[int], list[int]]:
        """Return what `Clocks.learn` takes, for a shard of that ledger."""
        there, missing = self.server.ledger, list[int]()
        for worker, (ours, its) in enumerate(zip(there, ledger, strict=True)):
            missing += [number for _, number in self.handout.open_to(worker)[max(0, its - ours) :]]
        return self.handout.issued, missing, there

    def _give_up(self, number: int) -> None:
        """Have the checkpoint under way fail, for which a server has not answered."""
        self._again = True
        self._committer.collect(number, f"rank {self._cluster.roles.servers[number]} has died")

    @property
    def _orphaned(self) -> bool:
        """Whether a shard is to be taken over still."""
        lost, servers = self._cluster.failures.lost, self._cluster.roles.servers
        return bool(lost) and any(self._serving.get(rank, rank) in lost for rank in servers)

    def _evaluated(self, metrics: dict[str, float]) -> None:
        self._log.heard("eval", metrics)
        target = self._job.config.target_accuracy
        if target and metrics.get("accuracy", 0.0) >= target:
            self.stop("target")

    def advance(self) -> None:
        """Get on with everything. Blocks: no."""
        self._granter.serve()
        if self._over is not None:
            self._tell_over(self._over)
        if self._record is not None and self._record.due:
            self.note()
        if self._settling is not None:
            self._settle(self._settling)
        evaluations = self._job.evaluations
        if self._committer.poll():
            self._saved_samples = self._cut_samples
            if evaluations is not None:
                evaluations.saved(self._committer.saved_step)
        if evaluations is not None and (reason := evaluations.poll()):
            self.stop(reason)
        if self._committer.refused:
            self._refuse()
        if self._log.due():
            recent = self.server.tally.recent()
            self._log.progress(self.step, self.handout.epochs_done, self.samples, staleness=recent)
        if self._cutting or self._committer.busy or self._ended or self._settling is not None:
            return
        if self._orphaned:
            return
        if len(self._done) == len(self._cluster.roles.servers):
            self._end()
        elif not self._stop and self._due():
            self._begin_cut()

    def _tell_over(self, told: int) -> None:
        """Tell servers when more epochs are over than they know, and with which pushes."""
        if self.handout.cursor[0] > told and (over := epochs_over(self.handout)) > told:
            self._over = over
            for rank in self._cluster.roles.servers:
                self._cluster.send(rank, "over", (over, self.server.ledger))

    def _settle(self, settling: "Settling") -> None:
        if settling.done():
            self._settling, self._again = None, True
        if settling.cuts is not None:
            self.cuts = settling.cuts

    def _refuse(self) -> None:
        self._committer.refused = False
        self._diverge(f"parameters not finite at step {self.step}")

    def _due(self) -> bool:
        seconds, steps = self._period
        if self._again:
            self._again = False
            return True
        evaluations = self._job.evaluations
        if evaluations is not None and evaluations.due(self.handout.epochs_done):
            return True
        if self._committer.failed_for(RETRY_S):
            return True
        if words.asked_to_save() and self.step > self._last_step:
            return True
        if seconds is not None and time.perf_counter() - self._last_s >= seconds:
            return self.step > self._last_step
        return steps is not None and self.step - self._last_step >= steps

    def _begin_cut(self) -> None:
        self._cutting = True
        self.cuts += 1
        self._last_s, self._last_step = time.perf_counter(), self.step
        if self._holding is not None:
            self._holding.begin()
            return
        for rank in self._cluster.roles.servers:
            self._cluster.send(rank, "cut", (self.cuts, None))

    def cut_reached(self, step: int) -> None:
        """Open the checkpoint of `step`: this server has just reached the cut."""
        self._cutting = False
        self._last_step, self._cut_samples = step, self.samples
        own = self._holding.numbers if self._holding else []
        skipped = self.server.dense.leaving.skipped
        state = self._job.state(step, self.handout.state(), self.samples, skipped)
        if self._job.config.record:
            recorder = self.server.recorder
            state["recorded"] = 0 if recorder is None else recorder.part
        if self._job.evaluations is not None:
            state |= self._job.evaluations.at_cut(step, self.handout.epochs_done)
        self._committer.open(step, state | ({"own": own} if own else {}), bool(own))
        for number in self._absent:
            self._give_up(number)
        self._absent.clear()

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
            self._cluster.send(rank, "end", (reason, sorted({*self.lost, *self._serving})))
