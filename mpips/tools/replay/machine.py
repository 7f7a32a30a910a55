"""Replay of one job: servers and workers in the recorded order.

A server applies its next push when that is computed, and when nobody is left who is to read the
version that it has. A worker reads each shard when that is at the version which its next push was
computed from; what it has read of all of them is what it computes from. The record is of something
that has happened, so one of them can always go on, and whoever goes on first, the bits are the
same. A worker holds no more vectors than it did then, but for pushes that wait for slow servers.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.datasets.ledger import Range
from mpips.errors import UserError
from mpips.optim import Ranges
from mpips.ps.shard import Server
from mpips.tables.server import evict_old
from mpips.tools.replay import compare
from mpips.tools.replay.parts import Made, Maker, Setting, make_memory, make_server
from mpips.tools.replay.server_file import damaged
from mpips.tools.replay.worker_process import Here, Memory, WorkerProcess

Kept = dict[int, list[np.ndarray]]  # parameters and slots of servers, by number


class Order:
    """The pushes of a recorded job that every server with a shard has recorded.

    Args:
        records: Of each server; empty for those without a shard.
        owning: The servers that have one.
        workers: Number of workers.
        base: The version that all shards began at.

    Attributes:
        complete: Of each worker, how many of its first pushes they are.
        at: By server and worker: which of the server's updates, from 0, each push is.
        reads: Likewise: the version of the server's shard that it was computed from.
        readers: By server: how many pushes were computed from each version, from `base` on.
    """

    def __init__(
        self, records: Sequence[np.ndarray], owning: Sequence[int], workers: int, base: int
    ) -> None:
        self.at = {k: _by_worker(records[k]["worker"], workers) for k in owning}
        self.complete = [
            min((len(self.at[k][w]) for k in owning), default=0) for w in range(workers)
        ]
        self.reads: dict[int, list[np.ndarray]] = {}
        self.readers: dict[int, np.ndarray] = {}
        for k in owning:
            stale = records[k]["stale"].astype("i8")
            self.reads[k] = [base + at - stale[at] for at in self.at[k]]
            each = zip(self.reads[k], self.complete, strict=True)
            read = np.concatenate([versions[:n] for versions, n in each]) - base
            self.readers[k] = np.bincount(read, minlength=len(records[k]) + 1)


class RowOrder:
    """Who read rows of which server at which version, and has not done so again yet.

    Args:
        reads: Of each server; see `Recorded.reads`.
        workers: Number of workers.
        base: The version that all servers began at.
    """

    def __init__(self, reads: Sequence[np.ndarray], workers: int, base: int) -> None:
        self._versions: list[list[list[int]]] = []  # by server and worker
        for each in reads:
            found = ((base + each["at"][each["worker"] == w]).tolist() for w in range(workers))
            self._versions.append([versions[::-1] for versions in found])

    def next(self, server: int, worker: int) -> int | None:
        """Return the version at which a worker's next read of a server's rows is; None if never."""
        versions = self._versions[server][worker]
        return versions[-1] if versions else None

    def take(self, server: int, worker: int) -> None:
        """Note that a worker has read."""
        self._versions[server][worker].pop()

    def drop(self, worker: int) -> None:
        """Leave out what a worker has read behind its last push."""
        for by_worker in self._versions:
            by_worker[worker].clear()

    def waits_at(self, server: int, version: int) -> bool:
        """Return whether somebody is still to read a server's rows at a version."""
        return any(v and v[-1] <= version for v in self._versions[server])


def _by_worker(numbers: np.ndarray, workers: int) -> list[np.ndarray]:
    """Return where in `numbers` each worker stands, in increasing order."""
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], np.arange(workers + 1))
    return [order[ends[w] : ends[w + 1]] for w in range(workers)]


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
        computed, batch, grad = self.source.advance(read), self._batch, self._grad
        if computed is None:
            return None
        assert batch is not None, "it has begun"
        self.computed += 1
        made = self.maker.make(self.computed, batch, self._replica, grad, computed)
        self.made[self.computed], self._batch = made, None
        self._replica, self._missing = self.maker.vector(), set(self._order.at)
        return made


