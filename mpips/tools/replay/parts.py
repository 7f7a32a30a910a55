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
from mpips.tools.replay.worker_process import Asked, Computed, Memory, Ranks, WorkerProcess
from mpips.transport.push import Push
from mpips.transport.rows import Section, SumsPacker, rows_fields
from mpips.transport.wire import Packer


class Setting:
    """What all ranks of a recorded job had: the data, and what it began with.

    Args:
        part: The job.

    Attributes:
        part: As given.
        config: Its configuration, as a replay takes it.
        info: What the data is.
        dataset: The open data.

    Raises:
        UserError: If the data is not there, or is none.
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
        """Return a model of the job's."""
        return load_problem(self.config.problem, self.info, self.config)

    def loader(self, job: Job) -> Loader | None:
        """Return the reader of batches, which all workers share; None where each has its own.

        They do where this process computes all gradients, which it can where no rows are read.
        """
        return None if tables_of(job) else make_loader(job)

    def apart(self, job: Job, memory: Memory) -> WorkerProcess:
        """Return what computes a worker's gradients where each has a reader of its own.

        Raises:
            Over: In the process that does.
        """
        return WorkerProcess(job, self.part, memory, lambda asked: self.work(job, asked))

    def work(self, job: Job, asked: Asked) -> None:
        """Do what a worker's rank did, in a process of its own."""
        follow(job.problem, asked.tasks(job))

    def job(self, rank: int) -> Job:
        """Return the job as one of its ranks had it, with a model of its own.

        Raises:
            UserError: If the model or what the job began with is not there, or is another one.
        """
        part, config = self.part, self.config
        ranks = Ranks(part, rank)
        problem = self.problem()
        ranks.limit_threads(ranks.threads)  # of libraries too that came with a file of the user's
        start, block = part.resumed or part.started, int(part.about["block"])
        found = Run(config, part.folder, start, part.resumed is not None, [])
        initial = initial_of(found, problem.layout)
        saved = initial if found.resumed and isinstance(initial, Checkpoint) else None
        how = found.out, block, saved, initial
        return Job(config, ranks, self.info, self.dataset, problem, *how)


def make_memory(job: Job) -> Memory:
    """Return the memory of all servers and workers, as far as a replay needs it."""
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
    """Return a server as it began: the one of the job's rank, filled."""
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
class Made:
    """A push as it was made.

    Attributes:
        batch: Of which samples.
        replica: What it was computed from, shape (n_params,).
        grad: The gradient, likewise.
        arriving: What arrives of it, where that is something else, by server.
        computed: What else is known of it.
    """

    batch: Range
    replica: np.ndarray
    grad: np.ndarray
    arriving: dict[int, np.ndarray]
    computed: Computed


class Maker:
    """Makes a worker's pushes of its gradients.

    Args:
        job: Of the worker's rank.

    Attributes:
        packers: Of its pushes to other nodes, by server.
    """

    def __init__(self, job: Job) -> None:
        assert job.worker_id is not None, "a server computes no gradient"
        self._job, self._worker = job, job.worker_id
        ranks, design = job.cluster, Design.of(job)
        owners = list(enumerate(zip(ranks.roles.servers, job.shards, strict=True)))
        remote = [
            (k, shard) for k, (rank, shard) in owners if shard.size and not ranks.is_local(rank)
        ]
        dims = [table.dim for table in design.tables]
        self._row_packers = {
            k: [SumsPacker(design.pushes, dim, self._worker, k, n) for n, dim in enumerate(dims)]
            for k, rank in enumerate(ranks.roles.servers)
            if not ranks.is_local(rank)
        }
        self.packers = {
            k: Packer(design.pushes, shard, job.dtype, self._worker, 1) for k, shard in remote
        }
        pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
        for packer in self.packers.values():
            for name, kept in packer.state.items():
                pieces.setdefault(name, []).append((packer.shard.begin, kept))
        if worker_state.names(job):
            worker_state.fill(job, pieces)

    def vector(self) -> np.ndarray:
        """Return a vector over all parameters, shape (n_params,)."""
        return aligned_zeros(self._job.layout.size, self._job.dtype)

    def make(
        self, number: int, batch: Range, replica: np.ndarray, grad: np.ndarray, computed: Computed
    ) -> Made:
        """Pack what goes to other nodes.

        Args:
            number: Of the push, 1 for the worker's first.
            batch: The samples.
            replica: What it was computed from.
            grad: The gradient.
            computed: What else is known of it.
        """
        arriving = {}
        for k, packer in self.packers.items():
            part = grad[packer.shard.range]
            if packer.packs:
                packer.pack(part, number, 0)
                arriving[k] = np.empty_like(part)
                packer.unpack(0, arriving[k])
        return Made(batch, replica, grad, arriving, computed)

    def push(self, made: Made, number: int, server: int, version: int) -> Push:
        """Return a push as a server takes it that was read at `version`."""
        part = self._job.shards[server].range
        grad = made.arriving.get(server, made.grad[part])
        origin = made.replica[part] if self._job.staleness.origins else None
        samples = made.batch[2] - made.batch[1]
        who = self._worker, number, made.batch, samples, made.computed.loss
        rows = made.computed.rows[server] if made.computed.rows else ()
        if rows and server in self._row_packers:
            pairs = zip(self._row_packers[server], rows, strict=True)
            rows = tuple(Section(each.places, p.arrived(each.sums, number)) for p, each in pairs)
        return Push(*who, version, grad, origin, factor=made.computed.factor, rows=rows)
