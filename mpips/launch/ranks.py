"""Table of a running job's ranks: ``python -m mpips ps RUN``.

RUN is the folder of the job's run. Each rank on this host has a line: its phase, the current call
and its duration; its clock; the pushes that wait for a server; and the time since it was last seen
alive. The clock is the number of a worker's pushes, of updates that a server has applied, of
rounds, or of an evaluator's evaluations. A wait names the ranks that are awaited, if they are on
this host. The exit code is 0 if the job runs here, 1 if it does not, 2 if RUN is no run. Starts no
MPI, and only reads.
"""

import contextlib
import platform
import time
from collections.abc import Sequence
from pathlib import Path

from mpips.checkpoint.run_folder import CONFIG, DONE, LOCK, read_ranks
from mpips.config.jobfile import verbatim
from mpips.errors import Failure, UserError, answer
from mpips.health import status_board
from mpips.health.hang_report import table, trouble
from mpips.health.status_board import Address, StatusBoard
from mpips.mpi.process import GONE


def ranks_table(out: Path) -> str:
    """Return the table of the ranks on this host.

    Raises:
        UserError: If there is no run. If no rank runs on this host, a `Failure`, with exit code 1.
    """
    if not out.is_dir() or not any((out / name).exists() for name in (CONFIG, LOCK)):
        raise UserError(f"{out}", "the folder of a run", "give the one that --out says")
    where, host = read_ranks(out), platform.node()
    now = time.perf_counter()
    boards = open_boards(where, host)
    found = [one for board in boards for one in board.read()]
    if any(trouble(one) != GONE for one in found):
        whole = sum(board.job[status_board.COUNT] for board in boards) == len(where)
        others = sorted({other for other, _, _ in where} - {host})
        more = f"further ranks are on {', '.join(others)}\n" if others else ""
        return table(found, boards[0].job[status_board.COORDINATOR], host, now, whole) + more
    raise _absent(out, where, host)


def open_boards(where: Sequence[Address], host: str) -> list[StatusBoard]:
    """Return the status boards on this host. Evaluators have a board of their own.

    Args:
        where: Addresses of the ranks' boards. A board is opened through its first rank that is
            alive.
        host: Name of this host.
    """
    boards, seen = list[StatusBoard](), set[int]()
    for other, pid, file in where:
        if other == host and file >= 0 and pid not in seen:
            with contextlib.suppress(OSError):
                boards.append(StatusBoard.open(pid, file))
                seen |= {one.pid for one in boards[-1].read()}
    return boards


def _absent(out: Path, where: Sequence[Address], host: str) -> UserError:
    """Return the error that says why the table is empty."""
    hosts = sorted({other for other, _, _ in where})
    if (out / DONE).exists():
        return Failure(f"the job in {out} has ended, and is complete", "one that runs")
    if hosts and host not in hosts:
        remedy = f"ask there: it has ended, or runs on {', '.join(hosts)}"
        return Failure(f"the job in {out} is not on {host}", "one of this host", remedy)
    if where:
        remedy = "--resume goes on; a job of another user is not seen"
        return Failure(f"the job in {out} has ended", "one that runs", remedy)
    return Failure(f"no job has begun in {out}", "one that runs", "ask again in a second")


def show(argv: Sequence[str]) -> str:
    """Return the table that a command line asks for.

    Raises:
        UserError: As `ranks_table`.
    """
    parser = verbatim("python -m mpips ps", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    return ranks_table(parser.parse_args(argv).run)


def main(argv: Sequence[str]) -> int:
    """Print the table, and return the exit code."""
    return answer(show, argv)
