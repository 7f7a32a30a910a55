"""Compiled loop that applies the pushes of a server's local workers.

The loop uses the header words as `mpips.ps.shard` and `mpips.transport.channel` do. For each push,
it publishes the begun version, applies the rule, and publishes the committed version and then the
ledger. If another server may take over the shard, it saves old values (`mpips.failover.undo_log`).
When the loop returns, the server at once updates its other state: version, clocks and observers.
The loop returns

- when its time is over, or when a worker needs a batch;
- when no push has come for a while (`mpips.mpi.waiting.patience_ns`). The wait is `LONG_NS` if the
  mean gap between recent pushes is at most a third of that. A server that polls takes a core from
  workers; a server that sleeps wakes too late (spin-then-block: Karlin et al., SODA 1990);
- before the first push with a factor of the learning rate. From then on the loop gets learning
  rates, and computes the rates of the step from them, by the operations of `Rule.scalars`.
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

AT_ONCE = 256  # most pushes that one call applies
FEW = 8  # the same, if the learning rate is a function of the user's program, which may be slow
# Arguments of `mpips.kernels.atomics.find_ahead`, without `first`.
Ahead = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
NOBODY: Ahead = (np.zeros(0, np.int64),) * 4


class UnknownRate:
    """Stand-in for a learning rate that is not known yet; records how `Rule.scalars` uses it.

    The only operations allowed are a product, then a quotient, then a product; each is optional.

    Attributes:
        numbers: Factor, divisor and factor: the arguments of `mpips.kernels.exchange.rate_of`.
    """

    def __init__(self, numbers: tuple[float, ...] = (1.0, 1.0, 1.0), noted: int = 0) -> None:
        self.numbers, self._noted = numbers, noted

    def __mul__(self, number: float) -> "UnknownRate":
        """Record a product."""
        return self._note(2 if self._noted else 0, number)

    def __truediv__(self, number: float) -> "UnknownRate":
        """Record a quotient."""
        return self._note(1, number)

    def _note(self, place: int, number: float) -> "UnknownRate":
        assert self._noted <= place, "a rate that the compiled loop cannot make"
        before, after = self.numbers[:place], self.numbers[place + 1 :]
        return UnknownRate((*before, number, *after), place + 1)


def numbers_of(rule: Rule, update: int) -> list[float]:
    """Return the arguments of `mpips.kernels.exchange.rate_of` for each rate of a rule's step.

    Args:
        rule: The rule.
        update: Number of the update.

    Returns:
        Three numbers for each rate, valid for any learning rate.
    """
    numbers: list[float] = []
    for rate in rule.scalars(update, cast(float, UnknownRate())):
        numbers += rate.numbers if isinstance(rate, UnknownRate) else (rate, 0.0, 0.0)
    return numbers


class Rates:
    """Rates of the next updates, in the form that `mpips.kernels.exchange.serving` takes.

    Args:
        dense: The part of the server with the rule and the learning rate.
        foreseen: See `Design.foreseen`.
    """

    def __init__(self, dense: DensePart, foreseen: int) -> None:
        self._dense, self._foreseen, self._varies = dense, foreseen, False
        self._rows = rate_rows(dense.rule, AT_ONCE)
        self._first = self._end = 0  # the rows are for updates [first, end)

    def vary(self) -> None:
        """Give the loop learning rates from now on, since pushes have factors of them."""
        self._varies, self._end = True, self._first

    def of(self, update: int) -> np.ndarray:
        """Return the rows of update number `update` and of following ones, up to `foreseen`."""
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
    """Return rows for `mpips.kernels.exchange.serving` without known learning rates (NaN)."""
    rows = np.zeros((count, 1 + 3 * len(rule.scalars(1 - rule.before, 0.0))))
    rows[:, 0] = np.nan
    return rows


class LocalPushes:
    """The compiled loop of a server, and its arguments. Collective: no.

    Args:
        store: The server.
        receiver: The server's half of the channel.
        ranks_per_core: Ranks of the host, divided by its cores.
        foreseen: See `Design.foreseen`.

    Attributes:
        others: Arguments of `find_ahead`; the loop returns if it finds a word.
        stuck: Whether the loop cannot apply the next push, so `Server.apply` must do it.
    """

    def __init__(
        self, store: Server, receiver: Receiver, ranks_per_core: float, foreseen: int = ALL
    ) -> None:
        self._store, self._receiver, rule = store, receiver, store.dense.rule
        assert rule.kernel is not None, "a rule without loops"
        self.others = NOBODY
        self._loop = serving(rule.kernel)
        self._rates = Rates(store.dense, foreseen)
        self._headers = np.zeros((AT_ONCE, HEADER_WORDS), np.int64)
        self._words = np.array([COMMITTED, BEGUN, VERSION, FACTOR])
        log, values = store.undo, store.dense.undo
        self._undo = no_undo(store.params.dtype.name)
        if log is not None and values is not None:
            self._undo = values.values, log.undo_log
        self._state = np.array([0, 0, LONG_NS, 0])
        self._no_limit = no_limit(store.applied.size)
        self._server = store.params, *store.slots, store.header, store.applied, receiver.workers
        self._addresses = receiver.pushed, receiver.places
        self._patience_ns = patience_ns(ranks_per_core)
        self._warm = self.stuck = False

    def apply(self, limit: np.ndarray | None, budget_s: float, waits: bool = True) -> int:
        """Apply pushes in the order of arrival.

        Args:
            limit: See `mpips.transport.channel.Receiver.take`.
            budget_s: Seconds after which no further push is applied.
            waits: Whether to wait a little for the next push, if the last call applied one.

        Returns:
            The number of pushes applied.

        Blocks: for `budget_s`, the last push and the wait at most.
        """
        rates = self._rates.of(self._store.version + 1)
        self.stuck = not len(rates)
        if self.stuck:
            return 0
        headers, self._state[0] = self._headers[: len(rates)], self._receiver.next
        patience = (waits and self._warm) * self._patience_ns
        if patience and self._state[2] <= LONG_NS // 3:
            patience = LONG_NS
        done: int = self._loop(
            *self._server, self._no_limit if limit is None else limit,
            *self._addresses, rates, headers, *self.others, self._words, *self._undo,
            self._state, int(budget_s * 1e9), patience,
        )  # fmt: skip
        self._warm, self.stuck = done > 0, self._state[1] < 0
        if self.stuck:
            self._rates.vary()
        self._receiver.next = int(self._state[0])
        if done:
            self._store.applied_all(headers[:done], self._state[1] / 1e9)
        return done


def no_undo(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return empty memory for old values and an empty undo log, for a loop that saves none."""
    return np.zeros((1, 1, 0), dtype), np.zeros(0, np.int64)