class Replay:
    """The replay of one job.

    Args:
        setting: The job.
        saved: The checkpoints that it has saved, by step.

    Attributes:
        servers: Those that have a shard, by number.
        compared: Of each checkpoint's step, how many servers were compared with it.

    Raises:
        UserError: If data, model or checkpoint are not there, or others.
    """

    def __init__(self, setting: Setting, saved: Mapping[int, Checkpoint]) -> None:
        part = setting.part
        self._part, self._records, self._saved = part, part.records, saved
        ranks = part.about["workers"]
        self.job = setting.job(ranks[0])
        memory = make_memory(self.job)
        stores = [make_server(setting.job(rank), memory) for rank in part.about["world"]["servers"]]
        self.servers = {k: store for k, store in enumerate(stores) if not store.idle}
        self._order = Order(part.records, list(self.servers), len(ranks), part.base)
        self._rows = RowOrder([each.reads for each in part.servers], len(ranks), part.base)
        self._workers = list[Worker]()
        self._over = contextlib.ExitStack()
        self._begin(setting, memory)
        self._applied = {k: [0] * len(ranks) for k in self.servers}
        self._read = dict.fromkeys(self.servers, 0)  # workers' reads of the version that it has
        self._before = self.job.allocator().before
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
        each = self.servers.items()
        return {k: len(self._records[k]) - (s.version - self._part.base) for k, s in each}

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
            record = self._record(number, worker.computed)
            epoch, begin = int(record["epoch"]), int(record["begin"])
            worker.begin((epoch, begin, begin + int(record["samples"])))
        made = self._computed(number, worker) if worker.computing else None
        if made is None:
            return bool(read) or self._has_read_rows
        record = self._record(number, worker.computed - 1)
        push = f"push {worker.computed} of worker {number}"
        compare.loss(
            f"{push} ({batch_text(made.batch)})", made.computed.loss, float(record["loss"])
        )
        self._leave_alone(number, worker, made)
        self._compare_own(number, worker)
        return True

    def _record(self, number: int, at: int) -> np.void:
        """Return the record of a worker's push, from 0, which says what it was made of."""
        first = next(iter(self.servers))
        return self._records[first][self._order.at[first][number][at]]

    def _computed(self, number: int, worker: Worker) -> Made | None:
        """Get on with a worker's next push; returns it when it is there."""

        def read(k: int) -> bool:
            version, now = self._rows.next(k, number), self.servers[k].version
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

    def _leave_alone(self, number: int, worker: Worker, made: Made) -> None:
        """Tell the servers what a worker's pushes leave alone from this one on."""
        if made.computed.frozen != worker.frozen:
            worker.frozen = made.computed.frozen
            for store in self.servers.values():
                store.frozen.note(number, worker.computed, worker.frozen)

    def _compare_own(self, number: int, worker: Worker) -> None:
        """Compare what a worker keeps with the checkpoints that end with its last push."""
        for saved in self._saved.values() if worker.maker.packers else ():
            clocks, before = saved.state["allocator"]["clocks"], self._before
            if saved.worker_names and clocks[number] - before[number] == worker.computed:
                for packer in worker.maker.packers.values():
                    compare.own(self.job, number, packer, saved)

    def _advance_server(self, k: int, until: int | None, found: Kept) -> bool:
        moved = False
        while self._apply_next(k):
            moved = True
            self._reached(k, until, found)
        return moved

    def _apply_next(self, k: int) -> bool:
        """Apply a server's next push, if it may be; returns whether it was."""
        store, at = self.servers[k], self.servers[k].version - self._part.base
        if at == len(self._records[k]) or self._read[k] < self._order.readers[k][at]:
            return False
        if self._rows.waits_at(k, store.version):
            return False
        record = self._records[k][at]
        number, stale = int(record["worker"]), int(record["stale"])
        worker, seq = self._workers[number], self._applied[k][number] + 1
        made = worker.made.get(seq)
        if made is None:
            return False
        evicted = self._part.servers[k].evicted
        if store.rows is not None and at in evicted:
            evict_old(store.rows.tables, evicted[at])
        store.apply(worker.maker.push(made, seq, k, store.version - stale))
        self._applied[k][number], self._read[k] = seq, 0
        if all(applied[number] >= seq for applied in self._applied.values()):
            del worker.made[seq]
        what = f"push {seq} of worker {number} ({batch_text(made.batch)})"
        compare.line(self.job.layout, k, store, int(record["line"]), what)
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
