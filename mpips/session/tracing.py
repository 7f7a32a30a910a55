"""Trace files of ranks in the folder of a run."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from mpips.health.trace_file import CLOCKS, RankFile, Trace, folder_of, jobs_of
from mpips.mpi.collectives import clock_skews, gather_polled
from mpips.mpi.evaluator_link import Link
from mpips.mpi.start import Comm
from mpips.mpi.world import Cluster

JOBS = 8  # number of a run's newest jobs whose traces are kept


@contextmanager
def traced(ranks: Cluster, out: Path, link: Link | None = None) -> Iterator[None]:
    """Trace this rank within the block.

    Collective: the start of the block is; with a link, over evaluators too.

    Args:
        ranks: Ranks on this side of the link.
        out: Folder of the run.
        link: Link between training ranks and evaluators; None without evaluators.
    """
    everyone = ranks.comm if link is None else link.everyone
    host, node = ranks.hosts[ranks.rank], ranks.node_of[ranks.rank]
    mine = host, node, _begin_job(out) if everyone.rank == 0 else 0
    places = gather_polled(everyone, mine, ranks.wait_request)
    folder = folder_of(out, places[0][2])
    description: dict[str, Any] = {"rank": everyone.rank, "host": host}
    evaluates = link is not None and link.evaluates
    if link is not None and evaluates:
        description |= _evaluator(ranks, places[: link.evaluators[0]])
    else:
        description |= {"name": ranks.roles.name(ranks.rank), "node": node}
        description["workers"] = list(ranks.roles.workers)
    with ExitStack() as stack:
        trace = Trace(folder / f"rank-{everyone.rank:05d}", description)
        stack.enter_context(closing(trace))
        first, file = _clocks(ranks, everyone, trace), None
        if everyone.rank == 0:
            file = stack.enter_context(closing(RankFile(folder / CLOCKS, first, "trace")))
        yield
        if evaluates or ranks.failures.left_out:
            return  # collectives fail without all training ranks
        last = _clocks(ranks, ranks.comm, trace)
        if file is not None:
            file.append(json.dumps(last).encode() + b"\n")


def _clocks(ranks: Cluster, compared: Comm, trace: Trace) -> dict[str, Any]:
    """Compare the clocks of the hosts of a communicator. Collective: yes, over it."""
    return {"ahead": clock_skews(ranks, compared, trace.now), "at": trace.now()}


def _begin_job(out: Path) -> int:
    """Create the folder of this job's traces, and return the job's number."""
    before = jobs_of(out)
    for job in before[: 1 - JOBS]:
        shutil.rmtree(folder_of(out, job), ignore_errors=True)
    number = 1 + max(before, default=0)
    with suppress(OSError):  # each rank then reports that it has no trace
        folder_of(out, number).mkdir(parents=True, exist_ok=True)
    return number


def _evaluator(ranks: Cluster, training: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Return the description of an evaluator. Its node is a training node, or a new one."""
    host, own = ranks.hosts[ranks.rank], ranks.node_of[ranks.rank]
    last = max(node for _, node, _ in training)
    node = max((node for name, node, _ in training if name == host), default=last + 1 + own)
    return {"name": f"evaluator {ranks.rank}", "node": node, "workers": []}
