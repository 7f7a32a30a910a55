"""Embedding tables of mode hybrid: pushes of rows, applied as they come.

The parameters are updated in rounds (`mpips.rounds`), and rows as in mode async. Each worker pushes
the rows of its part of a round once it has computed them. Each server applies the pushes one by
one, and a read returns a row's present value. No round waits for rows. Let s be the staleness
bound. Before a worker computes round k, the servers of its node must have applied the rows of all
rounds up to k - 1 - s. Remote servers answer its reads once they have. With s = 0 rows are
asynchronous only within a round.

Pushes are numbered as rounds. A server applies no push of a round later than its own. So when it
has applied all pushes of its round, its rows contain exactly the pushes up to this round, as the
parameters do. It reaches this state before a checkpoint, before rows are evicted, and at the end.
Workers wait for it before they evaluate.

A dead worker has announced the rows of some rounds, and announces no more. Once a server has
applied all of them, it sets the worker's entry in its ledger to `ALL_ROUNDS`. Then no rank waits
for this worker.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from mpips.datasets.ledger import Range, epochs_over
from mpips.health import status_board
from mpips.kernels.atomics import observe
from mpips.kernels.exchange import reached
from mpips.kernels.vectors import addresses_of
from mpips.layout import Shard
from mpips.mpi.start import Request
from mpips.mpi.waiting import Background
from mpips.mpi.window import Window
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.ps.assemble import ServerHalf, WorkerHalf, assemble
from mpips.ps.design import Design
from mpips.tables.server import OwnedRows, OwnerTables, evict_old, fill_tables
from mpips.transport.push import Push
from mpips.transport.push_sender import PUSHED, Announced

if TYPE_CHECKING:
    from mpips.rounds.base import Transfers
    from mpips.tables.step_rows import StepRows

ALL_ROUNDS = 1 << 62


class HybridTables:
    """Tables of a job at one rank; see `mpips.tables.rounds.RoundTables`.

    Args:
        job: The run, with tables.
        transfers: Counts bytes and waiting.

    Attributes:
        design: Design of the store.
        rows: Reads and pushes rows on a worker; None on servers.
        owned: Pushes of a server's rows; None on workers.
        owner: Rows of a server; None on workers.
    """

    rows: "StepRows | None" = None
    owned: "PushedRows | None" = None
    owner: OwnerTables | None = None

    def __init__(self, job: Job, transfers: "Transfers") -> None:
        tables, none = tables_of(job), tuple(Shard(0, 0) for _ in job.shards)
        # The rounds have the parameters, so the store has empty shards.
        kept = job.config.on_death == "shrink" and job.cluster.nodes > 1
        self.design = dataclasses.replace(Design.of(job), shards=none, kept=kept)
        self._half = half = assemble(job.cluster, self.design)
        self._over = epochs_over(job.allocator())
        self._evicts = any(table.table.evict_after is not None for table in tables)
        self._worker: _Worker | None = None
        if isinstance(half, WorkerHalf):
            self._worker = _Worker(job, half, transfers)
            self.rows = half.rows
        else:
            self.owner, self.owned = half.server.rows, PushedRows(job, half, transfers)
            job.cluster.serving = self.owned.serve
            half.open(job.cluster.wait_request)
        self._cluster = job.cluster

    @property
    def window(self) -> Window:
        """Memory that the ranks of this node share."""
        return self._half.window

    @property
    def pusher(self) -> "_Worker":
        """The object that pushes a worker's rows."""
        assert self._worker is not None, "a server pushes none"
        return self._worker

    @property
    def distance_max(self) -> int:
        """Largest number of rounds that a read lacked, as far as this rank knows."""
        return self.owned.distance_max if self.owned is not None else self.pusher.distance_max

    def serving(self) -> AbstractContextManager[None]:
        """Return a context that progresses messages while this rank computes."""
        return nullcontext() if self._worker is None else self._worker.serving()

    def of_epoch(self, epoch: int, over: int) -> bool:
        """See `mpips.tables.rounds.RoundTables.of_epoch`."""
        ends = self._evicts and over > self._over
        self._over = over
        if self.owned is not None:
            self.owned.next_round(over if ends else None)
        return ends

    def begin(self, step: int) -> list[Request]:
        """See `mpips.tables.rounds.RoundTables.begin`: rows are already on their way."""
        return []

    def end(self, step: int) -> None:
        """See `mpips.tables.rounds.RoundTables.end`: each step sets its own requirement."""

    def settle(self, step: int) -> None:
        """See `mpips.tables.rounds.RoundTables.settle`."""
        (self.owned or self.pusher).settle(step)

    def find(self, rank: int, step: int) -> Push | None:
        """Return the push of a worker of this node for a round, the last one that it has computed.

        Args:
            rank: Rank of the worker.
            step: The round.

        Returns:
            The push of the header, without gradients; None if it is not announced.
        """
        worker = self._cluster.roles.workers.index(rank)
        announced = Announced.of(self._half.window, worker, rank)
        if observe(announced.words, PUSHED) < step:
            return None
        return Push.unpack(announced.header(step, 0), np.zeros(0))

    def free(self) -> None:
        """Free the window; may be called twice. Collective: yes."""
        self._cluster.serving = None
        if self.owned is not None:
            assert isinstance(self._half, ServerHalf), "who owns rows serves them"
            self._half.close()
            if (recorder := self._half.server.recorder) is not None:
                recorder.close()
        elif self._worker is not None:
            self._worker.free()
        self.rows = self.owned = self.owner = self._worker = None
        self._half.free()


