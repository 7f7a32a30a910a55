"""Speeds and figures of a finished run, from its ``summary.json``."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpips.config import Config
from mpips.errors import UserError
from mpips.optim import make_rule
from mpips.planning.simulator.model import MPICH, OPEN_MPI, Speeds
from mpips.planning.traffic import Tables

LEAST_BUSY_S = 1e-3  # of a server, from which its rate is taken


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        hosts: Host name of each rank that trained.
        node_of: Node number of each.
        server_ranks: Ranks of its servers; empty where every rank owned a slice.
        parameters: Number of parameters.
        samples: Of an epoch.
        workers: Number of workers.
        step_s: Seconds between two batches of a worker.
        staleness: Mean; None in rounds.
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
    """Read what a run was.

    Args:
        summary: Its ``summary.json``.
        config: Its job.
        samples_per_s: Of all workers, where more is known than the summary's mean.

    Raises:
        UserError: If the summary is not that of a finished run.
    """
    try:
        ranks = {rank: (k, node["host"]) for k, node in enumerate(summary["nodes"])
                 for rank in node["ranks"]}  # fmt: skip
        ranks = {rank: ranks[rank] for rank in sorted(ranks)}
        rate = samples_per_s or summary["samples_per_s"]
        servers = summary["per_server"] if summary["servers"] else []
        return Run(
            tuple(host for _, host in ranks.values()), tuple(node for node, _ in ranks.values()),
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
    """Return the speeds that a run was measured to have; where it says nothing, those given.

    Computing is that of each worker. What is neither computing, pulling, pushing nor waiting, nor
    before the first step, lies between steps. On one node a pull is a copy.

    Args:
        summary: The run's ``summary.json``.
        config: Its job.
        given: The speeds.
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
    """Return which library a run had, as a key of `ROUND_COSTS`."""
    return OPEN_MPI if str(summary.get("mpi")).startswith("Open MPI") else MPICH


def tables_of(summary: Mapping[str, Any], config: Config) -> Tables | None:
    """Return of each table its rows, their numbers, and how many rows a batch needed.

    None where there are tables of which the run does not say that.
    """
    tables, servers = summary.get("tables") or {}, summary["per_server"]
    if tables and not all("rows_pushed" in server for server in servers):
        return None
    batches = sum(row.get("samples", 0) for row in summary["per_worker"]) / config.batch_size
    pushed = {name: sum(server["rows_pushed"][name] for server in servers) for name in tables}
    return tuple((t["rows"], t["dim"], pushed[k] / max(1.0, batches)) for k, t in tables.items())


def table_bytes_of(summary: Mapping[str, Any], config: Config) -> int:
    """Return what the rows of a run's tables took, with all that their rules keep."""
    if not summary.get("tables"):
        return 0
    vectors = 1 + len(make_rule(config.optimizer).slots)
    shards = summary["parameters"] * np.dtype(config.dtype).itemsize * vectors
    least = sum(table["changed"] * table["dim"] for table in summary["tables"].values())
    found = sum(server["bytes"] for server in summary["per_server"]) - shards
    return int(max(found, least * np.dtype(config.dtype).itemsize))  # rounds do not tell it
