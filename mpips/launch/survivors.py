"""Whether ranks go on where others die, by User Level Failure Mitigation of Open MPI."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpips.config.command_line import load
from mpips.errors import UserError
from mpips.launch.hosts import is_srun, launcher_words
from mpips.launch.mpirun import (
    SURVIVING,
    default_launcher,
    is_open_mpi,
    survivors_launcher,
    trial,
)
from mpips.launch.placement import Placement

if TYPE_CHECKING:
    from mpips.launch.supervise import Order

FABRICS = "/sys/class/infiniband/"


def survivors(order: "Order", place: Placement | None) -> tuple[list[str], str]:
    """Return the launcher, with its options, of ranks that go on; empty with why it is.

    Args:
        order: What is to be run.
        place: Where, if hosts are given: the launcher is tried there. It is not told of them yet.
    """
    why = alone(order)
    if why:
        return [], why
    if place is None:
        return survivors_launcher(), ""
    words = [*(order.launcher or default_launcher(hosts=True)), *SURVIVING]
    there = launcher_words(words, place.used, place.reach.agent)
    why = refusal(there, place.ranks, order.survives)
    return ([] if why else words), why


def alone(order: "Order") -> str:
    """Return why MPI is not to let ranks go on where others die; empty if it is, and can.

    On hosts that are given, it is not known yet whether it can.
    """
    crew, launcher = order.crew, order.launcher
    if crew is None and launcher:
        return "with --mpirun a death ends all ranks"
    if launcher and is_srun(launcher[0]):
        return "srun ends all ranks"
    if not is_open_mpi(*launcher[:1]):
        return "this MPI ends all ranks"
    if not goes_on(order):
        return "it is a program without --ft" if order.is_program else "its mode needs all ranks"
    if crew is None and not survivors_launcher():
        return "this Open MPI ends all ranks"
    return ""


def goes_on(order: "Order") -> bool:
    """Whether the job is of a mode that may go on when a rank dies: one without rounds."""
    if order.is_program:
        return order.survives  # nobody knows its modes before it runs
    try:
        return load(order.words).mode in ("async", "ssp")
    except UserError:
        return False  # the ranks say what is wrong


def refusal(launcher: Sequence[str], ranks: int, fabrics: bool) -> str:
    """Return why ranks on several hosts are not to go on when others die; empty if they can.

    Processes that do nothing are started there to find out.

    Args:
        launcher: `SURVIVING` among its options, and the hosts.
        ranks: How many.
        fabrics: Whether hosts may have InfiniBand, which Open MPI does not use then.
    """
    tried = trial([*launcher, "-n", f"{ranks}", "sh", "-c", f"ls -d {FABRICS}* 2> /dev/null; true"])
    if tried is None:
        return "Open MPI's mpirun hung twice as it was tried"
    if tried.returncode != 0:
        return "this Open MPI ends all ranks"
    if FABRICS in tried.stdout and not fabrics:
        return "Open MPI would leave InfiniBand aside to go on without it, which --ft allows"
    return ""
