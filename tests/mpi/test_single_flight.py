"""Remote reads that the workers of a node share."""

import numpy as np
import pytest
from rig import Rig
from test_store import Busy

from mpips.mpi.world import Cluster
from mpips.transport import single_flight

pytestmark = pytest.mark.mpi(min_size=4)

N = 30011
PULLS = 30


def pull(rig: Rig, out: np.ndarray, whole: bool = True) -> list[object]:
    """Pull into `out`; returns what is wrong: with half an element of a torn read if `whole`."""
    torn = rig.puller.torn
    version = int(rig.puller.pull(out)[0])
    low, high = out.min(), out.max()
    torn = rig.puller.torn - torn
    if (low < version and (whole or not torn)) or (not torn and high != version):
        return [(version, low, high)]
    return []


@pytest.mark.parametrize("remote", ["get", "reply"])
@pytest.mark.world(max_size=4, min_nodes=2)
def test_what_is_joined_is_what_was_fetched(cluster: Cluster, remote: str) -> None:
    with Rig(cluster, N, 1, remote=remote, share=True) as rig:
        if rig.worker:
            last = -1
            for k in range(PULLS):
                rig.wrong += pull(
                    rig, rig.replicas[k % 2], whole=remote == "reply" or cluster.is_local(0)
                )
                if rig.puller.versions[0] < last:
                    rig.wrong.append(("older than the one before", last, rig.puller.versions[0]))
                last = int(rig.puller.versions[0])
            rig.see_enough()
        else:
            rig.serve_reads(Busy(rig))


@pytest.mark.world(max_size=4, min_nodes=2)
def test_a_read_is_joined_if_its_fetch_is_under_way(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_flight, "PATIENCE_S", 60.0)  # however long others keep the cores
    with Rig(cluster, N, 1, remote="reply", share=True) as rig:
        remote = [r for r in rig.roles.workers if not cluster.is_local(0) and cluster.is_local(r)]
        if rig.worker:
            first = cluster.rank == min(remote, default=cluster.rank)
            for turn in (True, False):  # no fetch is over before all have begun
                if first == turn:
                    rig.puller.begin(rig.replica)
                    rig.puller.fetch()
                if remote:
                    cluster.wait_request(cluster.node.Ibarrier())
            rig.puller.finish()
            if rig.puller.remote.joined != (not first):
                rig.wrong.append(("joined", rig.puller.remote.joined, remote))
            rig.see_enough()
        else:
            rig.serve_reads()
