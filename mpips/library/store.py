"""`mpips.Store`: parameters on servers, for MPI programs with their own loop.

Workers pull and push at any time. Servers apply each push once, in the order of its worker. A
server of one store also serves in its calls of another store, and while it waits.
"""

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mpips.config import Config
from mpips.config.command_line import in_python
from mpips.config.jobfile import resolve
from mpips.config.option import meant
from mpips.errors import Exit, UserError
from mpips.health import status_board
from mpips.layout import aligned_zeros
from mpips.library.data import info_of
from mpips.library.optimizers import Optimizer
from mpips.library.program import Model
from mpips.library.serving import Serving, serve
from mpips.library.start import checked, limit_of, of_program
from mpips.mpi import abort
from mpips.mpi.collective_errors import await_ranks, layouts_alike, on_root, raise_on_all
from mpips.mpi.collectives import begin_barrier, gather_all
from mpips.mpi.start import Comm, check_world, ranks_of, whole_world
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.problems.base import Arrays
from mpips.ps.assemble import ServerHalf, WorkerHalf, assemble
from mpips.ps.design import Design
from mpips.session.setup import assign_roles, load_loops, shown

# Options of a job that make sense without data, rounds and a schedule.
STORE_OPTIONS = (
    *("servers", "server_ranks", "server_hosts", "node_size", "window", "threads"),
    *("dtype", "read", "far_read", "codec", "pull_codec", "inbox", "seed", "timeout"),
    "ema",
)
NO_BATCH = (0, 0, 1)
NAME = "store.py:Store"  # problem of a store; a run has the name of its program


