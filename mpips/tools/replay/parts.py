"""Servers and workers of a replayed job."""

from dataclasses import dataclass, replace

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.datasets import DataInfo, Dataset, describe, make_dataset, open_parts
from mpips.datasets.ledger import Range
from mpips.datasets.loader import Loader
from mpips.layout import aligned_zeros
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.problems import Problem, load_problem
from mpips.problems.accumulate import follow, make_loader
from mpips.ps.client import reader_fields
from mpips.ps.design import Design
from mpips.ps.shard import Server, server_fields
from mpips.session.folder import Run
from mpips.session.setup import initial_of
from mpips.snapshot import worker_state
from mpips.tables.server import OwnedRows, fill_tables, table_fields
from mpips.tools.replay.record import Part
from mpips.tools.replay.worker_process import Computed, JobRanks, Memory, ReplayLink, WorkerProcess
from mpips.transport.push import Push
from mpips.transport.rows import Section, SumsPacker, rows_fields
from mpips.transport.wire import Packer


class Setting:
    """Inputs of a recorded job: data, configuration, model and start.

    Args:
        part: Record of the job.

    Attributes:
        part: Record of the job.
        config: Configuration of the job, without injected delays.
        info: Description of the data.
        dataset: The open data; None for a program, which has its own.

    Raises:
        UserError: If the data is missing or invalid.
    """

    info: DataInfo
    dataset: Dataset | None

    def __init__(self, part: Part) -> None:
        self.part = part
        self.config = replace(part.config, inject_delay="")
        self._open()

    def _open(self) -> None:
        parts = open_parts(self.config)
        try:
            self.info = describe(self.config, parts, strict=False)
            self.dataset = make_dataset(self.config, parts, self.info)
        except BaseException:
            parts.close()
            raise

    def close(self) -> None:
        """Close the data."""
        if self.dataset is not None:
            self.dataset.close()

    def problem(self) -> Problem:
        """Return a new model of the job."""
        return load_problem(self.config.problem, self.info, self.config)

    def loader(self, job: Job) -> Loader | None:
        """Return the loader of batches that all workers share, or None if each has its own.

        They share it if this process computes all gradients. It does so for jobs without tables.
        """
        return None if tables_of(job) else make_loader(job)

    def fork(self, job: Job, memory: Memory) -> WorkerProcess:
        """Fork a process that computes a worker's gradients with its own loader."""
        return WorkerProcess(job, self.part, memory, lambda link: self.work(job, link))

    def work(self, job: Job, link: ReplayLink) -> None:
        """Do the work of a worker's rank, in the worker's process."""
        follow(job.problem, link.tasks(job))

    def job(self, rank: int) -> Job:
        """Return the job of one of its ranks, with a new model.

        Raises:
            UserError: If the model or the start of the job is missing or not that of the run.
        """
        part, config = self.part, self.config
        ranks = JobRanks(part, rank)
        problem = self.problem()
        ranks.limit_threads(ranks.threads)  # after load_problem, which may import other libraries
        start, block = part.resumed or part.started, int(part.about["block"])
        run = Run(config, part.folder, start, part.resumed is not None, [])
        initial = initial_of(run, problem.layout)
        saved = initial if run.resumed and isinstance(initial, Checkpoint) else None
        args = run.out, block, saved, initial
        return Job(config, ranks, self.info, self.dataset, problem, *args)


def make_memory(job: Job) -> Memory:
    """Return the window fields of all servers and workers that a replay needs."""
    design, roles = Design.of(job), job.cluster.roles
    servers, workers, dtype = len(roles.servers), len(roles.workers), design.dtype
    fields = {}
    for number, rank in enumerate(roles.servers):
        own = server_fields(job.shards[number].size, design.slots, dtype, workers)
        for table in design.tables:
            own += table_fields(table, servers, number, dtype)
        fields[rank] = own
    of_worker = reader_fields(servers) + rows_fields(design.tables, servers, dtype)
    return Memory(fields | dict.fromkeys(roles.workers, of_worker))


