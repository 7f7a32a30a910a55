"""Remote reads that the workers of a node share."""

from collections.abc import Callable

import numpy as np
import pytest
from rig import Rig
from verdict import check

from mpips.mpi.world import Cluster
from mpips.transport import single_flight
from mpips.transport.push import Push

pytestmark = pytest.mark.mpi(min_size=4)

N = 30011
PULLS = 30


def serve(rig: Rig, update: Callable[[], None]) -> None:
    """Update and answer reads until every worker says that it has seen enough."""
    enough = 0
    while enough < len(rig.roles.workers):
        update()
        rig.server.serve_reads()
        rig.cluster.progress()
        for source, kind, payload in rig.cluster.poll():
            if kind == "read":
                rig.server.want_read(source, payload)
            enough += kind == "enough"


class Counting:
    """Updates that leave every parameter equal to the version."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.seq, self.ones = rig, 0, np.ones(N)

    def __call__(self) -> None:
        self.seq += 1
        version = self.rig.server.version
        self.rig.server.apply(Push(0, self.seq, (0, 0, 1), 1, 0.0, version, self.ones))


def pull(rig: Rig, out: np.ndarray, whole: bool = True) -> list[object]:
    """Pull into `out`; returns what is wrong with it.

    Args:
        whole: Whether each element is of one version, even where the read is torn.
    """
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
    rig = Rig(cluster, N, 1, remote=remote, share=True)
    wrong: list[object] = []
    if rig.worker:
        last = -1
        for k in range(PULLS):
            wrong += pull(rig, rig.replicas[k % 2], whole=remote == "reply" or cluster.is_local(0))
            if rig.puller.versions[0] < last:
                wrong.append(("older than the one before", last, rig.puller.versions[0]))
            last = int(rig.puller.versions[0])
        cluster.send(0, "enough")
    else:
        serve(rig, Counting(rig))
    check(cluster.comm, not wrong, wrong[:3])
    rig.free()


@pytest.mark.world(max_size=4, min_nodes=2)
def test_a_fetch_under_way_is_joined(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_flight, "PATIENCE_S", 60.0)  # however long others keep the cores
    rig = Rig(cluster, N, 1, remote="reply", share=True)
    remote = [r for r in rig.roles.workers if not cluster.is_local(0) and cluster.is_local(r)]
    wrong: list[object] = []
    if rig.worker:
        first = cluster.rank == min(remote, default=cluster.rank)
        if first:
            rig.puller.begin(rig.replica)
            rig.puller.fetch()
        if remote:
            cluster.wait_request(cluster.node.Ibarrier())
        if not first:
            rig.puller.begin(rig.replica)
            rig.puller.fetch()
        if remote:  # the first read is not over before
            cluster.wait_request(cluster.node.Ibarrier())
        rig.puller.finish()
        if rig.puller.joined != (not first):
            wrong.append(("joined", rig.puller.joined, remote))
        cluster.send(0, "enough")
    else:
        serve(rig, lambda: None)
    check(cluster.comm, not wrong, wrong)
    rig.free()


@pytest.mark.world(max_size=4, min_nodes=2)
def test_a_neighbour_that_stands_still_is_not_waited_for(cluster: Cluster) -> None:
    rig = Rig(cluster, N, 1, remote="reply", share=True)
    remote = [r for r in rig.roles.workers if not cluster.is_local(0) and cluster.is_local(r)]
    wrong: list[object] = []
    if rig.worker:
        still = len(remote) > 1 and cluster.rank == min(remote)
        if still:
            rig.puller.begin(rig.replica)
        if remote:
            cluster.wait_request(cluster.node.Ibarrier())
        if not still:
            wrong += pull(rig, rig.replica)
            if rig.puller.joined:
                wrong.append("joined a read that was never made")
        if remote:
            cluster.wait_request(cluster.node.Ibarrier())
        if still:
            rig.puller.fetch()
            rig.puller.finish()
        cluster.send(0, "enough")
    else:
        serve(rig, lambda: None)
    check(cluster.comm, not wrong, wrong)
    rig.free()


@pytest.mark.world(max_size=4, min_nodes=2)
def test_fetches_out_of_step_come_into_step(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers fetch at once; whoever ends first begins again, and the other joins that."""
    rig = Rig(cluster, N, 1, remote="get", share=True)
    remote = [r for r in rig.roles.workers if not cluster.is_local(0) and cluster.is_local(r)]
    wrong: list[object] = []
    if len(remote) > 1:
        first, replicas = cluster.rank == min(remote), rig.replicas
        patience_s = 60.0 if first else -1.0  # who has none fetches beside the other
        monkeypatch.setattr(single_flight, "PATIENCE", 0.0)
        monkeypatch.setattr(single_flight, "PATIENCE_S", patience_s)
        if first:
            rig.puller.begin(replicas[0])
        cluster.wait_request(cluster.node.Ibarrier())
        if not first:
            rig.puller.begin(replicas[0])
            rig.puller.fetch()
            rig.puller.advance()
        cluster.wait_request(cluster.node.Ibarrier())  # both are under way
        if first:
            rig.puller.fetch()
            rig.puller.finish()
            rig.puller.begin(replicas[1])
            rig.puller.fetch()
        cluster.wait_request(cluster.node.Ibarrier())
        rig.puller.finish()
        if rig.puller.joined != first:
            wrong.append(("joined", rig.puller.joined, remote))
    if rig.worker:
        cluster.send(0, "enough")
    else:
        serve(rig, lambda: None)
    check(cluster.comm, not wrong, wrong)
    rig.free()
