"""Replay of a job in mode hybrid: rounds, and pushes of rows.

A round takes one push of each worker, and needs no record: its batch is the next one, and its sum
is made in the order of workers and nodes. The record says when rows were read and in which order
servers applied pushes of them; these may be of several rounds. A server has applied those of the
rounds up to a checkpoint, and no others, when it is saved, and likewise before old rows are
evicted: no round after that begins here before all servers have come to it.
"""

from collections.abc import Mapping

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.datasets.ledger import EXHAUSTED, Range, epochs_over, split
from mpips.kernels.vectors import addresses_of, sum_rows
from mpips.optim import common
from mpips.planning.tables import tables_of
from mpips.rounds.base import ShardUpdate, Transfers
from mpips.tables.server import evict_old
from mpips.tools.replay import compare
from mpips.tools.replay.machine import Kept, Replay, Worker, batch_text
from mpips.tools.replay.order import RoundOrder
from mpips.tools.replay.parts import Made, Setting
from mpips.tools.replay.record import Part
from mpips.tools.replay.worker_process import Computed
from mpips.transport.push import Push
from mpips.transport.rows import Section


class RoundReplay(Replay):
    """The replay of one job in mode hybrid; see `mpips.tools.replay.machine.Replay`.

    Args:
        setting: The job.
        saved: The checkpoints that it has saved, by step.

    Raises:
        UserError: If data, model or checkpoint are not there, or others.
    """

    order = RoundOrder

    def __init__(self, setting: Setting, saved: Mapping[int, Checkpoint]) -> None:
        super().__init__(setting, saved)
        job, self._count = self.job, len(self._workers)
        transfers, stores = Transfers(job.cluster), self.servers
        self._updates = {
            k: ShardUpdate(
                job, store.shard, job.rule, store.params, store.slots,
                np.zeros(store.shard.size, job.dtype), transfers,
            )
            for k, store in stores.items()
        }  # fmt: skip
        ranks = job.cluster
        self._node_of = [ranks.node_of[rank] for rank in ranks.roles.servers]
        self._nodes = dict[int, list[int]]()  # the workers of each, where there are any
        places = sorted((ranks.node_of[rank], w) for w, rank in enumerate(ranks.roles.workers))
        for node, worker in places:
            self._nodes.setdefault(node, []).append(worker)
        self._allocator = job.allocator()
        self._epochs_over = epochs_over(self._allocator)
        self._evicts = any(table.table.evict_after is not None for table in tables_of(job))
        self._evictions = dict[int, int]()  # by step, the epochs that were over
        self._batch = self._next_batch()
        self._made = dict[int, Made]()  # of the round, by worker

    def _next_batch(self) -> Range:
        return self._allocator.next(0) or EXHAUSTED

    def _begin_push(self, number: int, worker: Worker, record: np.void) -> None:
        mine = split(self._batch, self._count)[number]
        place = int(record["epoch"]), int(record["begin"])
        if place != mine[:2]:
            push = f"push {worker.computed + 1} of worker {number}"
            raise compare.differing(f"first difference: {push}", batch_text(mine), place)
        if record["samples"]:
            worker.begin(self._batch)
            return
        none = tuple(
            Section(np.zeros(0, np.int64), np.zeros((0, table.dim), self.job.dtype))
            for table in tables_of(self.job)
        )
        computed = Computed(0.0, 1.0, worker.frozen, (none,) * len(self.servers))
        self._take(number, worker, worker.take(self._batch, worker.maker.vector(), computed))

    def _take(self, number: int, worker: Worker, made: Made) -> None:
        worker.frozen = made.computed.frozen
        self._made[number] = made

    def _advance_round(self, until: int | None, found: Kept) -> bool:
        """Make the update of the round, if all workers have come to it, and servers may go on."""
        step = next(iter(self.servers.values())).version
        stops = step in self._saved or step in self._evictions
        if len(self._made) < self._count or (stops and min(map(self._beyond, self.servers)) < 0):
            return False
        self._update(step + 1)
        self._end_round(step + 1)
        for k, store in self.servers.items():
            self._reached(k, until, found)
            if step + 1 == until:  # whatever it has applied of rows
                found[k] = [array.copy() for array in (store.params, *store.slots)]
        return True

    def _update(self, step: int) -> None:
        """Make update `step` of the parameters; see `mpips.rounds.reduction` for the order."""
        leaving, n = self.job.leaving, self._batch[2] - self._batch[1]
        if leaving.leave(common(worker.frozen for worker in self._workers)):
            for update in self._updates.values():
                update.cut(leaving.rule)
        leaving.count()
        samples = [end - begin for _, begin, end in split(self._batch, self._count)]
        weights, sums, rate = np.array(samples) / n, dict[int, np.ndarray](), 0.0
        for node, workers in self._nodes.items():
            rate += sum((self._made[w].computed.factor - 1) * samples[w] / n for w in workers)
            sums[node] = self._workers[0].maker.vector()
            sum_rows(self._addresses(workers), weights[workers], 0, sums[node])
        for k, update in self._updates.items():
            update.apply(step, 1 + rate, self._sources(self._node_of[k], weights, sums))
            self.servers[k].version = step

    def _addresses(self, workers: list[int]) -> np.ndarray:
        return addresses_of(self._made[w].grad for w in workers)

    def _sources(
        self, node: int, weights: np.ndarray, sums: Mapping[int, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what an owner of a node sums: its workers' gradients, and other nodes' sums."""
        rows, shares = list[np.ndarray](), list[np.ndarray]()
        for other in sums:
            local = self._nodes[other] if other == node else []
            rows.append(self._addresses(local) if local else addresses_of([sums[other]]))
            shares.append(weights[local] if local else np.ones(1))
        return np.concatenate(rows), np.concatenate(shares)

    def _end_round(self, step: int) -> None:
        """Note that a round is over, and go on to the batch of the next one."""
        self._allocator.applied(0, self._batch)
        over = epochs_over(self._allocator)
        if self._evicts and over > self._epochs_over:
            self._evictions[step] = over
        self._epochs_over = over
        self._batch = self._next_batch()
        self._made.clear()

    def _beyond(self, k: int) -> int:
        """Return how many pushes a server has applied beyond those of the rounds that are over."""
        return self._pushes(k) - self._count * (self.servers[k].version - self._part.base)

    def _reached(self, k: int, until: int | None, found: Kept) -> None:
        if self._beyond(k):
            return
        store = self.servers[k]
        if store.version in self._evictions:
            assert store.rows is not None, "a job in mode hybrid has tables"
            evict_old(store.rows.tables, self._evictions[store.version])
        super()._reached(k, until, found)

    def _apply(self, k: int, push: Push, at: int) -> None:
        rows = self.servers[k].rows
        assert rows is not None, "a job in mode hybrid has tables"
        rows.apply(push, self._part.base + push.seq, 0)


def told_round(part: Part, until: int) -> str:
    """Return what is told of the round that made an update."""
    records, at = part.records[0], until - part.base - 1
    each = [records[records["worker"] == w][at : at + 1] for w in range(len(part.about["workers"]))]
    made = np.concatenate(each)
    samples = made["samples"].astype(np.int64)
    epoch, begin = int(made["epoch"][0]), int(made["begin"][0])
    loss = float((samples * made["loss"]).sum() / max(1, samples.sum()))
    batch = batch_text((epoch, begin, begin + int(samples.sum())))
    return f"update {until}: a round of {len(made)} workers, {batch}, loss {loss:.6g}"
