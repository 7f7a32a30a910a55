"""Replay of a job in mode hybrid: rounds, and pushes of rows.

A round sums one push of each worker. It needs no record: its batch is the next one, and the order
of the sum follows from the workers and nodes. The record has the order in which servers applied
pushes of rows, which may be of several rounds, and the times of reads. At a checkpoint, and before
an eviction of old rows, a server has applied exactly the pushes of the rounds so far. So the replay
starts no later round until all servers have reached this point.
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
from mpips.tools.replay.machine import Replay, Worker, batch_text
from mpips.tools.replay.order import RoundOrder
from mpips.tools.replay.parts import MadePush, Setting
from mpips.tools.replay.record import Part
from mpips.tools.replay.worker_process import Computed
from mpips.transport.push import Push
from mpips.transport.rows import Section


class RoundReplay(Replay):
    """Replay of one job in mode hybrid; see `mpips.tools.replay.machine.Replay`.

    Args:
        setting: Inputs of the job.
        saved: Checkpoints of the job, by step.

    Raises:
        UserError: If data, model or checkpoint are missing or not those of the job.
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
        self._nodes = dict[int, list[int]]()  # workers of each node that has some
        pairs = sorted((ranks.node_of[rank], w) for w, rank in enumerate(ranks.roles.workers))
        for node, worker in pairs:
            self._nodes.setdefault(node, []).append(worker)
        self._allocator = job.allocator()
        self._epochs_over = epochs_over(self._allocator)
        self._evicts = any(table.table.evict_after is not None for table in tables_of(job))
        self._evictions = dict[int, int]()  # finished epochs at each eviction, by step
        self._batch = self._next_batch()
        self._made = dict[int, MadePush]()  # pushes of the current round, by worker

    def _next_batch(self) -> Range:
        return self._allocator.next(0) or EXHAUSTED

    def _begin_push(self, number: int, worker: Worker, record: np.void) -> None:
        share = split(self._batch, self._count)[number]
        recorded = int(record["epoch"]), int(record["begin"])
        if recorded != share[:2]:
            push = f"push {worker.computed + 1} of worker {number}"
            raise compare.differing(f"first difference: {push}", batch_text(share), recorded)
        if record["samples"]:
            worker.begin(self._batch)
            return
        none = tuple(
            Section(np.zeros(0, np.int64), np.zeros((0, table.dim), self.job.dtype))
            for table in tables_of(self.job)
        )
        computed = Computed(0.0, 1.0, worker.frozen, (none,) * len(self.servers))
        self._take(number, worker, worker.take(self._batch, worker.maker.vector(), computed))

    def _take(self, number: int, worker: Worker, made: MadePush) -> None:
        worker.frozen = made.computed.frozen
        self._made[number] = made

    def _advance_round(self) -> bool:
        """Make the update of the round if all workers have pushed, and servers may continue."""
        step = next(iter(self.servers.values())).version
        stops = step in self._saved or step in self._evictions
        if len(self._made) < self._count or (stops and min(map(self._beyond, self.servers)) < 0):
            return False
        self._update(step + 1)
        self._end_round(step + 1)
        for k, store in self.servers.items():
            self._reached(k)
            if step + 1 == self._until:  # no matter which pushes of rows the server has applied
                self._state[k] = [array.copy() for array in (store.params, *store.slots)]
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
        """Return addresses and weights of the vectors that a node's owner sums.

        They are the gradients of the node's workers, and the sums of other nodes.
        """
        rows, shares = list[np.ndarray](), list[np.ndarray]()
        for other in sums:
            local = self._nodes[other] if other == node else []
            rows.append(self._addresses(local) if local else addresses_of([sums[other]]))
            shares.append(weights[local] if local else np.ones(1))
        return np.concatenate(rows), np.concatenate(shares)

    def _end_round(self, step: int) -> None:
        """End a round, and get the batch of the next one."""
        self._allocator.applied(0, self._batch)
        over = epochs_over(self._allocator)
        if self._evicts and over > self._epochs_over:
            self._evictions[step] = over
        self._epochs_over = over
        self._batch = self._next_batch()
        self._made.clear()

    def _beyond(self, k: int) -> int:
        """Return the number of pushes that a server has applied beyond the finished rounds."""
        return self._pushes(k) - self._count * (self.servers[k].version - self._part.base)

    def _reached(self, k: int) -> None:
        if self._beyond(k):
            return
        store = self.servers[k]
        if store.version in self._evictions:
            assert store.rows is not None, "a job in mode hybrid has tables"
            evict_old(store.rows.tables, self._evictions[store.version])
        super()._reached(k)

    def _apply(self, k: int, push: Push, at: int) -> None:
        rows = self.servers[k].rows
        assert rows is not None, "a job in mode hybrid has tables"
        rows.apply(push, self._part.base + push.seq, 0)


def round_text(part: Part, until: int) -> str:
    """Return a message about the round that made an update."""
    records, at = part.records[0], until - part.base - 1
    each = [records[records["worker"] == w][at : at + 1] for w in range(len(part.about["workers"]))]
    pushes = np.concatenate(each)
    samples = pushes["samples"].astype(np.int64)
    epoch, begin = int(pushes["epoch"][0]), int(pushes["begin"][0])
    loss = float((samples * pushes["loss"]).sum() / max(1, samples.sum()))
    batch = batch_text((epoch, begin, begin + int(samples.sum())))
    return f"update {until}: a round of {len(pushes)} workers, {batch}, loss {loss:.6g}"
