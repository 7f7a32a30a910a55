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

from mpips.failover import undo_log
from mpips.failover.undo_log import keep_undo, recover
from mpips.kernels import atomics, exchange, rows, rule_loops
from mpips.kernels.atomics import observe
from mpips.kernels.rule_loops import dense
from mpips.kernels.vectors import addresses_of
from mpips.layout.roles import Roles
from mpips.optim import rule, rules
from mpips.ps import local_pushes, shard
from mpips.ps.local_pushes import LocalPushes
from mpips.ps.shard import Server
from mpips.tables import slot_index
from mpips.tools.replay.worker_process import Memory
from mpips.transport.push import HEADER_WORDS, Push

WORKERS, BASE = 2, 7  # the version that a shard begins with
RANKS: Any = SimpleNamespace(rank=1, roles=Roles((0, 1), (2, 3)), nodes=1)


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

    def copyto(self, out: np.ndarray, values: np.ndarray) -> None:
        """Die before it, or in the middle of it."""
        for part in (slice(0, out.size // 2), slice(out.size // 2, None)):
            self.passes()
            out[part] = values[part]

    def copy(self, values: np.ndarray, kept: np.ndarray) -> None:
        self.copyto(kept[: values.size], values)

    def dense_loop(self, loop: Any) -> Any:
        """Return a rule's loop that may die in the middle of a piece."""

        def apply(*args: Any) -> None:
            for part in (slice(0, args[0].size // 2), slice(args[0].size // 2, None)):
                self.passes()
                loop(*(arg[part] if isinstance(arg, np.ndarray) else arg for arg in args))

        return apply

    def calls(self, step: Any) -> dict[str, Any]:
        """Return what a loop that keeps old values calls, all of which may die."""
        own = {"copy": self.copy, "apply": self.dense_loop(dense(step))}
        return own | {"store_ordered": self.store_ordered}

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

    def keep(self, slot: Any, lines: Any, stripes: Any, kept: Any, touched: Any) -> None:
        """Die before it, or in the middle of it."""
        self.passes()
        half = len(slot) // 2
        rows.keep(slot[:half], lines, stripes, kept[:half], touched[:half])
        self.passes()
        rows.keep(slot, lines, stripes, kept, touched)

    def row_loop(self, loop: Any) -> Any:
        """Return one that may die before it, between two rows, and in the middle of a row."""

        def apply(slot: Any, local: Any, grads: Any, lines: Any, stripes: Any, *rest: Any) -> None:
            half = len(slot) // 2
            self.passes()
            loop(slot[:half], local[:half], grads[:half], lines, stripes, *rest)
            self.passes()
            if half < len(slot):
                before, at = lines[slot[half]].copy(), slot[half] // rows.STRIPE
                word = stripes[at]
                stripes[at] |= rows.WRITING
                lines[slot[half], ::2] = np.nan
                self.passes()
                lines[slot[half]], stripes[at] = before, word
            loop(slot[half:], local[half:], grads[half:], lines, stripes, *rest)

        return apply

    def take_lines(
        self, local: Any, first: int, header: Any, index: Any, keys: Any, slot: Any
    ) -> int:
        """Die in the middle of it, a line given that the index does not have yet."""
        self.passes()
        count = int(header[rows.COUNT])
        half = max(first, len(local) // 2)
        done = rows.take_lines(local[:half], first, header, index, keys, slot[:half])
        if header[rows.COUNT] > count:
            size = 1 << int(header[rows.BITS])
            lines = index[size : 2 * size] & ((1 << int(header[rows.LINE_BITS])) - 1)
            (at,) = np.flatnonzero(lines == header[rows.COUNT])
            entry = index[size + at]
            index[size + at] = 0
            self.passes()
            index[size + at] = entry
        if done < half:
            return int(done)
        return int(rows.take_lines(local, done, header, index, keys, slot))

    def fill_index(self, bits: int, header: Any, index: Any, keys: Any) -> None:
        """Die in the middle of it."""
        count, size = int(header[rows.COUNT]), 1 << bits
        self.passes()
        index[size : size + 50] = np.arange(1, 51)
        self.passes()
        index[size : size + 50] = 0
        rows.fill_index(bits, header, index, keys)
        assert count == header[rows.COUNT]
        self.passes()

    def patch(self, patch: pytest.MonkeyPatch, server: Server) -> None:
        """Have a server die in whatever it does to its shard and its rows."""
        for module in (undo_log, shard, rule_loops):
            patch.setattr(module, "publish", self.publish)
        for module in (rule, rules):
            patch.setattr(module, "undoable", self.undoable)
        patch.setattr(local_pushes, "serving", self.serving)
        patch.setattr(undo_log.np, "copyto", self.copyto)
        loop = property(lambda own: self.dense_loop(dense(own.kernel)))
        patch.setattr(type(server.dense.rule), "loop", loop)
        if server.rows is None:
            return
        own = {"take_lines": self.take_lines, "fill_index": self.fill_index}
        keeping = SimpleNamespace(keep=self.keep, put_back=rows.put_back)
        patch.setattr(undo_log, "rows", keeping)
        patch.setattr(slot_index, "rows", SimpleNamespace(**vars(rows) | own))
        for served in server.rows.tables:
            of_rows: Any = served.shard.rule
            patch.setitem(of_rows.__dict__, "loop", self.row_loop(of_rows.loop))


def state(server: Any) -> list[np.ndarray]:
    """Return all that a server owns, in the order of rows, of which each has one line."""
    found = [array.copy() for array in (server.params, *server.slots)]
    for served in server.rows.tables if server.rows else ():
        saved, touched = served.changed_rows(), served.shard.touched
        assert touched == len(saved.rows) == len(set(saved.rows.tolist()))
        if served.table.table.lazy:
            header, index, _ = served.shard._memory[rows.HEADER :]
            size = 1 << int(header[rows.BITS])
            assert np.count_nonzero(index[size : 2 * size]) == touched
        order = np.argsort(saved.rows)
        found += [array[order] for array in saved.arrays.values()]
    return found


class Case:
    """A server that both workers push to in turn, and the state of one that lives.

    Args:
        memory: Returns new memory of the server, which processes share and which outlasts a rank.
        make: Makes a server there.
        pushes: All pushes.
    """

    def __init__(
        self,
        memory: Callable[[], Memory],
        make: Callable[[Memory], Server],
        pushes: Sequence[Push],
    ) -> None:
        self.memory, self.pushes, self._make = memory, pushes, make
        server = make(memory())  # keeps nothing
        server.start_from(BASE)
        for push in pushes:
            server.apply(push)
        self._live = state(server)

    def make(self, memory: Memory) -> Server:
        """Return a server that keeps what another one needs to go on."""
        server = self._make(memory)
        keep_undo(server, memory, 1)
        return server

    def begin(self, memory: Memory) -> Server:
        server = self.make(memory)
        server.start_from(BASE)
        return server

    def find(self, worker: int, seq: int) -> Push:
        return self.pushes[(seq - 1) * WORKERS + worker]

    def rest(self, server: Server) -> Sequence[Push]:
        """Return the pushes that are not in the ledger."""
        done = sum(observe(server.applied, worker) for worker in range(WORKERS))
        assert done == server.version - BASE
        return self.pushes[done:]

    def apply_rest(
        self, server: Server, by_loop: bool = False, begun: Callable[[], object] = int
    ) -> None:
        """Apply them, each by itself or by the loop of a node's pushes; tells when it begins."""
        if by_loop:
            apply_by_loop(server, self.rest(server), begun)
            return
        begun()
        for push in self.rest(server):
            server.apply(push)

    def dies(
        self, server: Server, fate: Fate, monkeypatch: pytest.MonkeyPatch,
        takes_over: bool = False, by_loop: bool = False,
    ) -> bool:  # fmt: skip
        """Apply the rest, taking over if asked; returns whether the server has died."""
        with monkeypatch.context() as patch:
            fate.patch(patch, server)
            try:
                if takes_over:
                    recover(server, self.find)
                self.apply_rest(server, by_loop)
            except Death:
                return True
        return False

    def end(self, server: Server, why: str) -> None:
        """Apply the rest, and fail unless all is as of a server that lives."""
        self.apply_rest(server)
        assert not self.rest(server), why
        for got, live in zip(state(server), self._live, strict=True):
            np.testing.assert_array_equal(got, live, why)

    def killed(self, server: Server, chance: random.Random, most_s: float, by_loop: bool) -> bool:
        """Apply the rest in a process that is killed; returns whether it was in time."""
        here, there = os.pipe()
        child = os.fork()
        if not child:
            self.apply_rest(server, by_loop, lambda: os.write(there, b"begun"))
            os._exit(0)
        os.close(there)
        os.read(here, 5)
        os.close(here)
        time.sleep(chance.uniform(0, most_s))
        os.kill(child, signal.SIGKILL)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    def kill_until(self, continued: int, least_s: float, by_loop: bool = False) -> None:
        """Kill one server after the other, until so many have gone on with half an update."""
        chance, deaths, found, most_s = random.Random(3), 0, 0, least_s
        while found <= continued:
            memory = self.memory()
            server = self.begin(memory)
            while rest := self.rest(server):
                deaths += self.killed(server, chance, most_s, by_loop)
                server = self.make(memory)
                found += recover(server, self.find)
                most_s = least_s if len(self.rest(server)) < len(rest) else 1.5 * most_s
            self.end(server, "after all deaths")
            assert deaths < 1000, "and hardly any of them in an update"
        assert deaths >= found


def array_at(address: int, like: np.ndarray, size: int) -> np.ndarray:
    """See `mpips.kernels.intrinsics.array_at`."""
    memory = (ctypes.c_char * (size * like.itemsize)).from_address(int(address))
    return np.frombuffer(memory, like.dtype)
