"""Replay of one job: servers and workers in the recorded order.

A worker reads each shard at the version from which its next push was computed, and computes the
push from all shards. A server applies its next push when the push is computed, and no worker must
still read the server's current version. Since the recorded order is possible, some worker or server
can always continue, and the bits do not depend on which continues first. A worker needs as much
memory as in the run, except for pushes that wait for slow servers.
"""

import contextlib
from collections.abc import Callable, Mapping

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.datasets.ledger import Range
from mpips.errors import UserError
from mpips.optim import Ranges
from mpips.ps.shard import Server
from mpips.tables.server import evict_old
from mpips.tools.replay import compare
from mpips.tools.replay.order import Order, RowOrder
from mpips.tools.replay.parts import MadePush, PushMaker, Setting, make_memory, make_server
from mpips.tools.replay.server_file import damaged
from mpips.tools.replay.worker_process import Computed, InProcess, Memory, WorkerProcess
from mpips.transport.push import Push

State = dict[int, list[np.ndarray]]  # parameters and slots by server


class Worker:
    """A worker of the replay: its replica, its next push, and pushes that servers must still apply.

    Args:
        maker: Packs the worker's pushes.
        source: Computes the worker's gradients.
        number: Number of the worker.
        order: Order of the job's pushes.

    Attributes:
        made: Pushes that at least one server has not applied yet, by number.
        computed: Number of computed pushes.
        frozen: Ranges of parameters that are frozen in the last push.
    """

    def __init__(
        self, maker: PushMaker, source: InProcess | WorkerProcess, number: int, order: Order
    ) -> None:
        self.maker, self.source, self._number, self._order = maker, source, number, order
        self.made: dict[int, MadePush] = {}
        self.computed = 0
        self.frozen: Ranges = ()
        self._replica, self._missing = maker.vector(), set(order.at)
        self._batch: Range | None = None
        self._grad = self._replica

    def read(self, servers: Mapping[int, Server]) -> list[int]:
        """Copy the shards whose version the next push needs, and return their servers' numbers."""
        if self.done or self.computing:
            return []
        reads, n = self._order.reads, self.computed
        ready = [k for k in self._missing if reads[k][self._number][n] == servers[k].version]
        for k in ready:
            np.copyto(self._replica[servers[k].shard.range], servers[k].params)
            self._missing.remove(k)
        return ready

    @property
    def done(self) -> bool:
        """Whether the worker has computed all pushes that every server has recorded."""
        return self.computed >= self._order.complete[self._number]

    @property
    def may_begin(self) -> bool:
        """Whether the worker has read all shards for its next push."""
        return not (self._missing or self.done or self.computing)

    @property
    def computing(self) -> bool:
        """Whether the worker is computing a push."""
        return self._batch is not None

    def begin(self, batch: Range) -> None:
        """Start to compute the next push."""
        self._batch, self._grad = batch, self.maker.vector()
        self.source.begin(self.computed + 1, batch, self._replica, self._grad)

    def advance(self, read: Callable[[int], bool]) -> MadePush | None:
        """Continue to compute; returns the push, or None where `WorkerProcess.advance` does."""
        computed, batch = self.source.advance(read), self._batch
        assert batch is not None, "a push was started"
        return None if computed is None else self.take(batch, self._grad, computed)

    def take(self, batch: Range, grad: np.ndarray, computed: Computed) -> MadePush:
        """Add a computed gradient as the next push, and return the push."""
        self.computed += 1
        made = self.maker.make(self.computed, batch, self._replica, grad, computed)
        self.made[self.computed], self._batch = made, None
        self._replica, self._missing = self.maker.vector(), set(self._order.at)
        return made


