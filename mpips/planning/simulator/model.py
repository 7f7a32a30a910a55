"""Model of a simulated job: speeds, work and results."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpips.config import Config
from mpips.errors import UserError
from mpips.optim import rule_of
from mpips.planning.needs import shard_slots
from mpips.planning.traffic import Case, Tables

# Share of a link's rate that carries messages; headers take the rest. Measured at 1 Gbit/s.
PAYLOAD = 0.94
# Bytes per second that a core at least applies of gradients, by Adam in float32, and copies.
APPLY_BYTES_PER_S, COPY_BYTES_PER_S = 4e9, 8e9
# Bytes in memory per second that a core packs and unpacks: half the measured rates of an idle core.
PACK = {
    "fp16": (8e9, 10e9), "bf16": (6e9, 10e9), "int8": (2.7e9, 10e9), "int4": (2e9, 6e9),
    "topk": (0.9e9, 10e9), "onebit": (0.25e9, 4e9), "powersgd": (1e9, 1e9),
}  # fmt: skip
# Duration of rounds between nodes, divided by the time that their bytes need on links of 1 Gbit/s.
# With MPICH, whole steps take the predicted time. With Open MPI, steps of 4 MB do so on 2 hosts; on
# 3 and 4 hosts rounds take 1.2 to 1.5 times as long (with 16 MiB, 1.4 to 1.5 on 2 and 4 hosts). The
# factor 1.2 was chosen from runs that the guide does not compare.
MPICH, OPEN_MPI = "mpich", "openmpi"
ROUND_COSTS = {MPICH: 1.0, OPEN_MPI: 1.2}
LEAST_BUSY_S = 1e-3  # least busy time of a server to derive its rate from
NUMBERS = ("mean", "p50", "p90", "p99", "max")


@dataclass(frozen=True)
class Speeds:
    """Speeds of a job's machines.

    Attributes:
        step_s: Mean seconds in which a worker computes the gradient of a batch.
        jitter: Standard deviation of a gradient's seconds, divided by their mean; log-normal.
        slow: Pairs of a number of slow workers and their factor; the last workers are slow.
        each: Factor of each worker on `step_s`, in addition to `slow`; empty if all are 1.
        link: Bytes per second that a node's link carries each way.
        latency_s: Latency of a message between nodes.
        apply: Bytes of gradients that a server applies per second.
        copy: Bytes that a worker copies per second.
        between_s: Mean seconds of a worker between two steps, for everything else.
        batch_bytes: Bytes of a batch, read over the link of the worker's node; 0 if reading is
            free.
        storage: Bytes of data per second that all nodes together read; infinite for no limit.
        rounds: Duration of a round's messages, divided by the time that they need on links.
    """

    step_s: float
    jitter: float = 0.0
    slow: tuple[tuple[int, float], ...] = ()
    each: tuple[float, ...] = ()
    link: float = PAYLOAD * 1.25e9
    latency_s: float = 50e-6
    apply: float = APPLY_BYTES_PER_S
    copy: float = COPY_BYTES_PER_S
    between_s: float = 0.0
    batch_bytes: float = 0.0
    storage: float = float("inf")
    rounds: float = 1.0

    def factors(self, workers: int) -> np.ndarray:
        """Return each worker's factor on the time to compute, shape (workers,), dtype float64.

        Raises:
            UserError: If there are more slow workers than workers.
        """
        found = np.ones(workers)
        if len(self.each) == workers:
            found *= self.each
        at = workers
        for count, factor in self.slow:
            if count > at:
                got = f"{sum(n for n, _ in self.slow)} slow workers of {workers}"
                raise UserError(got, "at most as many as there are", "see --slow and --workers")
            found[at - count : at] *= factor
            at -= count
        return found

    def compute_s(self, workers: int, units: int, batches: int, seed: int) -> np.ndarray:
        """Draw the seconds of each worker's units.

        Args:
            workers: Number of workers.
            units: Units of each worker.
            batches: Batches of a unit.
            seed: Seed of the jitter.

        Returns:
            Shape (workers, units), dtype float64. The jitter of the batches of a unit averages out.
        """
        mean = batches * (self.step_s + self.between_s) * self.factors(workers)
        times = np.repeat(mean[:, None], units, axis=1)
        if self.jitter:
            variance = np.log1p(self.jitter**2 / batches)
            rng = np.random.default_rng(seed)
            times *= rng.lognormal(-variance / 2, np.sqrt(variance), times.shape)
        return times


@dataclass(frozen=True)
class Work:
    """A job to simulate.

    Attributes:
        case: Quantities that determine its traffic.
        speeds: Speeds of its machines.
        bound: Bound on clocks in mode ssp; None in other modes.
        backup: Number of gradients that a round does not wait for.
        quota: Whether each worker makes an equal number of steps; else batches are assigned on
            request.
        places: Number of remote pushes that a server receives at a time.
        pack_s: Seconds of a worker for packing and unpacking in an exchange.
        unpack: Bytes in memory per second for a push and its response together, which a server
            unpacks and packs.
        seed: Seed of the jitter.
    """

    case: Case
    speeds: Speeds
    bound: int | None = None
    backup: int = 0
    quota: bool = False
    places: int = 2
    pack_s: float = 0.0
    unpack: float = float("inf")
    seed: int = 0

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.case.roles.workers)


@dataclass(frozen=True)
class Busy:
    """Load of the links of some equal nodes.

    Attributes:
        nodes: Number of nodes.
        servers: Number of servers on each.
        workers: Number of workers on each.
        sends: Share of the time in which the link sends.
        receives: Share of the time in which the link receives.
    """

    nodes: int
    servers: int
    workers: int
    sends: float
    receives: float


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation.

    Attributes:
        step_s: Mean seconds between two steps of a worker, over all workers.
        steps: Number of simulated steps of all workers.
        events: Number of events.
        parts: A worker's time, as shares of compute, pull, push, wait.
        staleness: Number of updates, by staleness.
        links: Load of the nodes' links, the busiest first.
        applying: Share of the time in which the busiest server applies.
        storage: Share of the time in which data is read from storage.
        dropped: Share of the gradients that were too late for their round.
        took_s: Seconds that the simulation took.
    """

    step_s: float
    steps: int
    events: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    staleness: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    links: tuple[Busy, ...] = ()
    applying: float = 0.0
    storage: float = 0.0
    dropped: float = 0.0
    took_s: float = 0.0

    def stale(self) -> dict[str, float]:
        """Return statistics of staleness, with the keys `NUMBERS`; all 0 if no update is stale."""
        counts = self.staleness
        if not counts.sum():
            return dict.fromkeys(NUMBERS, 0.0)
        ends, values = np.cumsum(counts) / counts.sum(), np.arange(len(counts))
        percentiles = [float(np.searchsorted(ends, part - 1e-12)) for part in (0.5, 0.9, 0.99)]
        mean, most = float(counts @ values / counts.sum()), float(np.flatnonzero(counts)[-1])
        return dict(zip(NUMBERS, (mean, *percentiles, most), strict=True))


