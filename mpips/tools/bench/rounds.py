"""Synchronous rounds, beside Allreduce in place and the same update."""

from collections.abc import Sequence

import numpy as np

from mpips.mpi.collectives import sum_in_place
from mpips.mpi.world import Cluster
from mpips.rounds.base import Report
from mpips.rounds.shared import make_round
from mpips.tools.bench.measure import Options, Row, bytes_text, in_turn, milliseconds
from mpips.tools.bench.vector import make_job

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
QUICK = (4 << 10, 1 << 20)
WORK_BYTES = 256 << 20
ROUNDS = (3, 5000)  # smallest and largest number in one repeat


def reach(size: int) -> float:
    """Return the smallest ratio that is the aim."""
    if size <= 1 << 20:
        return 0.9
    return 1.5 if size <= 16 << 20 else 2.5


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare at each size, with every rank as a worker. Collective: yes."""
    return [_at(cluster, size, options) for size in options.pick(SIZES, QUICK)]


class Rounds:
    """Rounds of a synchronous run without data. Collective: yes, all methods."""

    def __init__(self, cluster: Cluster, size: int, servers: Sequence[int] = ()) -> None:
        self.job = make_job(cluster, size // 4, "sync", server_ranks=tuple(servers))
        self.round = make_round(self.job)
        self.round.params[:] = 1
        self.round.grad[:] = 0
        self.round.publish_start()
        workers = len(cluster.roles.workers)
        self._weights = np.full(workers, 1 / workers)

    def exchange(self, count: int) -> None:
        """Run `count` rounds."""
        report = Report()
        for step in range(1, count + 1):
            self.round.exchange(step, self._weights, report)

    def free(self) -> None:
        """Free the resources of the rounds."""
        self.job.cluster.barrier()
        self.round.free()


def _at(cluster: Cluster, size: int, options: Options) -> Row:
    rounds = Rounds(cluster, size)
    params, grad = rounds.round.replica.copy(), rounds.round.grad.copy()
    count = options.times(ROUNDS, WORK_BYTES // size)

    def plain() -> None:
        for _ in range(count):
            sum_in_place(cluster.comm, grad)
            rounds.job.rule.apply(params, grad, (), 1, 1e-3 / cluster.world)

    sides = {"mpips": lambda: rounds.exchange(count), "plain": plain}
    times = in_turn(cluster, sides, options.repeats)
    rounds.free()
    names = "sync round", f"{bytes_text(size)}, {cluster.world} ranks", "Allreduce(IN_PLACE) + SGD"
    return milliseconds(names, count, (times["mpips"], times["plain"]), reach(size))
