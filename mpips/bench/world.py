"""What the ranks of one world measure together."""

import datetime
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpips.bench.catalogue import Catalogue
from mpips.bench.measure import Options, Row, aims_for, say_rows, table
from mpips.cluster import ending
from mpips.cluster.agreement import Agreed, everywhere, together
from mpips.cluster.library import check_world, mpi_name
from mpips.cluster.process import cores, cpu_name
from mpips.cluster.start import whole_world
from mpips.cluster.world import Cluster
from mpips.errors import UserError, complain
from mpips.session.metrics import write_json


def run(measures: Catalogue, names: Sequence[str], options: Options, path: Path | None) -> int:
    """Take measures in this world; rank 0 prints the table. Collective: yes.

    Args:
        measures: All that there are.
        names: Of measures; empty for all that fit.
        options: What to do.
        path: File for the rows as JSON, or None.

    Returns:
        The exit code.
    """
    try:
        check_world(whole_world())
        _measure(measures, names, options, path)
    except Agreed as error:
        return refuse(error)
    except UserError as error:  # perhaps on this rank alone
        ending.abort(str(error), 2)
    except BaseException as error:
        ending.abort(ending.raised(error), 1)
    return 0


def _measure(
    measures: Catalogue, names: Sequence[str], options: Options, path: Path | None
) -> None:
    ranks = Cluster(whole_world())
    ranks.limit_threads()
    size = ranks.world, ranks.nodes
    chosen = everywhere(ranks.comm, lambda: measures.choose_for_world(names, *size))
    rows: list[Row] = []
    for measure in chosen:
        for row in measure.run(ranks, options):
            rows += aims_for(options, [row])
            if ranks.rank == 0:
                say_rows(rows[-1:])
    if ranks.rank == 0:
        if path:
            write_json(path, {"machine": facts(), "rows": [row.to_json() for row in rows]})
        print(table(rows), flush=True)
    ranks.barrier()
    ranks.free()


def refuse(error: UserError) -> int:
    """Print an error that every rank has, once; returns the exit code. Collective: yes."""
    comm = whole_world()
    together(comm, None)  # a launcher may kill the others when the first one leaves
    if comm.rank == 0:
        complain(error)
    together(comm, None)
    return 2


def facts() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, MPI, versions, date."""
    import numba
    import numpy

    from mpips import __version__

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(), "cores": cores(), "mpi": mpi_name(),
        "python": platform.python_version(), "numpy": numpy.__version__,
        "numba": numba.__version__, "mpips": __version__,
    }  # fmt: skip
