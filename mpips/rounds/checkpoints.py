"""Checkpoints between synchronous rounds, and codec state of ranks in them.

All ranks are at the same step then, so that the end of a round is a consistent snapshot.

A codec's residuals lie with the rank that packs a sum, powersgd's error with the rank that has the
rows; its basis is the same on every node. All is copied at the end of the round that a checkpoint
holds. Every rank writes a file, beside the shards; the basis is in that of rank 0. A residual is of
no codec: another one that keeps residuals goes on with it.

A resumed run goes on with it if every rank is where it was. Else the sum over the ranks is shared
out: of a residual, each node that sends a slice to its owner takes an equal part, of an error,
each node. What counts is the sum that comes in at the owner, so that nothing is lost.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.checkpoint import Checkpoint, Pieces
from mpips.codecs.powersgd import Factors
from mpips.datasets.ledger import SampleAllocator
from mpips.health import status_board
from mpips.mpi.collectives import begin_broadcast, gather_polled
from mpips.optim import Range
from mpips.planning.job import Job, saved_config
from mpips.ps.server import saver_of
from mpips.rounds.base import Round
from mpips.rounds.powersgd import BASIS, ERROR
from mpips.snapshot.committer import LAST_PAUSE_S, LAST_TRIES, RETRY_S, Committer
from mpips.snapshot.saver import Saver, Snapshots, WorkerSaver
from mpips.snapshot.worker_state import unfit
from mpips.transport.wire import kept, unpacked

if TYPE_CHECKING:
    from mpips.session.metrics import Log


def names(job: Job) -> tuple[str, ...]:
    """Names of the vectors that ranks keep between rounds; empty where none keeps any."""
    config, cluster = job.config, job.cluster
    if not config.in_rounds or cluster.nodes == 1:
        return ()
    if config.codec == "powersgd":
        return ERROR, BASIS
    return kept(config, cluster.roles, cluster.node_of, job.shards)


def _senders(job: Job, owner: int) -> int:
    """Return how many nodes send sums to an owner on another one."""
    node_of = job.cluster.node_of
    return len({node_of[rank] for rank in job.cluster.roles.workers} - {node_of[owner]})


def resume_notes(job: Job) -> Iterator[str]:
    """Yield lines that say, in a resumed run, what becomes of what was kept."""
    mine = names(job)
    if job.checkpoint is None or not job.base_step:
        return
    found = read_names(job)
    if found and _same_places(job):
        yield f"each rank goes on with its own {', '.join(found)}"
    elif found:
        yield f"the sum of the ranks' {', '.join(found)} is shared out to those who pack now"
    if found and (dropped := _dropped(job)):
        yield f"{found[0]} of {dropped} is left out: nobody packs them now"
    fresh = [name for name in mine if name not in found]
    if fresh:
        yield f"{', '.join(fresh)} begins anew: {unfit(job, fresh) or 'none that fits was saved'}"


def restore(job: Job, state: Mapping[str, Pieces]) -> None:
    """Restore what this rank keeps from the checkpoint, where there is something for it.

    Args:
        job: The run.
        state: `mpips.rounds.base.Round.own_state`, which is changed in place.

    Raises:
        UserError: If the checkpoint cannot be read.
    """
    cluster, same = job.cluster, _same_places(job)
    for name in read_names(job):
        for begin, view in state.get(name, ()):
            if name == BASIS:
                _checkpoint(job).read_workers_share(name, begin, view, 1)
            elif same:
                _checkpoint(job).read_worker(name, cluster.rank, view, begin)
            else:
                shares = cluster.nodes if name == ERROR else _senders(job, _owner(job, begin))
                _checkpoint(job).read_workers_share(name, begin, view, shares)


def own_saver(job: Job, state: Mapping[str, Pieces]) -> WorkerSaver | None:
    """Return what saves this rank's part at snapshots, or None where no rank keeps anything.

    Args:
        job: The run.
        state: `mpips.rounds.base.Round.own_state`.
    """
    found, rank = names(job), job.cluster.rank
    if not found:
        return None
    vectors = {name: state.get(name, ()) if name != BASIS or rank == 0 else () for name in found}
    stall = job.config.snapshot == "stall"
    return WorkerSaver(job.cluster, rank, vectors, job.layout.size, job.dtype, stall)


def _owner(job: Job, begin: int) -> int:
    """Return the rank that owns the slice that begins there."""
    owners = zip(job.cluster.roles.owners, job.shards, strict=True)
    return next(rank for rank, shard in owners if shard.size and shard.begin == begin)


def _checkpoint(job: Job) -> Checkpoint:
    assert job.checkpoint is not None, "nothing was saved"
    return job.checkpoint


def read_names(job: Job) -> tuple[str, ...]:
    """Names of what was saved in rounds, and is read."""
    if job.checkpoint is None:
        return ()
    saved, now = saved_config(job), job.config
    if not saved.in_rounds:
        return ()
    found = [name for name in names(job) if name in job.checkpoint.worker_names]
    if saved.powersgd_rank != now.powersgd_rank:
        found = [name for name in found if name != BASIS]
    return tuple(found)


def _dropped(job: Job) -> str:
    """Return the arrays or parameters that something was kept of, and for which nothing is now."""
    c, cluster = job.config, job.cluster
    if c.codec == "powersgd":
        ranks = saved_config(job).powersgd_rank, c.powersgd_rank
        before, now = (Factors.of(job.layout, job.dtype, rank).matrices for rank in ranks)
        return ", ".join(x.name for x in before if x.name not in {y.name for y in now})
    if _same_places(job):
        return ""
    none = unpacked(c, cluster.roles, cluster.node_of, job.shards)
    return f"parameters {none}" if none else ""


def _same_places(job: Job) -> bool:
    if job.checkpoint is None:
        return False
    world, cluster = job.checkpoint.state["world"], job.cluster
    before = list(world["servers"]), list(world["node_of"])
    return before == (list(cluster.roles.servers), list(cluster.node_of))


class RoundCheckpoints:
    """This rank's part in the checkpoints of a run, and on the coordinator, when they are due.

    Args:
        job: The run.
        rounds: Whose parameters, slots and own state are saved.
        log: Of the run.
        savers: Of what else this rank has.
    """

    def __init__(
        self, job: Job, rounds: Round, log: "Log", savers: Sequence[Snapshots] = ()
    ) -> None:
        self._job, self._cluster, self._rounds, self._log = job, job.cluster, rounds, log
        self._savers, self._evaluations = [*_savers(job, rounds), *savers], job.evaluations
        self._committer: Committer | None = None  # on the coordinator
        if job.place is not None:
            kept = names(job)
            ranks = range(self._cluster.world) if kept else None
            self._committer = Committer(job, job.place, log, kept, ranks)
            self._committer.saved_step = job.base_step if job.checkpoint else None
        self._period = job.config.checkpoint_period
        self._last = time.perf_counter(), job.base_step

    def wanted(self, step: int, epochs: float) -> tuple[bool, bool]:
        """Return whether a rank refused to save what is not finite, and whether one is due.

        Args:
            step: The next update.
            epochs: Epochs done with it.
        """
        c = self._committer
        return (False, False) if c is None else (c.refused, self._due(c, step, epochs))

    def _due(self, committer: Committer, step: int, epochs: float) -> bool:
        if committer.busy:
            return False
        if self._evaluations is not None and self._evaluations.due(epochs):
            return True
        if committer.failed_for(RETRY_S):
            return True
        seconds, steps = self._period
        then, saved = self._last
        due = seconds is not None and time.perf_counter() - then >= seconds
        return due or (steps is not None and step - saved >= steps)

    def save(self, step: int, samples: int, allocator: SampleAllocator) -> None:
        """Begin a checkpoint of a round's end. Collective: yes. Blocks: for a copy.

        Args:
            step: Updates applied.
            samples: Samples applied.
            allocator: Where the data is.
        """
        self._last = time.perf_counter(), step
        self._rounds.compare(step)
        skipped = self._skipped()
        if not self._savers:
            return
        self.finish()
        for saver in self._savers:
            saver.snapshot(step)
        if self._committer is not None:
            given = allocator.state()
            given["clocks"] *= len(self._cluster.roles.workers)
            state = self._job.state(step, given, samples, skipped)
            if self._evaluations is not None:
                state |= self._evaluations.at_snapshot(step, allocator.epochs_done)
            self._committer.open(step, state)
        self._cluster.wait(
            lambda: not self.attend() or not any(s.holds for s in self._savers), status_board.SAVE
        )

    def _skipped(self) -> dict[Range, int]:
        """Return how many updates were made without an array, the most on any rank.

        Collective: yes, where workers' programs may freeze any.
        """
        found: dict[Range, int] = {}
        if self._job.sets_rate:
            mine, wait = self._job.leaving.skipped, self._cluster.wait_request
            for of_rank in gather_polled(self._cluster.comm, mine, wait):
                found |= {array: max(n, found.get(array, 0)) for array, n in of_rank.items()}
        return found

    def save_last(self, step: int, samples: int, allocator: SampleAllocator) -> None:
        """Save the last state if that is not done, with several tries. Collective: yes."""
        for _ in range(LAST_TRIES):
            if not self._agree(lambda c: not (c.refused or c.has_saved(step))):
                return
            self._cluster.wait(lambda: not self._pauses(), status_board.SAVE)
            self.save(step, samples, allocator)
            self.finish()

    def refused(self) -> bool:
        """Whether a rank refused to save what is not finite. Collective: yes."""
        return self._agree(lambda committer: committer.refused)

    def _agree(self, ask: Callable[[Committer], bool]) -> bool:
        """Return what is so of the coordinator's checkpoints, on every rank. Collective: yes."""
        found = np.array([self._committer is not None and ask(self._committer)])
        coordinator = self._cluster.roles.coordinator
        self._cluster.wait_request(begin_broadcast(self._cluster.comm, found, coordinator))
        return bool(found[0])

    def _pauses(self) -> bool:
        """Whether a checkpoint has failed just now."""
        c = self._committer
        return c is not None and bool(c.failure) and not c.failed_for(LAST_PAUSE_S)

    def attend(self) -> bool:
        """Act on messages, get on with a checkpoint; returns whether one is under way here."""
        for _, kind, payload in self._cluster.poll():
            self._handle(kind, payload)
        busy = False
        for saver in self._savers:
            saver.poll()
            busy = busy or saver.busy
        if self._committer is not None:
            if self._committer.poll() and self._evaluations is not None:
                self._evaluations.saved(self._committer.saved_step)
            busy = busy or self._committer.busy
        return busy

    def finish(self) -> None:
        """Wait until none is under way here."""
        self._cluster.wait(lambda: not self.attend(), status_board.SAVE)

    def _handle(self, kind: str, payload: Any) -> None:
        committer = self._committer
        if kind == "write":
            for saver in self._savers:
                saver.write_into(payload)
        elif kind == "saved":
            for saver in self._savers:
                if isinstance(saver, Saver):
                    saver.committed(payload)
        elif kind == "shard" and committer is not None:
            committer.collect(*payload)
        elif kind == "own" and committer is not None:
            committer.collect_own(payload)
        else:
            assert kind in ("eval", "log"), f"unknown message {kind!r} in rounds"
            self._log.heard(kind, payload)

    def unsaved(self, step: int) -> str:
        """Return on the coordinator why update `step` is in no checkpoint; empty if it is."""
        c = self._committer
        return "" if c is None or c.has_saved(step) else f"{c.failure}; {c.kept}"

    def free(self) -> None:
        """Let go of what is saved; may be called twice."""
        self._savers = []


def _savers(job: Job, rounds: Round) -> list[Snapshots]:
    """Return what saves this rank's shard, and what it keeps between rounds."""
    found = list[Snapshots]()
    if job.cluster.rank in job.cluster.roles.owners:
        rows = rounds.tables.owned if rounds.tables is not None else None
        found.append(saver_of(job, rounds, rows))
    if (own := own_saver(job, rounds.own_state())) is not None:
        found.append(own)
    return found
