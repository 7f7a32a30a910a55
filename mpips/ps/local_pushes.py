"""Local pushes of a server, applied by one compiled loop.

Who writes which word is as in `mpips.ps.shard` and `mpips.transport.channel`: for each push the
loop publishes the version begun, applies the rule, and publishes the version committed and then the
ledger; and it keeps old values where another server may take the shard over
(`mpips.failover.undo_log`). What else a push changes at a server, its version, clocks and what
observers count, is brought up to date when the loop returns, before anything else is done. It
returns

- when it has applied pushes for its time, or a batch is to be assigned;
- when none has come for a while (`mpips.mpi.waiting.patience_ns`), or for `LONG_NS` where the last
  pushes came within a third of that of each other: whoever waits takes a core from those that
  compute, whoever sleeps comes too late (Karlin et al., SODA 1990, spin-then-block);
- before the first push whose rate has a factor: from then on the loop gets the learning rates, and
  makes the rates of the rule's step of them, by the operations of `Rule.scalars`.
"""

from typing import cast

import numpy as np

from mpips.kernels.atomics import no_limit
from mpips.kernels.exchange import LONG_NS, serving
from mpips.mpi.waiting import patience_ns
from mpips.mpi.world import Cluster
from mpips.optim import RULES, Averaging, Rule
from mpips.ps.design import ALL, Design
from mpips.ps.parts import DensePart
from mpips.ps.shard import FRESH, Server
from mpips.transport.channel import Receiver
from mpips.transport.push import FACTOR, HEADER_WORDS, VERSION
from mpips.transport.remote_reads import BEGUN, COMMITTED

AT_ONCE = 64  # pushes that one call applies at most
FEW = 8  # of them, where the learning rate is a program's function, which may be slow
# Addresses of header words, and three vectors: see `mpips.kernels.atomics.find_ahead`.
Ahead = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
NOBODY: Ahead = (np.zeros(0, np.int64),) * 4


class UnknownRate:
    """A learning rate that is not known yet, in `Rule.scalars`: notes what is made of it.

    Anything but a product, a quotient and a product, in this order, is an error.

    Attributes:
        numbers: Factor, divisor and factor: see `mpips.kernels.exchange.rate_of`.
    """

    def __init__(self, numbers: tuple[float, ...] = (1.0, 1.0, 1.0), noted: int = 0) -> None:
        self.numbers, self._noted = numbers, noted

    def __mul__(self, number: float) -> "UnknownRate":
        """Note a product."""
        return self._note(2 if self._noted else 0, number)

    def __truediv__(self, number: float) -> "UnknownRate":
        """Note a quotient."""
        return self._note(1, number)

    def _note(self, place: int, number: float) -> "UnknownRate":
        assert self._noted <= place, "a rate that the compiled loop cannot make"
        before, after = self.numbers[:place], self.numbers[place + 1 :]
        return UnknownRate((*before, number, *after), place + 1)


def numbers_of(rule: Rule, update: int) -> list[float]:
    """Return what makes the rates of a rule's step of any learning rate, three numbers a rate."""
    found: list[float] = []
    for rate in rule.scalars(update, cast(float, UnknownRate())):
        found += rate.numbers if isinstance(rate, UnknownRate) else (rate, 0.0, 0.0)
    return found


class Rates:
    """Rates of the updates that come next, as the loop takes them: see `serving`.

    Args:
        dense: The rule, and the learning rate by the update's number.
        foreseen: The last update whose learning rate may be asked for ahead.
    """

    def __init__(self, dense: DensePart, foreseen: int) -> None:
        self._dense, self._foreseen, self._varies = dense, foreseen, False
        self._rows = rate_rows(dense.rule, AT_ONCE)
        self._first = self._end = 0  # the updates whose rates they are

    def vary(self) -> None:
        """Say learning rates from now on: those of pushes have factors."""
        self._varies, self._end = True, self._first

    def of(self, update: int) -> np.ndarray:
        """Return a row for each update from that number on, as far as they are foreseen."""
        if not self._first <= update < self._end:
            self._fill(update)
        return self._rows[update - self._first : self._end - self._first]

    def _fill(self, first: int) -> None:
        dense, most = self._dense, AT_ONCE if self._foreseen == ALL else FEW
        self._first, self._end = first, first + max(0, min(most, self._foreseen + 1 - first))
        for update in range(first, self._end):
            row, lr = self._rows[update - first], dense.rate(update)
            if self._varies:
                row[0], row[1:] = lr, numbers_of(dense.rule, update)
            else:
                row[1::3] = dense.rule.scalars(update, lr)


