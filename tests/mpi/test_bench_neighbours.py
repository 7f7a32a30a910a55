"""The measure of bytes on the wire: what workers of a node do together, and whose bytes count."""

import itertools

import pytest
from verdict import check

from mpips.bench import wire
from mpips.cluster.world import Cluster

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.world(max_size=4, min_nodes=2)]
SIZE = 64 << 10
MB = 1_000_000


def test_each_counts_where_it_is_sent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    of_my_node = (cluster.node_of[cluster.rank] + 1) * MB * wire.STEPS
    counter, seen, make_job = itertools.count(0, of_my_node), [], wire.make_job
    monkeypatch.setattr(wire, "bytes_sent", lambda text: {"eth0": next(counter)})

    def told(*args: object, **options: object) -> object:
        seen.append((options["node_aggregation"], options["share_pulls"]))
        return make_job(*args, **options)

    monkeypatch.setattr(wire, "make_job", told)
    rows = wire.neighbours(cluster, SIZE)
    found = [(row.measure, row.value, row.other, row.ratio, row.reach) for row in rows]
    if cluster.node_of.count(1) == 1:  # nobody there has a neighbour
        check(cluster.comm, not rows and not seen, (found, seen))
        return
    home = cluster.node_of[cluster.roles.servers[0]]
    pushed, pulled = 2.0 - home, 1.0 + home
    due = [("wire push", pushed, pushed, 1, 1.7), ("wire pull", pulled, pulled, 1, 1.7)]
    check(cluster.comm, found == due, (found, due))
    check(cluster.comm, seen == [(False, False), (True, True)], seen)
