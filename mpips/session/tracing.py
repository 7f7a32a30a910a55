"""The traces of a job's ranks, in the folder of its run."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mpips.checkpoint import place
from mpips.cluster import clocks
from mpips.cluster.collectives import gather_polled
from mpips.cluster.link import Link
from mpips.cluster.trace import Trace
from mpips.cluster.world import Cluster
from mpips.config import Config


@contextmanager
def traced(config: Config, ranks: Cluster, out: Path, link: Link | None = None) -> Iterator[None]:
    """Keep what this rank does within the block, if the job asks for that.

    Collective: yes, its beginning; with a link, over both sides. What an earlier job of the run has
    left is removed.

    Args:
        config: Of the job.
        ranks: Those of this side.
        out: The run's folder.
        link: To the other side, where there are evaluators.
    """
    if not config.trace:
        yield
        return
    folder = out / place.TRACE
    everyone = ranks.comm if link is None else link.everyone
    if everyone.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # of which each rank tells that has no trace then
            folder.mkdir(parents=True, exist_ok=True)
    host, node = ranks.hosts[ranks.rank], ranks.node_of[ranks.rank]
    mine = host, node, clocks.skews(ranks, everyone)
    every = gather_polled(everyone, mine, ranks.wait_request)
    about = {"rank": everyone.rank, "host": host, "ahead": every[0][2].get(host, 0.0)}
    if link is not None and link.evaluates:
        about |= _evaluator(ranks, every[: link.evaluators[0]])
    else:
        about |= {"name": ranks.roles.name(ranks.rank), "node": node}
        about["workers"] = list(ranks.roles.workers)
    trace = Trace(folder / f"rank-{everyone.rank:05d}", about)
    try:
        yield
    finally:
        trace.close()


def _evaluator(ranks: Cluster, training: list[tuple[str, int, Any]]) -> dict[str, Any]:
    """Return what is known of an evaluator; its node is that of ranks that train, or a new one."""
    host, own = ranks.hosts[ranks.rank], ranks.node_of[ranks.rank]
    last = max(node for _, node, _ in training)
    node = max((node for name, node, _ in training if name == host), default=last + 1 + own)
    return {"name": f"evaluator {ranks.rank}", "node": node, "workers": []}
