"""What a program logs on its workers, on its way to the run's ``metrics.jsonl``.

A line is sent to the coordinator between two steps, when no other thread is in MPI for this rank;
what comes before the first step or after the last waits, and is brought at the end of the run.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.checkpoint.run_folder import METRICS
from mpips.errors import UserError
from mpips.session.metrics import Log

if TYPE_CHECKING:
    from mpips.mpi.world import Cluster
    from mpips.planning.job import Job

TEXT_MAX = 200
OWN = ("kind", "time_s", "step", "worker")  # what every line of a worker has
Note = dict[str, Any]


class Notes:
    """A worker's lines that were not sent yet.

    Args:
        worker: Its number.

    Attributes:
        kept: The lines, in the order in which they came.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self.kept: list[Note] = []

    def add(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Keep a line.

        Args:
            step: Updates that the worker's parameters hold.
            values: Numbers and short texts by name.

        Raises:
            UserError: If one is neither, or a name is in use.
        """
        if not values:
            raise UserError("log() of nothing", "numbers by name, such as log(norm=0.5)")
        found = {name: _checked(name, value) for name, value in values.items()}
        self.kept.append({"step": step, "worker": self._worker, **found})

    def send(self, ranks: "Cluster") -> None:
        """Send what is kept to the coordinator. Collective: no. Blocks: no."""
        notes, self.kept = self.kept, []
        ranks.send(ranks.roles.coordinator, "log", notes)


def write_late(job: "Job", notes: Sequence[Note]) -> None:
    """Append lines that came when the run was over, on the coordinator."""
    if not notes:
        return
    with contextlib.suppress(OSError), Log(job.out / METRICS, job.started) as log:
        log.heard("log", notes)


def _checked(name: str, value: Any) -> float | str:
    if name in OWN:
        raise UserError(f"log({name}=...)", "another name: every line has this one")
    if not isinstance(value, str) and np.ndim(value) == 0 and hasattr(value, "item"):
        value = value.item()  # of NumPy, JAX or PyTorch
    if isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= TEXT_MAX):
        return value
    got = f"{len(value)} letters" if isinstance(value, str) else type(value).__name__
    expected = f"a number, or a text of at most {TEXT_MAX} letters"
    raise UserError(f"log({name}=...) of {got}", expected)
