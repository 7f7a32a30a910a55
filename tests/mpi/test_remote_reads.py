"""Reads of remote shards: which way, when they have come, and those that a node's workers share."""

import pytest
from rig import Rig
from test_store import Busy, look
from verdict import check

from mpips.mpi.start import mpi_name
from mpips.mpi.world import Cluster
from mpips.ps import assemble
from mpips.tools.bench.pushpull import Exchange
from mpips.tools.bench.vector import make_job

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=4, min_nodes=2)]


def test_nodes_of_one_host_read_by_reply_with_open_mpi(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, owners would lose memory by Get; elsewhere it is measured, and here found faster."""
    monkeypatch.setattr(assemble, "faster", lambda times: "get")
    exchange = Exchange(make_job(cluster, 1000, "async", servers=1))
    exchange.exchange(3)
    way = exchange.remote_way
    exchange.free()
    expected = "reply" if "Open MPI" in mpi_name() else "get"
    check(cluster.comm, way == expected, way)


@pytest.mark.parametrize(("remote", "share"), [("get", False), ("reply", False), ("get", True)])
def test_a_read_is_not_here_before_it_is_asked_for(
    cluster: Cluster, remote: str, share: bool
) -> None:
    """Nor where one before it has come whole."""
    with Rig(cluster, 1003, 1, remote=remote, share=share) as rig:
        if rig.worker:
            for k in range(3):
                rig.puller.begin(rig.replica)
                rig.expect(not (rig.puller.looks_ahead and rig.puller.advance()), k)
                rig.puller.fetch()
                rig.puller.finish()
            rig.finish()
        else:
            rig.serve(rig.server.apply)
        cluster.barrier()
    with pytest.raises(KeyError):
        rig.window.view(cluster.rank, "header")


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("remote", ["get", "reply"])
def test_what_is_joined_is_what_was_fetched(cluster: Cluster, remote: str) -> None:
    """Which fetches are joined: tests/transport/test_single_flight_reads.py."""
    with Rig(cluster, 30011, 1, remote=remote, share=True) as rig:
        if rig.worker:
            last = -1
            for k in range(30):
                whole = remote == "reply" or cluster.is_local(0)
                look(rig, rig.replicas[k % 2], whole)
                rig.expect(rig.puller.versions[0] >= last, "older than the one before", last)
                last = int(rig.puller.versions[0])
            rig.see_enough()
        else:
            rig.serve_reads(Busy(rig))
