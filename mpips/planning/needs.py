"""Memory and time of a job: its vectors, and one measured gradient.

Vectors are counted as the modules that allocate them do. The time is a rough upper estimate: the
login node is not the compute node.

Messages:
    6 workers with P parameters on H take X: More than its memory. Use a smaller model, or fewer
        ranks on a host.
"""

import math
import os
import platform
import time
import tracemalloc
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpips.config import Config
from mpips.datasets import iterate, open_dataset
from mpips.errors import UserError, human_bytes
from mpips.layout import Layout
from mpips.layout.roles import Roles, roles_of, training, with_portions
from mpips.mpi.pages import text_of
from mpips.optim import Rule, rule_of
from mpips.optim.staleness import Staleness
from mpips.problems import load_problem
from mpips.problems.rows import rows_a_batch, tables_of_problem, without_tables

if TYPE_CHECKING:
    from mpips.planning.traffic import Tables

OUTER_VELOCITY = "outer_velocity"  # slot of mode local_sgd's outer step
# Python, libraries, MPI and compiled loops: resident memory of a rank without data.
BASE_BYTES = 320e6
BATCHES, MEASURE_S = 20, 2.0
STARTUP_S = 120.0
MOVE_BYTES_PER_S, WRITE_BYTES_PER_S = 0.5e9, 50e6
SLACK = 2.0
NO_LIMIT = 1 << 60  # control groups write a number near 2**63


def shard_slots(config: Config, rule: Rule) -> tuple[str, ...]:
    """Return the names of the state vectors that the owner of a shard keeps for it."""
    own = config.mode == "easgd" or (config.mode == "local_sgd" and config.local_slots == "keep")
    outer = (OUTER_VELOCITY,) if config.outer_step else ()
    return (() if own else rule.slots) + outer + Staleness.of(config).slots


def least_vectors(config: Config, workers: int) -> int:
    """Return the smallest number of parameter vectors that the workers of one host hold together.

    Each worker has a gradient and a replica; in a round with shared memory, all share one replica.
    In modes with local steps, it also has vectors that it trains itself.

    Args:
        config: The job.
        workers: Number of workers on the host.
    """
    slots = len(rule_of(config).slots)
    shared = config.in_rounds and config.window == "shared" and config.reduce != "allreduce"
    replicas = 1 + (config.prefetch or config.delay_compensation > 0)
    vectors = workers + 1 if shared else (1 + replicas) * workers
    if config.mode == "local_sgd":  # the same for each slot, and one gradient a worker
        moved = 0 if config.local_slots == "keep" else slots
        vectors = (1 + moved) * vectors + (1 + slots - moved + config.streaming) * workers
    if config.mode == "easgd":  # the worker's own replica, its gradient and its slots
        vectors += (2 + slots) * workers
    return vectors


def codec_vectors(config: Config) -> int:
    """Return the number of vectors that a codec of rounds needs on each of several nodes."""
    if not config.in_rounds or config.codec == "none":
        return 0
    if config.codec != "powersgd":  # residual or message; and changes on their way back
        return 3 if config.mode == "local_sgd" else 1
    return 1 + len(rule_of(config).slots)  # the error, and slots that other ranks own


def check_memory(layout: Layout, config: Config, workers: int, nodes: int) -> None:
    """Refuse a model that this host cannot hold, before any array of its size is allocated.

    Args:
        layout: Layout of the model.
        config: The job.
        workers: Number of workers on this host.
        nodes: Number of nodes.

    Raises:
        UserError: If the job may use less memory of the host than it needs at least.
    """
    vectors = least_vectors(config, workers) + (codec_vectors(config) if nodes > 1 else 0)
    needed = vectors * layout.size * np.dtype(config.dtype).itemsize
    there = memory_bytes()
    if workers and needed > there:
        raise UserError(
            f"{workers} workers with {layout.size:,} parameters on {platform.node()} take "
            f"{human_bytes(needed)}",
            f"at most {human_bytes(there)}, its memory or that of the job's control group",
            "use a smaller model, or fewer ranks on a host",
        )


def available_bytes() -> int:
    """Return the bytes of memory that processes of this host can still allocate.

    Of a control group the limit counts, whatever the group uses already.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, memory_bytes())
    return memory_bytes()


def memory_bytes() -> int:
    """Return the memory of this host, or of this process's control group if that is less."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(installed, memory_limit(groups("memory"))))


def groups(controller: str, root: Path = Path("/sys/fs/cgroup"), own: str = "") -> list[Path]:
    """Return the folders of this process's control groups, from its own up to the root.

    Both versions of control groups are supported.

    Args:
        controller: "cpu" or "memory".
        root: Mount point of control groups.
        own: Text of ``/proc/self/cgroup``; read if empty.
    """
    folders = []
    for line in (own or text_of(Path("/proc/self/cgroup"))).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / controller if names else root
        group = base / path.strip("/")
        folders += [p for p in (group, *group.parents) if p == base or base in p.parents]
    return folders


def memory_limit(of: list[Path]) -> float:
    """Return the smallest memory limit of some control groups, in bytes; infinite without one."""
    limits = [math.inf]
    for path in of:
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = text_of(path / name)
            if text.isdigit() and int(text) < NO_LIMIT:
                limits.append(int(text))
    return min(limits)


