"""Dense push and pull, beside the same work without coordination.

Every worker pulls all parameters, computes a gradient from them, and pushes it, repeatedly. The
server applies each push with SGD. On the other side, the same ranks run the same kernels and copies
on the same buffers, without waiting for each other.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from mpips.mpi.collectives import begin_barrier
from mpips.mpi.start import Request
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.problems.accumulate import Tasks, follow
from mpips.ps.assemble import ServerHalf, assemble, way_of
from mpips.ps.design import Design
from mpips.ps.server import AsyncServer
from mpips.ps.steps import gradient_steps
from mpips.ps.worker import AsyncWorker
from mpips.tools.bench.measure import Options, Row, bytes_text, in_turn, rates
from mpips.tools.bench.vector import ONE, make_job

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
QUICK = (64 << 10,)
WORK_BYTES = 1 << 30  # bytes of a worker's pulls in one repeat
STEPS = (3, 20000)  # smallest and largest number in one repeat
REACH = 0.8


class Exchange:
    """Server and workers of an asynchronous run without data.

    Args:
        job: The job.

    Collective: yes, construction and `free`.
    """

    def __init__(self, job: Job) -> None:
        cluster = self.cluster = job.cluster
        self._job, self._goal = job, 0
        design = Design.of(job)
        self._half = half = assemble(cluster, design)
        self.server: AsyncServer | None = None
        if isinstance(half, ServerHalf):
            half.server.params[:] = 1
            half.server.start_from(0)
            server = self.server = AsyncServer(job, half)
            opened = half.open(lambda request: server.serve_until(request.Test))
            self.remote_way = way_of(design, opened)
            return
        self.remote_way, self.puller, self.sender = half.remote_way, half.puller, half.sender
        self._steps = gradient_steps(job, half)
        self.worker = AsyncWorker(job, half, self._steps)

    def tasks(self) -> Tasks[None]:
        """Return the tasks of a worker's step: pull, compute and push."""
        return self.worker.step((0, 0, 1), ONE)

    def step(self, steps: int = 1) -> None:
        """Pull, compute and push `steps` times on a worker. Collective: no."""

        def work() -> Tasks[None]:
            for _ in range(steps):
                yield from self.tasks()

        follow(self._job.problem, work())

    def exchange(self, steps: int) -> None:
        """Pull, compute and push `steps` times on every worker. Collective: yes."""
        self.serve_while(lambda: self.step(steps), steps)

    def serve_while(self, work: Callable[[], None], pushes: int) -> None:
        """Call `work` on the workers, and serve until all its pushes are applied. Collective: yes.

        Args:
            work: Function that each worker calls.
            pushes: Number of pushes of each worker in it.
        """
        cluster = self.cluster
        if self.server is None:
            work()
            self._wait_sent(begin_barrier(cluster.comm))
            return
        self._goal += pushes * len(cluster.roles.workers)
        done, store = begin_barrier(cluster.comm), self.server.store
        self.server.serve_until(lambda: done.Test() and store.version >= self._goal)

    def _wait_sent(self, barrier: Request) -> None:
        """Wait for the barrier and for this worker's sends.

        Meanwhile, a node aggregator sends the pushes of other workers.
        """

        def sent() -> bool:
            self.sender.push_sender.resting()
            return barrier.Test() and self.sender.push_sender.sent()

        self.cluster.wait(sent)

    def alone(self, steps: int) -> None:
        """Do the same work as `exchange`, without coordination. Collective: no."""
        if self.server is not None:
            store, rule = self.server.store, self._job.rule
            ranks = self.cluster.roles.workers
            grads = [g for r in ranks for g in self._half.window.view(r, "grads")]
            for k in range(steps * len(ranks)):
                grad = grads[k % len(grads)][store.shard.range]
                rule.apply(store.params, grad, store.slots, 1, 1e-3)
            return
        ranks, shards, replica = self.cluster.roles.servers, self._job.shards, self._steps.replica
        for k in range(steps):
            for rank, shard in zip(ranks, shards, strict=True):
                np.copyto(replica[shard.range], self._half.window.view(rank, "params"))
            self.compute(k)

    def compute(self, k: int) -> None:
        """Compute a worker's gradient number `k` from its current replica. Collective: no."""
        views = self._job.layout.views
        grad = views(self.sender.buffer(k))
        self._job.problem.loss_and_grad(views(self._steps.replica), ONE, grad)

    def free(self) -> None:
        """Cancel the workers' reads for a next step, and free the window.

        Collective: yes.
        """
        self.serve_while(lambda: self.puller.abandon(), 0)
        if self.server is not None:
            self.server.close()
        self.cluster.barrier()
        self._half.free()


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare at each size, with one server and all other ranks as workers. Collective: yes."""
    return [_at(cluster, size, options) for size in options.pick(SIZES, QUICK)]


def _at(cluster: Cluster, size: int, options: Options) -> Row:
    exchange = Exchange(make_job(cluster, size // 4, "async", servers=1))
    steps = options.times(STEPS, WORK_BYTES // size)
    sides = {"mpips": partial(exchange.exchange, steps), "alone": partial(exchange.alone, steps)}
    times = in_turn(cluster, sides, options.repeats)
    exchange.free()
    workers = cluster.world - 1
    payload = workers * steps * 2 * size / 1e9
    case = f"{bytes_text(size)}, 1 server, {workers} workers"
    names = "push+pull", case, "same ranks, no coordination"
    reach = REACH if size == 16 << 20 else None
    return rates(names, payload, "GB/s", (times["mpips"], times["alone"]), reach)
