"""Train a model: ``mpirun -n 8 python -m mpips.train [JOB.toml] [--option value ...]``."""

import time

STARTED = time.perf_counter()

from mpips import signals  # noqa: E402  (handlers are installed before the heavy imports)

if __name__ == "__main__":
    signals.install()

import os  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from mpips import config as jobs  # noqa: E402
from mpips.errors import UserError  # noqa: E402

if TYPE_CHECKING:
    from mpips.config import CommandLine, Config

LAUNCHED = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def main(argv: Sequence[str]) -> int:
    """Run one job on all ranks of the world; returns the exit code.

    Without a launcher, what needs no MPI (help, a mistake on the command line) starts none.
    """
    rank = next((os.environ[name] for name in LAUNCHED if name in os.environ), None)
    try:
        line = jobs.parse_command_line(argv)
        text = jobs.requested_text(line, None)
        config = None if text else _first_config(line)
        text = text or (jobs.requested_text(line, config) if not _resumes(config) else None)
    except UserError as error:
        return _refuse(error, rank)
    if text is not None:
        if rank in (None, "0"):
            print(text, end="")
        return 0
    return _start(line)


def _first_config(line: "CommandLine") -> "Config":
    return jobs.resolve(line.options, jobs.read_toml(line.job) if line.job else None)


def _resumes(config: "Config | None") -> bool:
    return config is not None and bool(config.resume)


def _refuse(error: UserError, rank: str | None) -> int:
    """Print an error that all ranks have, once, and return the exit code."""
    if rank is not None:
        from mpips.cluster import MPI

        rank = str(MPI.COMM_WORLD.rank)
        MPI.COMM_WORLD.Barrier()  # a launcher may kill the others when the first one leaves
    if rank in (None, "0"):
        print(f"mpips: {error}", file=sys.stderr, flush=True)
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
    if rank is not None:
        MPI.COMM_WORLD.Barrier()
    return 2


def _start(line: "CommandLine") -> int:
    from mpips import cluster, session

    try:
        return session.run(line, STARTED)
    except cluster.Agreed as error:
        return _refuse(error, "")
    except UserError as error:  # on this rank alone
        cluster.abort(f"mpips: {error}", 2)
    except BaseException:
        cluster.abort_with_traceback()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
