"""The measure of far rows between hosts: one worker or two, each way, beside raw TCP."""

import pytest
from verdict import check

from mpips.bench import far_rows
from mpips.bench.measure import Options
from mpips.cluster.collectives import gather_all
from mpips.cluster.world import Cluster

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=4, min_nodes=2)]


def test_each_way_has_its_rows(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_rows, "STEPS", 4)
    rows = far_rows.run(cluster, Options(repeats=1, quick=True))
    (found, *_) = gather_all(cluster.comm, [(row.beside, row.case) for row in rows])
    workers = min(2, cluster.node_of.count(1))
    counts = ["1 worker", "2 workers"][:workers]
    due = [
        f"{who}, {way}{codec}"
        for who in counts
        for codec in ("", " by fp16", " by int8")
        for way in ("pull", "pull ahead", "push")
    ]
    told = [case for beside, case in found if beside == "raw TCP"]
    check(cluster.comm, told == due and len(found) == len(due) + 2, found)
    check(cluster.comm, all(row.value > 0 and row.ratio > 0 for row in rows), rows)
