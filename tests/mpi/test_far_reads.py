"""How far shards are read where nobody has said it."""

import pytest
from verdict import check

from mpips.bench.pushpull import Exchange
from mpips.bench.vector import make_job
from mpips.cluster.library import mpi_name
from mpips.cluster.world import Cluster
from mpips.ps import far_choice

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=4, min_nodes=2)]


def test_nodes_of_one_host_read_by_reply_with_open_mpi(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, owners would lose memory by Get; elsewhere it is measured, and here found faster."""
    monkeypatch.setattr(far_choice, "faster", lambda times: "get")
    exchange = Exchange(make_job(cluster, 1000, "async", servers=1))
    exchange.exchange(3)
    way = exchange.far_way
    exchange.free()
    expected = "reply" if "Open MPI" in mpi_name() else "get"
    check(cluster.comm, way == expected, way)