class Store:
    """Parameters that servers own; workers pull them, and push gradients to them.

    A context manager: at the end of its block a server serves until every worker has ended its own
    block. An exception that leaves the block ends the whole job, with its traceback.

        with mpips.Store(comm, params, mpips.Adam(1e-3), servers=1) as store:
            if store.worker is not None:
                for x, y in my_batches(store.worker, store.workers):
                    my_gradient(store.pull(), x, y, out=store.grads)
                    store.push()

    Args:
        comm: The ranks, an mpi4py communicator, which is duplicated; None for all ranks that were
            started.
        params: Initial parameters: names to arrays of real numbers, of the same shapes on every
            rank. A shard starts with the values of the server that owns it.
        optimizer: The update rule, such as ``mpips.Adam(1e-3)``; by default SGD. Its learning rate
            is constant.
        **options: Options of the command line: ``servers``, by default one in four ranks,
            ``server_ranks``, ``server_hosts``, ``dtype``, ``read``, ``far_read``, ``codec``,
            ``pull_codec``, ``inbox``, ``window``, ``node_size``, ``threads``, ``seed``, ``ema``
            and ``timeout``. If several stores are open, the first one's timeout is in force.

    Attributes:
        worker: This rank's number among the workers; None on servers.
        workers: Number of workers.
        versions: Number of updates in the parameters of the last pull, by shard, shape (servers,),
            int64.

    Raises:
        UserError: On every rank, if an option or the parameters are invalid.

    Collective: yes, over `comm`; so is the end of the block.
    """

    def __init__(
        self,
        comm: Comm | None,
        params: Mapping[str, Any],
        optimizer: Optimizer | None = None,
        **options: Any,
    ) -> None:
        world = ranks_of(comm)
        with of_program(world):
            await_ranks(world, limit_of(options))
            given = raise_on_all(world, lambda: _checked(options, optimizer))
            model = raise_on_all(world, lambda: Model(params))
            config = on_root(world, partial(_config, given, model.dtype, world.size))
            layouts_alike(world, model.layout)
            self._cluster = assign_roles(world, config)
            self._job = _job(self._cluster, config, model)
        self.worker, self.workers = self._job.worker_id, len(self._cluster.roles.workers)
        self._shown = contextlib.ExitStack()
        if not any(gather_all(self._cluster.comm, status_board.is_shown())):
            self._shown.enter_context(shown(self._cluster, config, saves=False))
        self._half = assemble(self._cluster, Design.of(self._job))
        self._open = True
        if isinstance(self._half, ServerHalf):
            self._server = Serving(self._job, self._half)
            self.versions = np.zeros(0, "i8")
        else:
            self._replica = (
                self._half.replicas or [aligned_zeros(self._job.layout.size, self._job.dtype)]
            )[0]
            self._params = self._job.layout.views(self._replica, writable=False)
            self._grads = [self._job.layout.views(self._half.sender.buffer(k)) for k in range(2)]
            self.versions = self._half.puller.versions.copy()
        status_board.set_phase(status_board.BETWEEN, time.perf_counter())

    def pull(self) -> Arrays:
        """Read all parameters.

        Returns:
            Read-only views of this worker's replica by name, of the shapes of `params` and the
            option `dtype`. The next pull overwrites them. They are invalid after the store's end.

        Raises:
            UserError: On a server, or after the end.

        Collective: no. Blocks: for a copy of local shards, and until remote shards have arrived.
        """
        self.versions[:] = self._mine("pull").puller.pull(self._replica)
        return self._params

    @property
    def grads(self) -> Arrays:
        """Buffer of the next gradient, by name; `push` sends it. Overwrite every element.

        Arrays have the shapes of `params` and the option `dtype`.

        Raises:
            UserError: On a server, or after the end.

        Collective: no. Blocks: until all servers have applied the push before the last.
        """
        half = self._mine("grads")
        seq = half.sender.seq + 1
        self._cluster.wait(lambda: half.writable(seq), status_board.BUFFER)
        return self._grads[seq % 2]

    def push(self, loss: float = 0.0) -> int:
        """Push the gradient in `grads`, computed from the parameters of the last pull.

        Args:
            loss: Not used by servers.

        Returns:
            This worker's clock: the number of its pushes.

        Raises:
            UserError: On a server, or after the end.

        Collective: no. Blocks: as `grads`, unless `grads` was read for this push.
        """
        half = self._mine("push")
        seq = half.sender.seq + 1
        self._cluster.wait(lambda: half.writable(seq), status_board.BUFFER)
        half.sender.push(NO_BATCH, 1, loss, self.versions)
        status_board.report(status_board.CLOCK, half.sender.seq)
        return half.sender.seq

    def save(self, path: str | Path) -> int:
        """Save a checkpoint into a folder, once servers have applied all earlier pushes.

        It has the format of every run's checkpoint: parameters and the rule's state. ``python -m
        mpips.checkpoint export PATH`` and `load` read it, with any number of servers.

        Args:
            path: The folder. It may hold several checkpoints; this one becomes the newest.

        Returns:
            The number of updates in the checkpoint.

        Raises:
            UserError: On every worker, if it cannot be written, or if this store did not save or
                load the folder's newest checkpoint last. The store stays usable.

        Collective: over the workers. Blocks: until it is written.
        """
        return self._ask("save", path)

    def load(self, path: str | Path) -> int:
        """Continue from the newest complete checkpoint in a folder, of a store or of a run.

        Optimizer state that the checkpoint lacks, if it is of another rule, starts anew.

        Args:
            path: The folder.

        Returns:
            The number of updates in the checkpoint.

        Raises:
            UserError: On every worker, if there is none, or its arrays differ. The store is
                unchanged.

        Collective: over the workers. Blocks: until all servers have read it.
        """
        step = self._ask("load", path)
        self.pull()  # the last pull has versions of the state before the load
        return step

    def _ask(self, what: str, path: str | Path) -> int:
        half = self._mine(what)
        for rank in self._cluster.roles.servers:
            self._cluster.send(rank, what, (half.sender.seq, str(path)))
        heard: list[tuple[str, Any]] = []

        def answered() -> bool:
            heard.extend((kind, payload) for _, kind, payload in self._cluster.poll())
            half.sender.push_sender.sent()
            return bool(heard)

        self._cluster.wait(answered, status_board.SAVE)
        kind, payload = heard[0]
        if kind == "failed":
            got, _, expected = in_python(payload).partition(", expected ")
            folder = f"a folder that can be {'written' if what == 'save' else 'read'}"
            raise UserError(f"{what} {str(path)!r}: {got}", expected or folder)
        return int(payload)

    def _mine(self, what: str) -> WorkerHalf:
        if not self._open:
            raise UserError(f"{what} of a store after its end", "a call inside its block")
        if not isinstance(self._half, WorkerHalf):
            raise UserError(f"{what} on a server", "a worker", "look whether store.worker is None")
        serve()
        return self._half

    def close(self) -> None:
        """End the store; servers serve until every worker has closed it. May be called twice.

        Collective: yes. Blocks: until all ranks have called it.
        """
        if not self._open:
            return
        self._open = False
        if isinstance(self._half, WorkerHalf):
            half = self._half
            half.abandon()
            for rank in self._cluster.roles.servers:
                self._cluster.send(rank, "fin", half.sender.seq)
            here = begin_barrier(self._cluster.comm)
            self._cluster.wait(
                lambda: half.sender.push_sender.sent() and here.Test(), status_board.END
            )
        else:
            status_board.set_phase(status_board.SERVING, time.perf_counter())
            self._server.serve_to_the_end()
        status_board.set_phase(status_board.BETWEEN, time.perf_counter())
        self._shown.close()
        self._half.free()
        self._cluster.free()

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.close()
        except BaseException as problem:
            error = problem
        if error is not None:  # only this rank may have raised, and the others wait for it
            if isinstance(error, UserError):
                error.code = Exit.FAILED
            abort.abort(abort.raised(error), abort.code_of(error))


def _checked(options: Mapping[str, Any], optimizer: Optimizer | None) -> dict[str, Any]:
    for name in options:
        if name not in STORE_OPTIONS:
            expected, near = f"one of {', '.join(STORE_OPTIONS)}", meant(name, STORE_OPTIONS)
            raise UserError(f"option {name!r} of a store", expected, near)
    return checked(options, optimizer)


def _config(given: Mapping[str, Any], dtype: str, ranks: int) -> Config:
    check_world(whole_world())
    if ranks == 1:
        raise UserError("a store on one rank", "a server and a worker", "start several by mpirun")
    fixed = {"mode": "async", "problem": NAME, "dataset": NAME, "schedule": "constant"}
    return resolve({"dtype": dtype, "optimizer": "sgd", "share_pulls": False, **given, **fixed})


def _job(cluster: Cluster, config: Config, model: Model) -> Job:
    info = info_of(NAME, config.batch_size, 0)
    load_loops(cluster, config)
    return Job(config, cluster, info, None, model.of_job(info, config), Path(), 0)
