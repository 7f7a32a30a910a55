"""The measure of a link: its rows come one size after the other."""

import pytest
from verdict import check

from mpips.bench import link
from mpips.bench.measure import Options, Row
from mpips.cluster.world import Cluster

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=2, min_nodes=2)]


def test_rows_are_told_as_they_come(cluster: Cluster) -> None:
    told = list[list[Row]]()
    found = link.run(
        cluster, Options(repeats=1, quick=True, tell=lambda rows: told.append([*rows]))
    )
    first = [row for rows in told for row in rows]
    good = len(told) == 3 and first == found[:-1] and found[-1].measure == "far round"
    check(cluster.comm, good, told)
