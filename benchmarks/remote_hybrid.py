"""Mode hybrid beside the other modes that train tables, between hosts, with a click model (DLRM).

As `benchmarks.hybrid`, in a world of one server and workers on several hosts. All hosts must see
the first rank's folder for temporary files.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.hybrid import Case, compared, given_of
from mpips.errors import counted
from mpips.mpi.world import Cluster
from mpips.tools.bench.jobs import temporary_folder
from mpips.tools.bench.measure import Options, Row


def run(cluster: Cluster, options: Options) -> Iterator[Row]:
    """Compare the modes. Collective: yes."""
    from benchmarks.clicks_program import make_runs

    workers = cluster.world - 1
    with temporary_folder() as mine:
        folder = Path(cluster.share(str(mine), 0))
        found = make_runs(folder, **given_of(Case("DLRM", 0.01, workers), options))
        cluster.barrier()
    world = f"{counted(workers, 'worker')}, {counted(cluster.nodes, 'node')}"
    yield from compared(f"DLRM, {world}", found)
