"""Replay of one job: servers and workers in the recorded order.

A server applies its next push when that is computed, and when nobody is left who is to read the
version that it has. A worker reads each shard when that is at the version which its next push was
computed from; what it has read of all of them is what it computes from. The record is of something
that has happened, so one of them can always go on, and whoever goes on first, the bits are the
same. A worker holds no more vectors than it did then, but for pushes that wait for slow servers.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.datasets.ledger import Range
from mpips.errors import UserError
from mpips.optim import Ranges
from mpips.ps.shard import Server
from mpips.tools.replay import compare
from mpips.tools.replay.order import Order, RowOrder
from mpips.tools.replay.parts import Made, Maker, Setting, make_memory, make_server
from mpips.tools.replay.server_file import damaged
from mpips.tools.replay.worker_process import Computed, Here, Memory, WorkerProcess
from mpips.transport.push import Push

Kept = dict[int, list[np.ndarray]]  # parameters and slots of servers, by number


class Worker:
    """What a worker reads, computes, and has not got rid of yet.

    Args:
        maker: Makes its pushes.
        source: Computes its gradients.
        number: Of the worker.
        order: Of the job's pushes.

    Attributes:
        made: By their numbers, the pushes that some server has not applied.
        computed: How many it has computed.
        frozen: What the last one leaves alone.
    """

    def __init__(
        self, maker: Maker, source: Here | WorkerProcess, number: int, order: Order
    ) -> None:
        self.maker, self.source, self._number, self._order = maker, source, number, order
        self.made: dict[int, Made] = {}
        self.computed = 0
        self.frozen: Ranges = ()
        self._replica, self._missing = maker.vector(), set(order.at)
        self._batch: Range | None = None
        self._grad = self._replica

    def read(self, servers: Mapping[int, Server]) -> list[int]:
        """Copy the shards that are at the versions which the next push needs; returns which."""
        if self.done or self.computing:
            return []
        reads, n = self._order.reads, self.computed
        found = [k for k in self._missing if reads[k][self._number][n] == servers[k].version]
        for k in found:
            np.copyto(self._replica[servers[k].shard.range], servers[k].params)
            self._missing.remove(k)
        return found

    @property
    def done(self) -> bool:
        """Whether all pushes are computed that every server has recorded."""
        return self.computed >= self._order.complete[self._number]

    @property
    def may_begin(self) -> bool:
        """Whether all shards are read that the next push needs."""
        return not (self._missing or self.done or self.computing)

    @property
    def computing(self) -> bool:
        """Whether a push is being computed."""
        return self._batch is not None

    def begin(self, batch: Range) -> None:
        """Begin to compute the next push."""
        self._batch, self._grad = batch, self.maker.vector()
        self.source.begin(self.computed + 1, batch, self._replica, self._grad)

    def advance(self, read: Callable[[int], bool]) -> Made | None:
        """Get on with it; returns the push, or None where `WorkerProcess.advance` does."""
        computed, batch = self.source.advance(read), self._batch
        assert batch is not None, "it has begun"
        return None if computed is None else self.take(batch, self._grad, computed)

    def take(self, batch: Range, grad: np.ndarray, computed: Computed) -> Made:
        """Take what was computed as the next push, and return that."""
        self.computed += 1
        made = self.maker.make(self.computed, batch, self._replica, grad, computed)
        self.made[self.computed], self._batch = made, None
        self._replica, self._missing = self.maker.vector(), set(self._order.at)
        return made


class Replay(ABC):
    """The replay of one job.

    Args:
        setting: The job.
        saved: The checkpoints that it has saved, by step.

    Attributes:
        order: What orders the pushes.
        servers: Those that have a shard, by number.
        compared: Of each checkpoint's step, how many servers were compared with it.

    Raises:
        UserError: If data, model or checkpoint are not there, or others.
    """

    order = Order

    def __init__(self, setting: Setting, saved: Mapping[int, Checkpoint]) -> None:
        part = setting.part
        self._part, self._records, self._saved = part, part.records, saved
        ranks = part.about["workers"]
        self.job = setting.job(ranks[0])
        memory = make_memory(self.job)
        stores = [make_server(setting.job(rank), memory) for rank in part.about["world"]["servers"]]
        self.servers = {k: store for k, store in enumerate(stores) if not store.idle}
        self._order = self.order(part.records, list(self.servers), len(ranks), part.base)
        self._rows = RowOrder([each.reads for each in part.servers], len(ranks), part.base)
        self._workers = list[Worker]()
        self._over = contextlib.ExitStack()
        self._begin(setting, memory)
        self._applied = {k: [0] * len(ranks) for k in self.servers}
        self._read = dict.fromkeys(self.servers, 0)  # workers' reads of the version that it has
        self.compared: dict[int, int] = {}
        self._has_read_rows = False
        for number, worker in enumerate(self._workers):
            if worker.done:
                self._rows.drop(number)

    def _begin(self, setting: Setting, memory: Memory) -> None:
        """Make the workers, each with a model of its own."""
        loader = setting.loader(self.job)
        with contextlib.ExitStack() as over:
            if loader is not None:
                over.enter_context(loader)
            for number, rank in enumerate(self._part.about["workers"]):
                job = setting.job(rank)
                source = Here(job, loader) if loader is not None else setting.apart(job, memory)
                over.callback(source.end)
                self._workers.append(Worker(Maker(job), source, number, self._order))
            self._over = over.pop_all()

    def run(self, until: int | None = None) -> Kept:
        """Go on to the end, or until every server has been at version `until`.

        Returns:
            Copies of parameters and slots of each server at that version, or the live ones at the
            end.

        Raises:
            UserError: For the first thing that differs from the run, with exit code 1. If records
                are lost that are needed to get to `until`.

        Blocks: as long as the job has computed, of all workers.
        """
        found: Kept = {}
        with self._over:
            for k in self.servers:
                self._reached(k, until, found)
            while len(found) < len(self.servers):
                moved = [self._advance_worker(w) for w in range(len(self._workers))]
                moved.append(self._advance_round(until, found))
                moved += [self._advance_server(k, until, found) for k in self.servers]
                if not any(moved):
                    break
        self._check_end(found, until)
        if until is not None and len(found) < len(self.servers):
            reached = min(store.version for store in self.servers.values())
            remedy = f"records behind it are lost: use --until {reached}"
            raise UserError(f"--until {until}", "an update that all servers come to", remedy)
        return found or {k: [store.params, *store.slots] for k, store in self.servers.items()}

    @property
    def left(self) -> dict[int, int]:
        """How many records of each server were not reached: others were lost that they need."""
        return {k: len(self._records[k]) - self._pushes(k) for k in self.servers}

    def _pushes(self, k: int) -> int:
        """Return how many pushes a server has applied."""
        return sum(self._applied[k])

    def _check_end(self, found: Mapping[int, object], until: int | None) -> None:
        complete = sum(self._order.complete)  # behind others a push may wait for one that is lost
        left = any(self.left.values()) and all(len(self._records[k]) == complete for k in self.left)
        beyond = any(self.compared.get(step) != len(self.servers) for step in self._saved)
        if not found and (left or (beyond and until is None)):
            got = f"{self._part.folder}: no recorded push can be applied next"
            raise damaged(got, "the order of a run")

    def _advance_worker(self, number: int) -> bool:
        worker, self._has_read_rows = self._workers[number], False
        read = worker.read(self.servers)
        for k in read:
            self._read[k] += 1
        if worker.may_begin:
            self._begin_push(number, worker, self._order.record(number, worker.computed))
        made = self._computed(number, worker) if worker.computing else None
        if made is None:
            return bool(read) or self._has_read_rows
        record = self._order.record(number, worker.computed - 1)
        push = f"push {worker.computed} of worker {number}"
        compare.loss(
            f"{push} ({batch_text(made.batch)})", made.computed.loss, float(record["loss"])
        )
        self._take(number, worker, made)
        return True

    @abstractmethod
    def _begin_push(self, number: int, worker: Worker, record: np.void) -> None:
        """Begin a worker's next push, of which that is recorded."""

    @abstractmethod
    def _take(self, number: int, worker: Worker, made: Made) -> None:
        """Note a worker's push, which is computed."""

    def _advance_round(self, until: int | None, found: Kept) -> bool:
        """Make the update of a round, if there are rounds; returns whether it was made."""
        return False

    @abstractmethod
    def _apply(self, k: int, push: Push, at: int) -> None:
        """Apply a push to a server that has applied `at` before."""

    def _computed(self, number: int, worker: Worker) -> Made | None:
        """Get on with a worker's next push; returns it when it is there."""

        def read(k: int) -> bool:
            version, now = self._rows.next(k, number), self._part.base + self._pushes(k)
            if version is None or version < now:
                push = f"push {worker.computed + 1} of worker {number}"
                run = "at no version of it" if version is None else f"at version {version}"
                raise compare.differing(f"{push} reads rows of server {k}, which", f"at {now}", run)
            if version == now:
                self._rows.take(k, number)
                self._has_read_rows = True
            return version == now

        made = worker.advance(read)
        if worker.done:
            self._rows.drop(number)
        return made

    def _advance_server(self, k: int, until: int | None, found: Kept) -> bool:
        moved = False
        while self._apply_next(k):
            moved = True
            self._reached(k, until, found)
        return moved

    def _apply_next(self, k: int) -> bool:
        """Apply a server's next push, if it may be; returns whether it was."""
        store, at = self.servers[k], self._pushes(k)
        if at == len(self._records[k]) or self._read[k] < self._order.readers[k][at]:
            return False
        if self._rows.waits_at(k, self._part.base + at):
            return False
        record = self._records[k][at]
        number, stale = int(record["worker"]), int(record["stale"])
        worker, seq = self._workers[number], self._applied[k][number] + 1
        made = worker.made.get(seq)
        if made is None:
            return False
        push = worker.maker.push(made, seq, k, store.version - stale)
        self._apply(k, push, at)
        self._applied[k][number], self._read[k] = seq, 0
        if all(applied[number] >= seq for applied in self._applied.values()):
            del worker.made[seq]
        what = f"push {seq} of worker {number} ({batch_text(made.batch)})"
        args = push, self._part.base + at + 1, int(record["line"]), what, self._part.in_rounds
        compare.line(self.job.layout, k, store, *args)
        return True

    def _reached(self, k: int, until: int | None, found: Kept) -> None:
        """Compare a server with a checkpoint of its version, and keep it if that is asked for."""
        store = self.servers[k]
        saved = self._saved.get(store.version)
        if saved is not None:
            compare.shard(self.job, k, store, saved)
            if store.rows is not None:
                compare.rows(k, store.rows, saved)
            self.compared[store.version] = self.compared.get(store.version, 0) + 1
        if store.version == until:
            found[k] = [array.copy() for array in (store.params, *store.slots)]


def batch_text(batch: Range) -> str:
    """Return which samples a push was made of, in words."""
    epoch, begin, end = batch
    return f"samples {begin} to {end - 1} of epoch {epoch}"
