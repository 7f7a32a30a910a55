"""mpips.train with ranks that kill themselves: ``dying.py PLAN WORDS...``.

The plan has ``POINT:RANK:STEP`` between commas. A rank that has died leaves a file of that name in
the current folder, and a job that starts again has it live. Points of a round, in their order:

    half     before the round, as half of the gradient is overwritten
    entered  behind the first barrier
    copying  as a slice is half copied
    partly   as a slice is half updated
    applied  before the second barrier
    after    behind it
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpips.kernels.atomics import publish
from mpips.mpi.start import MPI
from mpips.rounds import survivable
from mpips.rounds.node import NodeBarrier
from mpips.rounds.survivable import COPIED, Slice, SurvivableRound

PLAN, *WORDS = sys.argv[1:]
DEATHS = {
    (point, int(step)): Path(f"{point}:{rank}:{step}")
    for point, rank, step in (each.split(":") for each in PLAN.split(","))
    if int(rank) == MPI.COMM_WORLD.rank
}


def die(point: str, step: int, last: Callable[[], object] = lambda: None) -> None:
    """Die after `last`, if the plan says so."""
    path = DEATHS.get((point, step))
    if path is not None and not path.exists():
        path.touch()
        last()
        os.kill(os.getpid(), signal.SIGKILL)


def copy_only(piece: Slice, step: int) -> None:
    """Copy a slice as `Slice.apply` does, and update half of it."""
    for array, copy in zip(piece.live, piece.copies, strict=True):
        np.copyto(copy, array)
    publish(piece.copied, COPIED, step)
    piece.params[: piece.params.size // 2] += 7


class Dying(SurvivableRound):
    """Rounds in which this rank dies as planned."""

    def exchange(self, step: int, *given: Any) -> Any:
        global now
        now = step
        die("half", step, lambda: self.grad[: self.grad.size // 2].fill(np.nan))
        agreed = super().exchange(step, *given)
        die("after", step)
        return agreed


def enter(self: NodeBarrier, report: Any) -> None:
    """Die behind the first barrier."""
    ENTER(self, report)
    die("entered", now)


def leave(self: NodeBarrier) -> Any:
    """Die before the second one."""
    die("applied", now)
    return LEAVE(self)


def apply(self: Slice, step: int, *given: Any) -> None:
    """Die while a slice is updated."""
    die("copying", step, lambda: self.copies.fill(99))
    die("partly", step, lambda: copy_only(self, step))
    APPLY(self, step, *given)


now = 0
ENTER, LEAVE, APPLY = NodeBarrier.enter, NodeBarrier.leave, Slice.apply
for owner, function in ((NodeBarrier, enter), (NodeBarrier, leave), (Slice, apply)):
    setattr(owner, function.__name__, function)
survivable.SurvivableRound = Dying  # type: ignore[misc]
sys.argv = ["mpips.train", *WORDS]
runpy.run_module("mpips.train", run_name="__main__", alter_sys=True)
