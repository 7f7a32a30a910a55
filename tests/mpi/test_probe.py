"""What a start measures: the same on every rank, and of the right size."""

import math
from typing import Any

import numpy as np
import pytest
from verdict import check

from mpips.codecs import make_codec, warm
from mpips.mpi.world import Cluster
from mpips.planning.choice import RAW
from mpips.session import probe
from mpips.tools.bench.vector import make_job

SIZE = 1 << 18  # parameters


def start(cluster: Cluster, size: int = SIZE, **options: Any) -> probe.Choice:
    return probe.choose_codecs(make_job(cluster, size, "async", servers=1, **options))


@pytest.mark.mpi(min_size=2)
@pytest.mark.world(max_size=4, min_nodes=2)
def test_links_are_measured_alike_on_all_ranks(cluster: Cluster) -> None:
    found = probe.measure_links(cluster)
    check(cluster.comm, len(set(cluster.comm.allgather(found))) == 1, found)
    check(cluster.comm, 0 < found.latency_s < 1, found)
    check(cluster.comm, 1e5 < found.bytes_per_s < 1e13, found)
    ranks = np.bincount(cluster.node_of)
    cores = cluster.comm.allgather(cluster.cores_a_rank)
    check(cluster.comm, np.allclose(found.cores, ranks * cores[0]), found)


@pytest.mark.mpi(min_size=1)
@pytest.mark.world(max_size=4)
def test_codecs_are_measured_alike_on_all_ranks(cluster: Cluster) -> None:
    codecs = [make_codec(name) for name in ("none", "fp16", "int8", "topk")]
    for codec in codecs:
        warm(codec, "float32")
    found = probe.measure_codecs(cluster, codecs, 1 << 16, 1 << 20, np.dtype("f4"))
    check(cluster.comm, len(set(map(repr, cluster.comm.allgather(found)))) == 1, found)
    check(cluster.comm, found.pop(None) == RAW)
    check(cluster.comm, all(0 < c.pack < math.inf and 0 < c.unpack < math.inf
                            for c in found.values()), found)  # fmt: skip
    ratios = [round(c.ratio, 3) for c in found.values()]
    check(cluster.comm, ratios == [0.5, 0.252, 0.02], ratios)


@pytest.mark.mpi(min_size=2)
@pytest.mark.world(max_size=4, min_nodes=2)
def test_all_ranks_choose_the_same_of_what_is_open(cluster: Cluster) -> None:
    found = start(cluster, codec="auto", pull_codec="auto")
    check(cluster.comm, len(set(cluster.comm.allgather((found.push, found.pull)))) == 1, found)
    check(cluster.comm, len(found.predicted) == 16, found.predicted)
    taken, none = found.predicted[found.push, found.pull], found.predicted["none", "none"]
    check(cluster.comm, taken <= none and len(found.lines) == 4, found)
    found = start(cluster, codec="int8", pull_codec="auto", far_read="get")
    check(cluster.comm, set(found.predicted) == {("int8", "none")}, found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.world(max_size=4)
def test_small_parameters_and_one_node_need_no_measuring(cluster: Cluster) -> None:
    whole = Cluster(cluster.comm, cluster.world)
    for ranks, size, why in ((whole, SIZE, probe.APART), (cluster, 1000, probe.SMALL)):
        found = start(ranks, size, codec="auto", pull_codec="auto")
        why = why if ranks.nodes > 1 else probe.APART
        check(cluster.comm, found.predicted == {}, found)
        line = f"codecs chosen: pushes none, pulls none: {why}"
        check(cluster.comm, found.lines == (line,), found)
    whole.barrier()
    whole.free()
