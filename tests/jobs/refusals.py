"""Runs many jobs that are to be refused in one world: ``refusals.py JOBS.json``.

The file holds a list of command lines. What every rank has made of each of them goes to
``refusals.json`` beside the file: the message, or the exit code of a job that was not refused.
"""

import json
import sys
import time
from pathlib import Path

from mpips.config.command_line import parse_command_line
from mpips.mpi import abort
from mpips.mpi.collective_errors import CollectiveError
from mpips.mpi.start import MPI
from mpips.session import run as session


def refusal(argv: list[str]) -> str:
    try:
        return f"exit code {session.run(parse_command_line(argv), time.perf_counter())}"
    except CollectiveError as error:
        return str(error)


def main(path: Path) -> None:
    found = [MPI.COMM_WORLD.allgather(refusal(argv)) for argv in json.loads(path.read_text())]
    if MPI.COMM_WORLD.rank == 0:
        path.with_name("refusals.json").write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException as error:
        abort.abort(abort.raised(error), 1)
