"""mpips.train with ranks that kill themselves: ``dying.py PLAN WORDS...``.

The plan has ``POINT:RANK:STEP`` between commas. A rank that has died leaves a file of that name in
the current folder, and a job that starts again has it live. Points of a round, in their order:

    half     before the round, as half of the gradient is overwritten
    entered  behind the first barrier
    copying  as old values of the first piece of a slice are being kept
    partly   in the middle of a piece of it
    applied  before the second barrier
    after    behind it

On several nodes, between these:

    summed   as the first sum of its node has begun to leave, behind "entered"
    sending  as the first of its results has begun to leave, behind "partly"
    placing  as it has all results, of which none is in the replica of its node
    up       as it has given the round up, as another one has died
    again    as it begins to make the round again

In mode hybrid, before the first barrier:

    asking    as remote rows have been asked for
    unpushed  before its rows are announced, as half of the gradient is overwritten
    unsent    behind that, before anything leaves for another node
    cut       as the head of its rows has begun to leave, and they never do
    pushed    behind that
    held      likewise; servers apply nothing meanwhile, until they know of the death

And behind the last one:

    evaluating  as the others evaluate
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpips.failover.undo_log import HALVES
from mpips.kernels.atomics import publish
from mpips.kernels.exchange import NUMBER_BITS, PIECE
from mpips.mpi.abort import any_died
from mpips.mpi.start import MPI
from mpips.rounds.crossing import Crossing
from mpips.rounds.loop import RoundEvaluation
from mpips.rounds.node import NodeBarrier
from mpips.rounds.survivable import Slice, SurvivableRound
from mpips.rounds.survivable_nodes import NodesRound
from mpips.tables.hybrid import PushedRows
from mpips.transport.acknowledged import AcknowledgedPushSender
from mpips.transport.channel import Sender
from mpips.transport.push_sender import ShardSender
from mpips.transport.remote_rows import RemoteRows

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


def update_partly(apply: Any, piece: Slice, step: int, *given: Any) -> None:
    """Update a slice but for its end, and a piece of it by half."""
    before, size = [array.copy() for array in piece.live], piece.old.shape[2]
    apply(piece, step, *given)
    number = (piece.params.size - 1) // size // 2
    behind = slice((number + 1) * size, None)
    for old, array, kept in zip(before, piece.live, piece.old[number % HALVES], strict=True):
        array[behind] = old[behind]
        half = array[number * size : behind.start]
        kept[: half.size] = old[number * size : behind.start]
        half[: half.size // 2] += 7
    piece.old[(number + 1) % HALVES] = 99
    publish(piece.words, PIECE, (step << NUMBER_BITS) + number)


def instead(function: Callable[..., Any], *owners: type, name: str = "") -> None:
    """Put a function in the place of methods; it gets the method, then the arguments of it."""
    name = name or function.__name__

    def in_place_of(plain: Any) -> Any:
        return lambda *given, **named: function(plain, *given, **named)

    for owner in owners:
        setattr(owner, name, in_place_of(getattr(owner, name)))


def dying(before: str, after: str, step_of: Callable[..., int]) -> Callable[..., Any]:
    """Return a function that dies before the method that it is put in the place of, or after it."""

    def call_and_die(plain: Any, *given: Any) -> Any:
        die(before, step_of(*given))
        found = plain(*given)
        die(after, step_of(*given))
        return found

    return call_and_die


def half_overwritten() -> None:
    grad[: grad.size // 2] = np.nan


def exchange(plain: Any, self: SurvivableRound, step: int, *given: Any) -> Any:
    global now, grad
    now, grad = step, self.grad
    die("half", step, half_overwritten)
    agreed = plain(self, step, *given)
    die("after", step)
    return agreed


def apply(plain: Any, self: Slice, step: int, *given: Any) -> None:
    die("copying", step, lambda: self.old[0].fill(99))
    die("partly", step, lambda: update_partly(plain, self, step, *given))
    plain(self, step, *given)


def send(plain: Any, self: Crossing, array: np.ndarray, rank: int, tag: int) -> None:
    plain(self, array, rank, tag)
    die("sending" if tag % 2 else "summed", now)


def run(plain: Any, self: Crossing, step: int, *given: Any) -> Any:
    if self.era:
        die("again", step)
    done = plain(self, step, *given)
    if not done:
        die("up", step)
    return done


def push(plain: Any, self: Sender, *given: Any, **named: Any) -> int:
    step = self.seq + 1
    die("unpushed", step, half_overwritten)
    die("held", step, lambda: plain(self, *given, **named))
    plain(self, *given, **named)
    die("pushed", step)
    return step


def send_message(plain: Any, self: Any, slot: int, headers: np.ndarray, body: Any) -> None:
    die("cut", int(headers[0, 1]), lambda: plain(self, slot, headers, body[:1]))
    plain(self, slot, headers, body)


def serve(plain: Any, self: PushedRows) -> Any:
    """Apply nothing as long as a worker that has just died is believed to live."""
    return (any_died() or not any(path.exists() for path in HELD)) and plain(self)


now, grad = 0, np.zeros(0)
HELD = [Path(each) for each in PLAN.split(",") if each.startswith("held")]
instead(exchange, SurvivableRound, NodesRound)
instead(apply, Slice)
instead(send, Crossing)
instead(run, Crossing)
instead(push, Sender)
instead(send_message, ShardSender)
instead(serve, PushedRows)
for owner, name, *points, step_of in (
    (NodeBarrier, "enter", "", "entered", lambda *_: now),
    (NodeBarrier, "leave", "applied", "", lambda *_: now),
    (NodesRound, "done", "placing", "", lambda *_: now),
    (RemoteRows, "begin", "", "asking", lambda *_: now + 1),
    (AcknowledgedPushSender, "send", "unsent", "", lambda self, seq: seq),
    (RoundEvaluation, "run_when_due", "evaluating", "", lambda self, step, epochs: step),
):
    instead(dying(*points, step_of), owner, name=name)
sys.argv = ["mpips.train", *WORDS]
runpy.run_module("mpips.train", run_name="__main__", alter_sys=True)