def make_server(job: Job, memory: Memory) -> Server:
    """Return the server of the job's rank, in its state at the start of the job."""
    design, roles = Design.of(job), job.cluster.roles
    number = roles.servers.index(job.cluster.rank)
    place = job.cluster, memory, number
    server = Server(*place, design)
    if design.tables:
        rows = OwnedRows(server, place, design.tables, design.replies)
        fill_tables(rows.tables, job.checkpoint)
        server.own(rows)
    job.fill(server.params, server.slots, job.shard)
    server.start_from(job.base_step)
    return server


@dataclass
class MadePush:
    """A push of a worker to all servers.

    Attributes:
        batch: Samples of the gradient.
        replica: Parameters from which the gradient was computed, shape (n_params,).
        grad: The gradient, shape (n_params,).
        arriving: Gradient of a shard after compression, by server; only if a codec changes it.
        computed: Loss and other results of the computation.
    """

    batch: Range
    replica: np.ndarray
    grad: np.ndarray
    arriving: dict[int, np.ndarray]
    computed: Computed


class PushMaker:
    """Packer of a worker's gradients into pushes.

    Args:
        job: Job of the worker's rank.

    Attributes:
        packers: Packers of pushes to other nodes, by server.
    """

    def __init__(self, job: Job) -> None:
        assert job.worker_id is not None, "a server computes no gradient"
        self._job, self._worker = job, job.worker_id
        ranks, design = job.cluster, Design.of(job)
        owners = enumerate(zip(ranks.roles.servers, job.shards, strict=True))
        remote = {k: shard for k, (rank, shard) in owners if not ranks.is_local(rank)}
        dims = [table.dim for table in design.tables]
        self._row_packers = {
            k: [SumsPacker(design.pushes, dim, self._worker, k, n) for n, dim in enumerate(dims)]
            for k in remote
        }
        self.packers = {
            k: Packer(design.pushes, shard, job.dtype, self._worker, 1)
            for k, shard in remote.items()
            if shard.size
        }
        pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
        for packer in self.packers.values():
            for name, state in packer.state.items():
                pieces.setdefault(name, []).append((packer.shard.begin, state))
        if worker_state.names(job):
            worker_state.fill(job, pieces)

    def vector(self) -> np.ndarray:
        """Return a new vector of zeros, shape (n_params,)."""
        return aligned_zeros(self._job.layout.size, self._job.dtype)

    def make(
        self, number: int, batch: Range, replica: np.ndarray, grad: np.ndarray, computed: Computed
    ) -> MadePush:
        """Return a push, whose parts for other nodes have passed through the codec.

        Args:
            number: Number of the push, 1 for the worker's first.
            batch: See `MadePush`.
            replica: See `MadePush`.
            grad: See `MadePush`.
            computed: See `MadePush`.
        """
        arriving = {}
        for k, packer in self.packers.items():
            part = grad[packer.shard.range]
            if packer.packs:
                packer.pack(part, number, 0)
                arriving[k] = np.empty_like(part)
                packer.unpack(0, arriving[k])
        return MadePush(batch, replica, grad, arriving, computed)

    def push(self, made: MadePush, number: int, server: int, version: int) -> Push:
        """Return the part of a push for one server.

        Args:
            made: The push.
            number: Number of the push.
            server: Number of the server.
            version: Version of the server's shard from which the push was computed.
        """
        part = self._job.shards[server].range
        grad = made.arriving.get(server, made.grad[part])
        origin = made.replica[part] if self._job.staleness.origins else None
        samples = made.batch[2] - made.batch[1]
        header = self._worker, number, made.batch, samples, made.computed.loss
        rows = made.computed.rows[server] if made.computed.rows else ()
        if rows and server in self._row_packers:
            pairs = zip(self._row_packers[server], rows, strict=True)
            rows = tuple(Section(each.places, p.arrived(each.sums, number)) for p, each in pairs)
        return Push(*header, version, grad, origin, factor=made.computed.factor, rows=rows)