class _Worker:
    """A worker's rows in rounds. Collective: no.

    Args:
        job: The run.
        half: This worker's half of the store.
        transfers: Counts bytes.

    Attributes:
        distance_max: See `HybridTables`; for the servers of this node.
    """

    def __init__(self, job: Job, half: WorkerHalf, transfers: "Transfers") -> None:
        assert half.rows is not None, "a job with tables has them"
        self._job, self._half, self._transfers = job, half, transfers
        self._cluster, self._rows, self._bound = job.cluster, half.rows, job.config.bound
        half.sender.begin_at(job.base_step)
        servers = job.cluster.roles.servers
        local = [rank for rank in servers if job.cluster.is_local(rank)]
        workers, view = range(len(job.cluster.roles.workers)), half.window.view
        each = [addresses_of((view(rank, "applied") for rank in local), w) for w in workers]
        self._applied = np.concatenate(each)
        self._versions = np.zeros(len(servers), np.int64)
        self._background: Background | None = None
        if len(local) < len(servers):
            self._background = Background(half.advance)
            half.rows.alone = self._background.paused
        half.rows.reads_ahead &= self._bound > 0  # else the rows would lack the step in work
        half.rows.later = 1
        self.distance_max = 0

    def serving(self) -> AbstractContextManager[None]:
        """See `HybridTables.serving`."""
        return self._background if self._background and self._half.under_way() else nullcontext()

    def begin_step(self, step: int) -> float:
        """Wait until rows may be read and written for the round after round `step`.

        Returns:
            Seconds waited.
        """
        waited_s = self._cluster.wait(lambda: self.may_begin(step), status_board.CLOCKS)
        self._rows.want(step - self._bound, step)
        while not reached(self._applied, step - self.distance_max, 0):
            self.distance_max += 1
        return waited_s

    def may_begin(self, step: int) -> bool:
        """Return whether `begin_step` need not wait. Blocks: no."""
        return self._half.writable(step + 1) and bool(reached(self._applied, step - self._bound, 0))

    def push(self, batch: Range, samples: int, loss: float, share: float) -> None:
        """Announce the rows of this worker's part of a round. Blocks: no.

        Args:
            batch: Its part of the round.
            samples: Number of samples that it has computed.
            loss: Their mean loss.
            share: Share of the samples in the round's samples; the weight of its gradients.
        """
        if share != 1.0:
            self._rows.scale(share)
        sender = self._half.sender
        before = sender.push_sender.bytes_sent
        factor = self._job.rate_factor * self._job.lr_scale
        sender.push(batch, samples, loss, self._versions, factor=factor)
        self._transfers.bytes_sent += sender.push_sender.bytes_sent - before

    def settle(self, step: int) -> None:
        """See `HybridTables.settle`. Blocks: until then."""
        self._rows.abandon()
        self._rows.end()
        self._rows.want(step, ~step)  # for no step: see `PushedRows._holds`
        self._cluster.wait(lambda: reached(self._applied, step, 0), status_board.CLOCKS)

    def free(self) -> None:
        """End the thread; may be called twice."""
        if self._background is not None:
            self._background.end()


