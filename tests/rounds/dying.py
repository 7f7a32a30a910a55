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


def update_partly(piece: Slice, step: int, *given: Any) -> None:
    """Update a slice but for its end, and a piece of it by half."""
    before, size = [array.copy() for array in piece.live], piece.old.shape[2]
    APPLY(piece, step, *given)
    number = (piece.params.size - 1) // size // 2
    behind = slice((number + 1) * size, None)
    for old, array, kept in zip(before, piece.live, piece.old[number % HALVES], strict=True):
        array[behind] = old[behind]
        half = array[number * size : behind.start]
        kept[: half.size] = old[number * size : behind.start]
        half[: half.size // 2] += 7
    piece.old[(number + 1) % HALVES] = 99
    publish(piece.words, PIECE, (step << NUMBER_BITS) + number)


def dying(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Return a round's exchange in which this rank dies as planned."""

    def exchange_and_die(self: SurvivableRound, step: int, *given: Any) -> Any:
        global now, grad
        now, grad = step, self.grad
        die("half", step, lambda: self.grad[: self.grad.size // 2].fill(np.nan))
        agreed = exchange(self, step, *given)
        die("after", step)
        return agreed

    return exchange_and_die


def enter(self: NodeBarrier, report: Any) -> None:
    """Die behind the first barrier."""
    ENTER(self, report)
    die("entered", now)


def leave(self: NodeBarrier) -> Any:
    """Die before the second one."""
    die("applied", now)
    return LEAVE(self)


def send(self: Crossing, array: np.ndarray, rank: int, tag: int) -> None:
    """Die as something is on its way."""
    SEND(self, array, rank, tag)
    die("sending" if tag % 2 else "summed", now)


def run(self: Crossing, step: int, *given: Any) -> bool:
    """Die as a round is made again, or has been given up."""
    if self.era:
        die("again", step)
    done = RUN(self, step, *given)
    if not done:
        die("up", step)
    return done


def done(self: NodesRound, *given: Any) -> bool:
    """Die as all results have come."""
    die("placing", now)
    return DONE(self, *given)


def push(self: Sender, *given: Any, **named: Any) -> int:
    """Die before or after rows are announced."""
    step = self.seq + 1
    die("unpushed", step, lambda: grad[: grad.size // 2].fill(np.nan))
    die("held", step, lambda: PUSH(self, *given, **named))
    PUSH(self, *given, **named)
    die("pushed", step)
    return step


def send_rows(self: AcknowledgedPushSender, seq: int) -> None:
    """Die before rows leave for other nodes."""
    die("unsent", seq)
    SEND_ROWS(self, seq)


def send_message(self: ShardSender, slot: int, headers: np.ndarray, body: Any) -> None:
    """Die as a part of a message has begun to leave."""
    args = self, slot, headers, body[:1]
    die("cut", int(headers[0, 1]), lambda: SEND_MESSAGE(*args))
    SEND_MESSAGE(self, slot, headers, body)


def begin(self: RemoteRows, *given: Any) -> Any:
    """Die as remote rows have been asked for."""
    coming = BEGIN(self, *given)
    die("asking", now + 1)
    return coming


def serve(self: PushedRows) -> bool:
    """Apply nothing as long as a worker that has just died is believed to live."""
    return (any_died() or not any(path.exists() for path in HELD)) and SERVE(self)


def run_when_due(self: RoundEvaluation, step: int, epochs: float) -> None:
    """Die as the others evaluate."""
    die("evaluating", step)
    EVALUATE(self, step, epochs)


def apply(self: Slice, step: int, *given: Any) -> None:
    """Die while a slice is updated."""
    die("copying", step, lambda: self.old[0].fill(99))
    die("partly", step, lambda: update_partly(self, step, *given))
    APPLY(self, step, *given)


now, grad = 0, np.zeros(0)
HELD = [Path(each) for each in PLAN.split(",") if each.startswith("held")]
PUSH, SERVE, EVALUATE = Sender.push, PushedRows.serve, RoundEvaluation.run_when_due
ENTER, LEAVE, APPLY = NodeBarrier.enter, NodeBarrier.leave, Slice.apply
SEND, RUN, DONE = Crossing.send, Crossing.run, NodesRound.done
SEND_ROWS, SEND_MESSAGE = AcknowledgedPushSender.send, ShardSender.send_message
BEGIN = RemoteRows.begin
PLACES = {
    NodeBarrier: (enter, leave), Slice: (apply,), Crossing: (run, send), NodesRound: (done,),
    Sender: (push,), ShardSender: (send_message,), PushedRows: (serve,),
    RemoteRows: (begin,), RoundEvaluation: (run_when_due,),
}  # fmt: skip
for owner, functions in PLACES.items():
    for function in functions:
        setattr(owner, function.__name__, function)
AcknowledgedPushSender.send = send_rows  # type: ignore[method-assign]
for kind in (SurvivableRound, NodesRound):
    kind.exchange = dying(kind.exchange)  # type: ignore[method-assign]
sys.argv = ["mpips.train", *WORDS]
runpy.run_module("mpips.train", run_name="__main__", alter_sys=True)
