"""Runs many jobs in one world, to save their start: ``several.py JOBS.json``.

The file holds a list of ``[ranks, command line]``. Each job runs on the first ranks of the world
as if they were all of it, while the others wait. A line ``== job`` stands before what it prints;
its exit code and its seconds go to ``ended.json`` beside the file. The first job that fails in
another way than with an exit code, or that leaves its progress thread, ends them all.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from mpips.config.command_line import parse_command_line
from mpips.errors import complain, write_line
from mpips.mpi import abort, signals
from mpips.mpi.collective_errors import CollectiveError
from mpips.mpi.process import SIZES
from mpips.mpi.start import MPI
from mpips.session import run as session


def wait_for_all(comm: MPI.Comm) -> None:
    """A barrier that leaves the cores to those who still work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.004)


def run(comm: MPI.Intracomm, argv: list[str]) -> int:
    """Run one job on `comm`; returns its exit code."""
    try:
        signals._received.clear()
        code = session.run(parse_command_line(argv), time.perf_counter(), comm)
    except CollectiveError as error:
        complain(error)
        code = 2
    assert "progress" not in [thread.name for thread in threading.enumerate()], argv
    return code


def main(path: Path) -> None:
    world, ended = MPI.COMM_WORLD, []
    for name in SIZES:  # the launcher tells the size of the world, not that of a part of it
        os.environ.pop(name, None)
    for ranks, argv in json.loads(path.read_text()):
        takes_part, begin = world.rank < ranks, time.monotonic()
        if world.rank == 0:
            write_line("== job")
        comm = world.Split(0 if takes_part else MPI.UNDEFINED, world.rank)
        if takes_part:
            code = run(comm, argv)
            comm.Free()
        wait_for_all(world)
        if world.rank == 0:
            ended.append((code, time.monotonic() - begin))
    if world.rank == 0:
        path.with_name("ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    signals.install()
    try:
        main(Path(sys.argv[1]))
    except BaseException as error:
        abort.abort(abort.raised(error), 1)
