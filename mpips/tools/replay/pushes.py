"""Replay of a job whose servers apply each push on arrival."""

from collections.abc import Mapping

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.tables.server import evict_old
from mpips.tools.replay import compare
from mpips.tools.replay.machine import Replay, Worker
from mpips.tools.replay.parts import MadePush, Setting
from mpips.transport.push import Push


class PushReplay(Replay):
    """Replay of one job in mode async or ssp; see `mpips.tools.replay.machine.Replay`."""

    def __init__(self, setting: Setting, saved: Mapping[int, Checkpoint]) -> None:
        super().__init__(setting, saved)
        self._before = self.job.allocator().before

    def _begin_push(self, number: int, worker: Worker, record: np.void) -> None:
        epoch, begin = int(record["epoch"]), int(record["begin"])
        worker.begin((epoch, begin, begin + int(record["samples"])))

    def _take(self, number: int, worker: Worker, made: MadePush) -> None:
        if made.computed.frozen != worker.frozen:  # its later pushes leave these parameters alone
            worker.frozen = made.computed.frozen
            for store in self.servers.values():
                store.frozen.note(number, worker.computed, worker.frozen)
        self._compare_state(number, worker)

    def _compare_state(self, number: int, worker: Worker) -> None:
        """Compare a worker's codec state with the checkpoints right after its last push."""
        for saved in self._saved.values() if worker.maker.packers else ():
            clocks, before = saved.state["allocator"]["clocks"], self._before
            if saved.worker_names and clocks[number] - before[number] == worker.computed:
                for packer in worker.maker.packers.values():
                    compare.own(self.job, number, packer, saved)

    def _apply(self, k: int, push: Push, at: int) -> None:
        store, evicted = self.servers[k], self._part.servers[k].evicted
        if store.rows is not None and at in evicted:
            evict_old(store.rows.tables, evicted[at])
        store.apply(push)
