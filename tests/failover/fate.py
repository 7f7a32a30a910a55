"""A server that is killed at a chosen one of the moments at which it changes shared memory."""

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headers import pack

from mpips.kernels import atomics, exchange, rule_loops
from mpips.kernels.atomics import observe
from mpips.kernels.vectors import addresses_of
from mpips.layout.roles import Roles
from mpips.optim import rule, rules
from mpips.ps import local_pushes
from mpips.ps.local_pushes import LocalPushes
from mpips.ps.shard import Server
from mpips.transport.push import HEADER_WORDS, Push

WORKERS, BASE = 2, 7  # the version that a shard begins with
RANKS: Any = SimpleNamespace(rank=1, roles=Roles((0, 1), (2, 3)), nodes=1)


def rest_of(server: Server, all_pushes: Sequence[Push]) -> Sequence[Push]:
    """Return the pushes, made by both workers in turn, that are not in the ledger."""
    done = sum(observe(server.applied, worker) for worker in range(WORKERS))
    assert done == server.version - BASE
    return all_pushes[done:]


def finder(all_pushes: Sequence[Push]) -> Callable[[int, int], Push]:
    """Return what finds a push by its worker and its number."""
    return lambda worker, seq: all_pushes[(seq - 1) * WORKERS + worker]


def apply_all(
    server: Server, pushes: Sequence[Push], by_loop: bool, begun: Callable[[], object] = int
) -> None:
    """Apply pushes, each by itself or by the loop of a node's pushes; tells when it begins."""
    if by_loop:
        apply_by_loop(server, pushes, begun)
        return
    begun()
    for push in pushes:
        server.apply(push)


def apply_by_loop(server: Server, pushes: Sequence[Push], begun: Callable[[], object]) -> None:
    """Apply pushes that both workers have announced, two each at a time."""
    headers = np.zeros((WORKERS, 2, HEADER_WORDS), "i8")
    versions, announced = np.zeros((WORKERS, 2, 1), "i8"), np.array(server.ledger)[:, None]
    grads = np.zeros((WORKERS, 2, server.params.size), server.params.dtype)
    places = [addresses_of([*headers[k], *versions[k], *grads[k]]) for k in range(WORKERS)]
    receiver: Any = SimpleNamespace(
        workers=np.arange(WORKERS), pushed=addresses_of(announced), places=np.array(places)
    )
    receiver.next = pushes[0].worker if pushes else 0
    loop = LocalPushes(server, receiver, 1.0)
    begun()
    for at in range(0, len(pushes), 2 * WORKERS):
        some = pushes[at : at + 2 * WORKERS]
        for push in some:
            slot = push.worker, push.seq % 2
            pack(headers[slot], push.worker, push.seq, push.batch, 1, 0.0, push.number, 1.0)
            versions[slot], grads[slot] = push.version, push.grad
            announced[push.worker] = push.seq
        assert loop.apply(None, 60.0, waits=False) == len(some)


def killed(
    server: Server, rest: Sequence[Push], chance: random.Random, most_s: float,
    by_loop: bool = False,
) -> bool:  # fmt: skip
    """Apply pushes in a process that is killed at some moment; returns whether it was in time."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        apply_all(server, rest, by_loop, lambda: os.write(there, b"begun"))
        os._exit(0)
    os.close(there)
    os.read(here, 5)
    os.close(here)
    time.sleep(chance.uniform(0, most_s))
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


class Death(BaseException):
    """Of the server."""


class Fate:
    """Counts what a server does to shared memory, and kills it when no moment is `left` to it."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def passes(self) -> None:
        """Count a moment; raises `Death` at the last one."""
        self.left -= 1
        if self.left < 0:
            raise Death

    def publish(self, words: np.ndarray, index: int, value: int) -> None:
        self.passes()
        atomics.publish(words, index, value)

    def store_ordered(self, words: np.ndarray, index: int, value: int) -> None:
        self.passes()
        words[index] = value

    def calls(self, step: Any) -> dict[str, Any]:
        """Return what a loop that keeps old values calls: it dies before it writes a number."""
        return {"store_ordered": self.store_ordered}

    def undoable(self, step: Any, others: int = 0) -> Callable[..., None]:
        """Return such a loop in Python; see `mpips.kernels.rule_loops.undoable`."""
        loop = rule_loops.undoable(step, others).function
        return FunctionType(loop.__code__, {**loop.__globals__, **self.calls(step)})

    def serving(self, step: Any) -> Callable[..., int]:
        """Return the loop of a node's pushes in Python; see `mpips.kernels.exchange.serving`."""
        loop = exchange.serving(step).function
        own = {"array_at": array_at, "now_ns": time.perf_counter_ns, "publish": self.publish}
        names = {**loop.__globals__, **own, **self.calls(step)}
        return FunctionType(loop.__code__, names)

    def patch_pieces(self, patch: pytest.MonkeyPatch) -> None:
        """Have a server die before the number of each piece of its shard is written."""
        for module in (rule, rules):
            patch.setattr(module, "undoable", self.undoable)
        patch.setattr(local_pushes, "serving", self.serving)


def array_at(address: int, like: np.ndarray, size: int) -> np.ndarray:
    """See `mpips.kernels.intrinsics.array_at`."""
    memory = (ctypes.c_char * (size * like.itemsize)).from_address(int(address))
    return np.frombuffer(memory, like.dtype)