def local_pushes(
    cluster: Cluster, design: Design, store: Server, receiver: Receiver
) -> LocalPushes | None:
    """Return the compiled loop of a server; None if the design needs more than the loop can do."""
    waits = design.reads_wait or design.consistent or design.tables
    known = _is_known(design.rule) and design.foreseen > 0 and design.stale == FRESH
    if waits or cluster.nodes > 1 or not known or not store.shard.size:
        return None
    return LocalPushes(store, receiver, cluster.ranks_per_core, design.foreseen)


def _is_known(rule: Rule) -> bool:
    """Return whether the loop can apply a rule: one of `RULES`, with one range and a kernel."""
    applies = type(rule).apply in (Rule.apply, Averaging.apply) and rule.kernel is not None
    return rule.name in RULES and applies and not rule.ranges


def warm(rule: Rule, dtype: str) -> None:
    """Compile the loop of a rule, or load it from the cache on disk."""
    if not _is_known(rule):
        return
    assert rule.kernel is not None, "a rule without loops"
    vectors, words = (np.zeros(0, dtype),) * (1 + len(rule.slots)), np.zeros(4, np.int64)
    rates, headers = rate_rows(rule, 0), np.zeros((0, HEADER_WORDS), np.int64)
    pushes = words[:0], np.zeros((0, 6), np.int64), rates, headers
    args = *vectors, *(words,) * 4, *pushes, *NOBODY, words, *no_undo(dtype), words, 0, 0
    serving(rule.kernel)(*args)