def grouped(work: Work, shares: np.ndarray) -> tuple[Busy, ...]:
    """Return the load of links, for groups of nodes with equal numbers of servers and workers.

    Args:
        work: The job.
        shares: Shares of the time in which each node sends and receives, shape (nodes, 2).
    """
    counts = np.stack((work.case.servers, work.case.workers), axis=1)
    kinds, which = np.unique(counts, axis=0, return_inverse=True)
    found = []
    for kind, (servers, workers) in enumerate(kinds):
        group = shares[which.reshape(-1) == kind]
        sends, receives = group.mean(axis=0)
        found.append(Busy(len(group), int(servers), int(workers), float(sends), float(receives)))
    return tuple(sorted(found, key=lambda busy: -max(busy.sends, busy.receives)))


# Finished runs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Measurements of a finished run.

    Attributes:
        hosts: Host name of each rank that trained.
        node_of: Node number of each of these ranks.
        server_ranks: Ranks of its servers; empty if every rank owned a slice.
        parameters: Number of parameters.
        samples: Samples of an epoch.
        workers: Number of workers.
        step_s: Seconds between two batches of a worker.
        staleness: Mean staleness; None in rounds.
    """

    hosts: tuple[str, ...]
    node_of: tuple[int, ...]
    server_ranks: tuple[int, ...]
    parameters: int
    samples: int
    workers: int
    step_s: float
    staleness: float | None


def run_of(summary: Mapping[str, Any], config: Config, samples_per_s: float | None = None) -> Run:
    """Return the measurements of a run.

    Args:
        summary: Contents of its ``summary.json``.
        config: Its job.
        samples_per_s: Samples/s of all workers, if known better than from the summary's mean.

    Raises:
        UserError: If the summary is not of a finished run.
    """
    try:
        nodes = enumerate(summary["nodes"])
        ranks = sorted((rank, k, node["host"]) for k, node in nodes for rank in node["ranks"])
        rate = samples_per_s or summary["samples_per_s"]
        servers = summary["per_server"] if summary["servers"] else []
        return Run(
            tuple(host for _, _, host in ranks), tuple(node for _, node, _ in ranks),
            tuple(server["rank"] for server in servers), summary["parameters"],
            round(summary["samples"] / summary["epochs"]), summary["workers"],
            summary["workers"] * config.batch_size / rate,
            None if config.in_rounds else summary["staleness"]["mean"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise UserError("a summary without times", "that of a run that has trained") from None


def speeds_of(
    summary: Mapping[str, Any], config: Config, given: Speeds, start_s: float = 0.0
) -> Speeds:
    """Return the measured speeds of a run; unknown ones stay as given.

    Each worker's time to compute is known. The time between steps is the rest after the first step:
    neither computing nor pulling, pushing or waiting. On one node, a pull is a copy.

    Args:
        summary: Contents of the run's ``summary.json``.
        config: Its job.
        given: Default speeds.
        start_s: Seconds before its first step.
    """
    rows = [row for row in summary["per_worker"] if row.get("samples") and row.get("compute_s")]
    if not rows:
        raise UserError("a run without computed steps", "one that has trained")
    batches = [row["samples"] / config.batch_size for row in rows]
    each = np.array([row["compute_s"] for row in rows]) / batches
    spent = [sum(row[k] for k in ("compute_s", "pull_s", "push_s", "wait_s")) for row in rows]
    rest = (summary["train_s"] - start_s) * len(rows) - sum(spent)
    owners = [row for row in summary["per_server"] if row.get("busy_s", 0) > LEAST_BUSY_S]
    numbers = summary["parameters"] + sum(dim * n for _, dim, n in tables_of(summary, config) or ())
    nbytes = numbers * np.dtype(config.dtype).itemsize / len(summary["per_server"])
    applied = sum(row["applied"] for row in owners) * nbytes
    copy, pull_s = given.copy, sum(row["pull_s"] for row in rows)
    if len(summary["nodes"]) == 1 and pull_s > LEAST_BUSY_S:
        copy = summary["bytes_pulled"] / pull_s
    return dataclasses.replace(
        given, step_s=float(each.mean()), each=tuple(each / each.mean()),
        between_s=max(0.0, rest / sum(batches)), copy=copy,
        apply=applied / sum(row["busy_s"] for row in owners) if applied else given.apply,
    )  # fmt: skip


def mpi_of(summary: Mapping[str, Any]) -> str:
    """Return the MPI library of a run, as a key of `ROUND_COSTS`."""
    return OPEN_MPI if str(summary.get("mpi")).startswith("Open MPI") else MPICH


def tables_of(summary: Mapping[str, Any], config: Config) -> Tables | None:
    """Return the rows of each table, the numbers of a row, and the rows that a batch needed.

    None if the run's summary does not contain them for all tables.
    """
    tables, servers = summary.get("tables") or {}, summary["per_server"]
    if tables and not all("rows_pushed" in server for server in servers):
        return None
    batches = sum(row.get("samples", 0) for row in summary["per_worker"]) / config.batch_size
    pushed = {name: sum(server["rows_pushed"][name] for server in servers) for name in tables}
    return tuple((t["rows"], t["dim"], pushed[k] / max(1.0, batches)) for k, t in tables.items())


def table_bytes_of(summary: Mapping[str, Any], config: Config) -> int:
    """Return the bytes of the rows of a run's tables, with their slots."""
    if not summary.get("tables"):
        return 0
    vectors = 1 + len(shard_slots(config, rule_of(config)))
    shards = summary["parameters"] * np.dtype(config.dtype).itemsize * vectors
    least = sum(table["changed"] * table["dim"] for table in summary["tables"].values())
    found = sum(server["bytes"] for server in summary["per_server"]) - shards
    # The summary of rounds does not contain them.
    return int(max(found, least * np.dtype(config.dtype).itemsize))