def rate_rows(rule: Rule, count: int) -> np.ndarray:
    """Return rows of rates that know no learning rate: see `mpips.kernels.exchange.serving`."""
    rows = np.zeros((count, 1 + 3 * len(rule.scalars(1, 0.0))))
    rows[:, 0] = np.nan
    return rows


class LocalPushes:
    """The compiled loop of a server, and what it is given. Collective: no.

    Args:
        store: The server.
        receiver: Its half of the channel.
        ranks_per_core: Ranks of the host, over its cores.
        foreseen: The last update whose learning rate may be asked for ahead.

    Attributes:
        others: The loop returns if any of them is ahead.
        stuck: Whether the next push is one that `Server.apply` has to apply.
    """

    def __init__(
        self, store: Server, receiver: Receiver, ranks_per_core: float, foreseen: int = ALL
    ) -> None:
        self._store, self._receiver, rule = store, receiver, store.dense.rule
        assert rule.kernel is not None, "a rule without loops"
        self.others = NOBODY
        self._loop = serving(rule.kernel)
        self._rates = Rates(store.dense, foreseen)
        self._said = np.zeros((AT_ONCE, HEADER_WORDS), np.int64)
        self._words = np.array([COMMITTED, BEGUN, VERSION, FACTOR])
        log, values = store.undo, store.dense.undo
        self._undo = no_undo(store.params.dtype.name)
        if log is not None and values is not None:
            self._undo = values.values, log.undo_log
        self._state = np.array([0, 0, LONG_NS, 0])
        self._no_limit = no_limit(store.applied.size)
        self._server = store.params, *store.slots, store.header, store.applied, receiver.workers
        self._places = receiver.pushed, receiver.places
        self._patience_ns = patience_ns(ranks_per_core)
        self._warm = self.stuck = False

    def apply(self, limit: np.ndarray | None, budget_s: float, waits: bool = True) -> int:
        """Apply pushes as they come; returns how many.

        Args:
            limit: See `mpips.transport.channel.Receiver.take`.
            budget_s: For how long; a push that has begun is applied as a whole.
            waits: Whether to wait a little for the next push, where the last call had one.

        Blocks: for that time at most, and a little where it waits.
        """
        rates = self._rates.of(self._store.version + 1)
        self.stuck = not len(rates)
        if self.stuck:
            return 0
        said, self._state[0] = self._said[: len(rates)], self._receiver.next
        patience = (waits and self._warm) * self._patience_ns
        if patience and self._state[2] <= LONG_NS // 3:
            patience = LONG_NS
        done: int = self._loop(
            *self._server, self._no_limit if limit is None else limit,
            *self._places, rates, said, *self.others, self._words, *self._undo,
            self._state, int(budget_s * 1e9), patience,
        )  # fmt: skip
        self._warm, self.stuck = done > 0, self._state[1] < 0
        if self.stuck:
            self._rates.vary()
        self._receiver.next = int(self._state[0])
        if done:
            self._store.applied_all(said[:done], self._state[1] / 1e9)
        return done


def no_undo(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return memory for old values that holds none, and no words."""
    return np.zeros((1, 1, 0), dtype), np.zeros(0, np.int64)


def local_pushes(
    cluster: Cluster, design: Design, store: Server, receiver: Receiver
) -> LocalPushes | None:
    """Return the loop of a server, or None where its pushes want more than it does."""
    waits = design.reads_wait or design.consistent or design.tables
    known = _is_known(design.rule) and design.foreseen > 0 and design.stale == FRESH
    if waits or cluster.nodes > 1 or not known or not store.shard.size:
        return None
    return LocalPushes(store, receiver, cluster.ranks_per_core, design.foreseen)


def _is_known(rule: Rule) -> bool:
    """Return whether the loop does all that a rule does, and its rates may be asked for ahead."""
    applies = type(rule).apply in (Rule.apply, Averaging.apply) and rule.kernel is not None
    return rule.name in RULES and applies and not rule.ranges


def warm(rule: Rule, dtype: str) -> None:
    """Compile the loop, or load it from the cache on disk."""
    if not _is_known(rule):
        return
    assert rule.kernel is not None, "a rule without loops"
    vectors, words = (np.zeros(0, dtype),) * (1 + len(rule.slots)), np.zeros(4, np.int64)
    rates, said = rate_rows(rule, 0), np.zeros((0, HEADER_WORDS), np.int64)
    places = words[:0], np.zeros((0, 6), np.int64), rates, said
    args = *vectors, *(words,) * 4, *places, *NOBODY, words, *no_undo(dtype), words, 0, 0
    serving(rule.kernel)(*args)
