"""Rows of mode hybrid between rounds, without the loop around them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from test_rounds import INFO, TINY, Given
from verdict import check

from mpips.config import Config
from mpips.datasets.ledger import Range
from mpips.layout.roles import assign
from mpips.layout.tables import Table, Zeros
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.rounds.base import Transfers
from mpips.tables.hybrid import HybridTables

pytestmark = pytest.mark.mpi
ROWS = np.arange(40)
BATCH: Range = (0, 0, 1)


class Counted(Given):
    """One row counts the pushes as well as another."""

    tables = {"rows": Table(len(ROWS), 2, Zeros())}  # noqa: RUF012


def make_job(cluster: Cluster, bound: int) -> Job:
    config = dataclasses.replace(
        Config(), mode="hybrid", optimizer="sgd", lr=1.0, dtype="float64", staleness_bound=bound
    )
    cluster.roles = assign("hybrid", cluster.hosts, cluster.node_of, max(1, cluster.world // 3))
    return Job(config, cluster, INFO, None, Counted(TINY, config), Path("unused"), 0)


def push(tables: HybridTables, step: int) -> None:
    """Add one to every row, in the round behind round `step`."""
    assert tables.rows is not None
    tables.rows.begin(step + 1)
    tables.rows.push("rows", ROWS, np.full((len(ROWS), 2), -1.0))
    tables.pusher.push(BATCH, 1, 0.0, 1.0)


def read(tables: HybridTables) -> np.ndarray:
    assert tables.rows is not None
    return tables.rows.pull("rows", ROWS)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_rows_hold_what_the_bound_says_and_no_later_round(cluster: Cluster, bound: int) -> None:
    """Servers that do nothing hold workers up as late as may be; and take no later round's rows."""
    if cluster.world == 1:
        pytest.skip("leaves no worker")
    job, wrong = make_job(cluster, bound), list[object]()
    tables = HybridTables(job, Transfers(cluster))
    owned, workers = tables.owned, len(cluster.roles.workers)
    if owned is not None:
        owned.fill(job)
        cluster.serving = None
        tables.of_epoch(0, 0)
        tables.of_epoch(0, 0)
    cluster.barrier()
    free = 1 if bound == 0 else 2  # steps that no server has to have a part in
    if owned is None:
        for step in range(free):
            tables.pusher.begin_step(step)
            push(tables, step)
        if any(map(cluster.is_local, cluster.roles.servers)) and tables.pusher.may_begin(free):
            wrong.append(f"step {free} may begin")
    cluster.barrier()
    if owned is not None:
        cluster.serving = owned.serve
    else:
        for step in range(free, 2):
            tables.pusher.begin_step(step)
            push(tables, step)
        tables.pusher.begin_step(2)
        found = read(tables)
        if not workers * (2 - bound) <= found.min() <= found.max() <= 2 * workers:
            wrong.append(found)
        push(tables, 2)
    cluster.barrier()
    if owned is not None:
        tables.settle(2)
        params = [served.changed_rows().params for served in tables.owner.tables]
        wrong += [rows for rows in params if (rows != 2 * workers).any()]
    cluster.barrier()
    if owned is not None:
        tables.of_epoch(0, 0)
    tables.settle(3)
    if owned is None and (read(tables) != 3 * workers).any():
        wrong.append(read(tables))
    if not 0 <= tables.distance_max <= bound:
        wrong.append(tables.distance_max)
    cluster.barrier()
    check(cluster.comm, not wrong, wrong[:3])
    tables.free()
