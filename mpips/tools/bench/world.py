"""Measures that all ranks of one world take together."""

import datetime
import platform
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mpips.errors import Exit, UserError
from mpips.mpi import abort
from mpips.mpi.collective_errors import CollectiveError, raise_on_all
from mpips.mpi.collectives import begin_barrier, cluster_subset, free
from mpips.mpi.process import cores, cpu_name
from mpips.mpi.start import check_world, mpi_name, whole_world
from mpips.mpi.world import Cluster
from mpips.session.metrics import write_json
from mpips.tools.bench.measure import Catalogue, Options, Row, say_row, table

T = TypeVar("T")
Rows: TypeAlias = Generator[Row, None, T]


def run(measures: Catalogue, names: Sequence[str], options: Options, path: Path | None) -> int:
    """Take measures in this world; rank 0 prints the table. Collective: yes.

    Args:
        measures: All measures.
        names: Names of the measures to take; empty for all that fit this world.
        options: Options of the bench.
        path: File for the rows as JSON, or None.

    Returns:
        0.

    Raises:
        CollectiveError: If a measure cannot be taken in this world.
    """
    try:
        check_world(whole_world())
        ranks = Cluster(whole_world())
        ranks.limit_threads()
        size = ranks.world, ranks.nodes
        rows: list[Row] = []
        for measure in raise_on_all(ranks.comm, lambda: measures.choose(names, *size)):
            work = partial(measure.run, options=options)
            alone = measure.worlds == (1,)
            for row in among(ranks, (0,), work) if alone else work(ranks):
                rows.append(options.aimed(row))
                if ranks.rank == 0:
                    say_row(rows[-1])
        if ranks.rank == 0:
            if path:
                write_json(path, {"machine": facts(), "rows": [row.to_json() for row in rows]})
            print(table(rows), flush=True)
        ranks.barrier()
        ranks.free()
    except CollectiveError:
        raise
    except UserError as error:  # perhaps only on this rank
        abort.abort(str(error), Exit.REFUSED)
    except BaseException as error:
        abort.abort(abort.raised(error), Exit.FAILED)
    return 0


def among(
    cluster: Cluster, ranks: Sequence[int], work: Callable[[Cluster], Rows[T]]
) -> Rows[T | None]:
    """Call `work` on some ranks, each as a node of its own, while the others sleep.

    Args:
        cluster: All ranks.
        ranks: The ranks that work.
        work: Function of the cluster of these ranks.

    Yields:
        The rows of `work`, on these ranks.

    Returns:
        The value of `work` on these ranks, and None on the others.

    Collective: yes.
    """
    value, comm = None, cluster_subset(cluster, ranks)
    if cluster.rank in ranks:
        subset = Cluster(comm, node_size=1)
        value = yield from work(subset)
        subset.free()
    free(comm)
    done = begin_barrier(cluster.comm)
    while not done.Test():
        time.sleep(0.02)
    return value


def facts() -> dict[str, Any]:
    """Return facts on which the figures depend: processor, cores, MPI, versions, date."""
    import numba
    import numpy

    from mpips import __version__

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(), "cores": cores(), "mpi": mpi_name(),
        "python": platform.python_version(), "numpy": numpy.__version__,
        "numba": numba.__version__, "mpips": __version__,
    }  # fmt: skip