@dataclass(frozen=True)
class Measured:
    """Measurements of the job's data and problem.

    Attributes:
        parameters: Number of parameters.
        n_train: Number of training samples.
        data_bytes: Bytes of a worker's data in memory.
        grad_s: Seconds to compute the gradient of a batch on this machine.
        table_bytes: Bytes of tables' rows, with their slots.
        tables: Rows of each table, numbers of a row, and rows that a batch needs; None if this is
            unknown for a table.
    """

    parameters: int
    n_train: int
    data_bytes: float
    grad_s: float
    table_bytes: int = 0
    tables: "Tables | None" = ()


@dataclass(frozen=True)
class Needs:
    """Memory and time of a job on given ranks.

    Attributes:
        servers: Number of servers; 0 if every rank owns a slice.
        workers: Number of workers.
        server_bytes: Bytes of memory of a server; 0 if there is none.
        worker_bytes: Bytes of memory of a worker.
        save_s: Seconds to finish a step and save.
        seconds: Seconds from the start to the end.
        evaluators: Number of evaluators; each needs less memory than a worker.
    """

    servers: int
    workers: int
    server_bytes: float
    worker_bytes: float
    save_s: float
    seconds: float
    evaluators: int = 0


def measure(config: Config) -> Measured:
    """Open the data, build the problem, compute some gradients, and return the measurements.

    Raises:
        UserError: If the data or the problem does not match the job.
    """
    from threadpoolctl import threadpool_limits

    from mpips.planning.table_rules import bytes_of_tables

    tracemalloc.start()
    dataset = open_dataset(config)
    _, data_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    problem = load_problem(config.problem, dataset.info, config)
    parameters, n = problem.layout.size, dataset.info.n_train
    few = islice(iterate(dataset.train, 0, n, config.batch_size, config.dtype), BATCHES)
    original, problem = problem, without_tables(problem, few, config.dtype)
    shapes = dict(zip(problem.layout.names, problem.layout.shapes, strict=True))
    all_tables = tables_of_problem(original)
    # Each batch is assumed to need as many new rows as the first ones; later batches need fewer.
    parts = -(-n // (BATCHES * config.batch_size))
    touched = {name: shapes.get(name, (0,))[0] * parts for name in all_tables}
    table_bytes = bytes_of_tables(original, config, touched)
    needed = rows_a_batch(problem)
    tables = tuple((all_tables[k].rows, all_tables[k].dim, n) for k, n in needed.items())
    vectors = np.zeros((2, problem.layout.size), config.dtype)
    params, grad = (problem.layout.views(vector) for vector in vectors)
    for name, array in problem.init(np.random.default_rng(config.seed)).items():
        params[name][...] = array
    seconds: list[float] = []
    batches = iterate(dataset.train, 0, n, config.batch_size, config.dtype)
    with threadpool_limits(config.threads or 1):
        for batch in islice(batches, BATCHES):
            start = time.perf_counter()
            problem.loss_and_grad(params, batch, grad)
            seconds.append(time.perf_counter() - start)
            if sum(seconds) > MEASURE_S:
                break
    return Measured(parameters, n, data_bytes, float(np.median(seconds)), table_bytes, tables)


def needs(config: Config, measured: Measured, nodes: int, ranks_per_node: int) -> Needs:
    """Return memory and time of the job on `nodes` nodes of `ranks_per_node` ranks.

    Raises:
        UserError: If no worker is left or, in a mode with servers, no server.
    """
    node_of = [node for node in range(nodes) for _ in range(ranks_per_node)]
    node_of = node_of[: training(len(node_of), config.evaluators)]
    hosts = [f"node{node}" for node in node_of]
    roles = roles_of(replace(config, server_hosts=""), hosts, node_of)
    roles = with_portions(roles, config, node_of, rule_of(config).whole, bool(measured.tables))
    return needs_of(config, measured, roles, nodes)


def needs_of(config: Config, measured: Measured, roles: Roles, nodes: int) -> Needs:
    """Return memory and time of the job with these roles."""
    vector = measured.parameters * np.dtype(config.dtype).itemsize
    state = vector * (1 + len(shard_slots(config, rule_of(config)))) + measured.table_bytes
    shard = max(roles.portions or [1 / (len(roles.owners) - roles.spares)])
    # A server starts from a whole vector.
    owned = shard * state * (2 if config.snapshot == "copy" else 1) + vector
    pool = shard * vector * (2 if config.in_rounds else config.inbox)
    if nodes > 1:
        pool += vector * codec_vectors(config) * nodes / (len(roles.servers) + len(roles.workers))
    worker = BASE_BYTES + measured.data_bytes + vector * _vectors(config, nodes)
    together = config.unit_size * len(roles.workers)
    steps = config.steps or config.epochs * math.ceil(measured.n_train / together)
    batches = config.unit_size / config.batch_size  # between two pushes or rounds
    step_s = SLACK * (batches * measured.grad_s + 4 * vector / MOVE_BYTES_PER_S)
    return Needs(
        servers=len(roles.servers),
        workers=len(roles.workers),
        server_bytes=BASE_BYTES + owned + pool if roles.servers else 0.0,
        worker_bytes=worker + (owned + pool) * bool(set(roles.owners).intersection(roles.workers)),
        save_s=step_s + shard * state / WRITE_BYTES_PER_S,
        seconds=STARTUP_S + steps * step_s,
        evaluators=config.evaluators,
    )


def _vectors(config: Config, nodes: int) -> int:
    """Return the number of vectors of a worker: gradients, replicas, parameters to evaluate."""
    shared = config.mode in ("async", "ssp") and config.share_pulls and nodes > 1
    return least_vectors(config, 1) + (1 if config.mode == "sync" else 2) + shared