class Replay:
    """Replay of one job whose servers apply each push on arrival.

    Args:
        setting: Inputs of the job.
        saved: Checkpoints of the job, by step.

    Attributes:
        order: Class of the order of pushes.
        servers: Servers with a shard, by number.
        compared: Number of servers compared with each checkpoint, by step.

    Raises:
        UserError: If data, model or checkpoint are missing or not those of the job.
    """

    order = Order

    def __init__(self, setting: Setting, saved: Mapping[int, Checkpoint]) -> None:
        part = setting.part
        self._part, self._saved = part, saved
        ranks = part.about["workers"]
        self.job = setting.job(ranks[0])
        memory = make_memory(self.job)
        stores = [make_server(setting.job(rank), memory) for rank in part.about["world"]["servers"]]
        self.servers = {k: store for k, store in enumerate(stores) if not store.idle}
        self._order, self._rows = self.order(part, list(self.servers)), RowOrder(part)
        self._workers = list[Worker]()
        self._cleanup = contextlib.ExitStack()
        self._begin(setting, memory)
        self._applied = {k: [0] * len(ranks) for k in self.servers}
        self._read = dict.fromkeys(self.servers, 0)  # reads of the server's current version
        self.compared: dict[int, int] = {}
        self._has_read_rows = False
        self._until: int | None = None
        self._state: State = {}
        self._clocks_before = self.job.allocator().before
        for number, worker in enumerate(self._workers):
            if worker.done:
                self._rows.drop(number)

    def _begin(self, setting: Setting, memory: Memory) -> None:
        """Create the workers, each with its own model."""
        loader = setting.loader(self.job)
        with contextlib.ExitStack() as cleanup:
            if loader is not None:
                cleanup.enter_context(loader)
            for number, rank in enumerate(self._part.about["workers"]):
                job = setting.job(rank)
                source = InProcess(job, loader) if loader is not None else setting.fork(job, memory)
                cleanup.callback(source.end)
                self._workers.append(Worker(PushMaker(job), source, number, self._order))
            self._cleanup = cleanup.pop_all()

    def run(self, until: int | None = None) -> State:
        """Replay the job to its end, or until every server has reached version `until`.

        Returns:
            Copies of each server's parameters and slots at version `until`, or their final arrays.

        Raises:
            UserError: At the first difference from the run (exit code 1), or if records that the
                replay needs to reach `until` are lost.

        Blocks: for the sum of the workers' computing times.
        """
        self._until = until
        with self._cleanup:
            for k in self.servers:
                self._reached(k)
            while len(self._state) < len(self.servers):
                moved = [self._advance_worker(w) for w in range(len(self._workers))]
                moved.append(self._advance_round())
                moved += [self._apply_next(k) for k in self.servers]
                if not any(moved):
                    break
        self._check_end()
        if until is not None and len(self._state) < len(self.servers):
            reached = min(store.version for store in self.servers.values())
            remedy = f"records behind it are lost: use --until {reached}"
            raise UserError(f"--until {until}", "an update that all servers come to", remedy)
        return self._state or {k: [s.params, *s.slots] for k, s in self.servers.items()}

    @property
    def left(self) -> dict[int, int]:
        """Number of each server's records not replayed, since records that they need are lost."""
        return {k: len(self._part.records[k]) - self._pushes(k) for k in self.servers}

    def _pushes(self, k: int) -> int:
        """Return the number of pushes that a server has applied."""
        return sum(self._applied[k])

    def _check_end(self) -> None:
        complete = sum(self._order.complete)  # if records are lost, later pushes may lack others
        records = self._part.records
        left = any(self.left.values()) and all(len(records[k]) == complete for k in self.left)
        beyond = any(self.compared.get(step) != len(self.servers) for step in self._saved)
        if not self._state and (left or (beyond and self._until is None)):
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

    def _begin_push(self, number: int, worker: Worker, record: np.void) -> None:
        """Start a worker's next push, which has this record."""
        epoch, begin = int(record["epoch"]), int(record["begin"])
        worker.begin((epoch, begin, begin + int(record["samples"])))

    def _take(self, number: int, worker: Worker, made: MadePush) -> None:
        """Add a worker's computed push."""
        if made.computed.frozen != worker.frozen:  # its later pushes leave these parameters alone
            worker.frozen = made.computed.frozen
            for store in self.servers.values():
                store.frozen.note(number, worker.computed, worker.frozen)
        # The state of its codec is in each checkpoint of which this push is the worker's last one.
        for saved in self._saved.values() if worker.maker.packers else ():
            clocks, before = saved.state["allocator"]["clocks"], self._clocks_before
            if saved.worker_names and clocks[number] - before[number] == worker.computed:
                for packer in worker.maker.packers.values():
                    compare.own(self.job, number, packer, saved)

    def _advance_round(self) -> bool:
        """Make the update of a round if the job has rounds; returns whether it was made."""
        return False

    def _apply(self, k: int, push: Push, at: int) -> None:
        """Apply a push to a server, as its update number `at`, from 0."""
        store, evicted = self.servers[k], self._part.servers[k].evicted
        if store.rows is not None and at in evicted:
            evict_old(store.rows.tables, evicted[at])
        store.apply(push)

    def _computed(self, number: int, worker: Worker) -> MadePush | None:
        """Continue a worker's next push; returns the push when it is computed."""

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

    def _apply_next(self, k: int) -> bool:
        """Apply a server's next push if possible; returns whether it was applied."""
        store, at = self.servers[k], self._pushes(k)
        if at == len(self._part.records[k]) or self._read[k] < self._order.readers[k][at]:
            return False
        if self._rows.waits_at(k, self._part.base + at):
            return False
        record = self._part.records[k][at]
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
        version, run = self._part.base + at + 1, int(record["line"])
        compare.line(self.job, k, store, push, version, run, what)
        self._reached(k)
        return True

    def _reached(self, k: int) -> None:
        """Compare a server with a checkpoint of its version; copy its state at the last one."""
        store = self.servers[k]
        saved = self._saved.get(store.version)
        if saved is not None:
            compare.shard(self.job, k, store, saved)
            if store.rows is not None:
                compare.rows(k, store.rows, saved)
            self.compared[store.version] = self.compared.get(store.version, 0) + 1
        if store.version == self._until:
            self._state[k] = [array.copy() for array in (store.params, *store.slots)]


def batch_text(batch: Range) -> str:
    """Return the samples of a push as text."""
    epoch, begin, end = batch
    return f"samples {begin} to {end - 1} of epoch {epoch}"
