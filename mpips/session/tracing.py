"""The traces of a job's ranks, in the folder of its run."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpips.checkpoint import place
from mpips.cluster import clocks
from mpips.cluster.trace import Trace
from mpips.planning.job import Job


@contextmanager
def traced(job: Job) -> Iterator[None]:
    """Keep what this rank does within the block, if the job asks for that.

    Collective: yes, its beginning. What an earlier job of the run has left is removed.
    """
    if not job.config.trace:
        yield
        return
    ranks, folder = job.cluster, job.out / place.TRACE
    if ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # of which each rank tells that has no trace then
            folder.mkdir(parents=True, exist_ok=True)
    ahead = ranks.share(clocks.skews(ranks), 0)
    host = ranks.hosts[ranks.rank]
    about = {
        "rank": ranks.rank, "name": ranks.roles.name(ranks.rank), "host": host,
        "node": ranks.node_of[ranks.rank], "ahead": ahead.get(host, 0.0),
        "workers": list(ranks.roles.workers),
    }  # fmt: skip
    trace = Trace(folder / f"rank-{ranks.rank:05d}", about)
    try:
        yield
    finally:
        trace.close()