class PushedRows:
    """Rows of one server, and the pushes of them. Collective: no.

    Args:
        job: The run.
        half: The server's half of the store.
        transfers: Counts waiting and the time of updates.

    Attributes:
        distance_max: See `HybridTables`; for reads from other nodes.
        between: Called between two pushes, wherever this rank waits.
    """

    between: Callable[[], object] | None = None

    def __init__(self, job: Job, half: ServerHalf, transfers: "Transfers") -> None:
        rows = half.server.rows
        assert rows is not None, "a job with tables has them"
        self._rows: OwnedRows = rows
        self._receiver, self._server, self._transfers = half.receiver, half.server, transfers
        self._filled = self._serving = False
        workers = len(job.cluster.roles.workers)
        for worker in range(workers):
            self._server.note(worker, job.base_step)
        self._server.version = job.base_step
        self._limit = np.full(workers, job.base_step)  # number of this rank's round
        self._over: int | None = None
        self.distance_max = 0
        rows.answer_when(self._holds)
        if job.config.record:
            from mpips.ps.replay_log import recorder_of

            self._server.recorder = recorder_of(job, half)

    def fill(self, job: Job) -> None:
        """Fill the rows from the run's checkpoint, and allow reads of them.

        Raises:
            UserError: If the checkpoint cannot be read.
        """
        fill_tables(self._rows.tables, job.checkpoint)
        self._filled = True

    def _holds(self, rank: int, needed: int, before: int) -> bool:
        """Return whether a remote worker may read: the pushes of enough rounds are applied.

        Args:
            rank: Rank of the worker.
            needed: Number of rounds that the rows must contain.
            before: Number of rounds before the read's round; inverted if the read is for no step.
        """
        before = max(before, ~before)
        applied = int(self._server.applied.min())
        evicts = self._over is not None and before >= self._limit[0]  # before that round
        if not self._filled or needed > applied or evicts:
            return False
        self.distance_max = max(self.distance_max, before - applied)
        return True

    def next_round(self, over: int | None) -> None:
        """Allow the pushes of the next round.

        Args:
            over: Number of epochs that end with the round, if it evicts old rows.
        """
        self._limit += 1
        self._over = over

    def serve(self) -> bool:
        """Apply a push if one is here, and answer reads. Blocks: no.

        Returns:
            Whether there was a push.
        """
        if self._serving:  # an update enters MPI, which calls this again
            return False
        self._serving = True
        try:
            if self.between is not None:
                self.between()
            if (push := self._receiver.take(self._limit)) is not None:
                start = perf_counter()
                self._rows.apply(push, push.seq, 0)
                self._server.note(push.worker, push.seq)
                self._transfers.busy_s += perf_counter() - start
                if (recorder := self._server.recorder) is not None:
                    recorder.note(push, self._server.version + recorder.pushes, 0)
            self._server.serve_reads()
            return push is not None
        finally:
            self._serving = False

    def settle(self, step: int) -> None:
        """See `HybridTables.settle`. Blocks: until all pushes of this round are applied."""
        assert self._limit[0] == step, "pushes of a later round may be applied"
        self._transfers.wait_until(lambda: not self.serve() and self._server.applied.min() >= step)
        if self._server.recorder is not None:
            self._server.recorder.flush()

    def lose(self, rank: int, worker: int) -> int:
        """Drop a dead remote worker's unfinished messages; returns its number of pushes here."""
        self._receiver.acknowledged.lose(rank)
        return self._receiver.acknowledged.received(worker)

    def leave_out(self, last: Mapping[int, int]) -> None:
        """Stop waiting for dead workers, once all their announced pushes are applied.

        Args:
            last: Last announced round of each dead worker; not later than this rank's round.

        Blocks: until then; does not depend on other ranks.
        """
        self._transfers.wait_until(
            lambda: not self.serve() and all(self._server.ledger[w] >= last[w] for w in last)
        )
        for worker in last:
            self._server.note(worker, ALL_ROUNDS)

    def collect(self, step: int, weights: np.ndarray) -> None:
        """Apply all rows of round `step` if it evicts old rows. Blocks: until then."""
        if self._over is not None:
            self.settle(step)

    def apply(self, step: int, factor: float) -> None:
        """End round `step`: evict old rows, if it is the last of an epoch."""
        if self._over is not None and not evict_old(self._rows.tables, self._over):
            raise AssertionError("rows are evicted while a checkpoint is being written")
        self._over = None
