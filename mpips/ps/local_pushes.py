"""Local pushes of a server, applied by one compiled loop.

Who writes which word is as in `mpips.ps.shard` and `mpips.transport.channel`: for each push the
loop publishes the version begun, applies the rule, and publishes the version committed and then the
ledger. What else a push changes at a server, its version, clocks and what observers count, is
brought up to date when the loop returns, before anything else is done. It returns

- when it has applied pushes for its time, or a batch is to be assigned;
- when none has come for a while (`mpips.mpi.waiting.patience_ns`);
- before a push whose rate has a factor of its own, which `Server.apply` has to apply.
"""

import numpy as np

from mpips.kernels.atomics import no_limit
from mpips.kernels.exchange import serving
from mpips.mpi.waiting import patience_ns
from mpips.mpi.world import Cluster
from mpips.optim import RULES, Rule
from mpips.ps.design import Design
from mpips.ps.shard import FRESH, Server
from mpips.transport.channel import Receiver
from mpips.transport.push import FACTOR, HEADER_WORDS, VERSION
from mpips.transport.remote_reads import BEGUN, COMMITTED

AT_ONCE = 64  # pushes that one call applies at most
# Addresses of header words, and three vectors: see `mpips.kernels.atomics.find_ahead`.
Ahead = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
NOBODY: Ahead = (np.zeros(0, np.int64),) * 4


class LocalPushes:
    """The compiled loop of a server, and what it is given. Collective: no.

    Args:
        store: The server.
        receiver: Its half of the channel.
        ranks_per_core: Ranks of the host, over its cores.

    Attributes:
        others: The loop returns if any of them is ahead.
        stuck: Whether the next push is one that `Server.apply` has to apply.
    """

    def __init__(self, store: Server, receiver: Receiver, ranks_per_core: float) -> None:
        self._store, self._receiver, rule = store, receiver, store.dense.rule
        assert rule.kernel is not None, "a rule without loops"
        self.others = NOBODY
        self._loop = serving(rule.kernel)
        self._rates = np.zeros((AT_ONCE, len(rule.scalars(1, 0.0))))
        self._first = -AT_ONCE  # the update of the first of the rates
        self._said = np.zeros((AT_ONCE, HEADER_WORDS), np.int64)
        self._words = np.array([COMMITTED, BEGUN, VERSION, FACTOR])
        self._state = np.zeros(2, np.int64)
        self._no_limit = no_limit(store.applied.size)
        self._server = store.params, *store.slots, store.header, store.applied, receiver.workers
        self._places = receiver.pushed, receiver.places
        self._patience_ns = patience_ns(ranks_per_core)
        self._warm = self.stuck = False

    def apply(self, limit: np.ndarray | None, budget_s: float) -> int:
        """Apply pushes as they come; returns how many.

        Args:
            limit: See `mpips.transport.channel.Receiver.take`.
            budget_s: For how long; a push that has begun is applied as a whole.

        Blocks: for that time at most, and a little for the next push, where the last call had one.
        """
        store = self._store
        if not self._first <= store.version + 1 < self._first + AT_ONCE:
            self._fill(store.version + 1)
        at, self._state[0] = store.version + 1 - self._first, self._receiver.next
        done: int = self._loop(
            *self._server, self._no_limit if limit is None else limit,
            *self._places, self._rates[at:], self._said[at:], *self.others, self._words,
            self._state, int(budget_s * 1e9), self._warm * self._patience_ns,
        )  # fmt: skip
        self._warm, self.stuck = done > 0, self._state[1] < 0
        self._receiver.next = int(self._state[0])
        if done:
            store.applied_all(self._said[at : at + done], self._state[1] / 1e9)
        return done

    def _fill(self, first: int) -> None:
        """Write down the rates of the updates from that number on."""
        dense, self._first = self._store.dense, first
        for k in range(AT_ONCE):
            self._rates[k] = dense.rule.scalars(first + k, dense.rate(first + k))


def local_pushes(
    cluster: Cluster, design: Design, store: Server, receiver: Receiver
) -> LocalPushes | None:
    """Return the loop of a server, or None where its pushes want more than it does."""
    waits = design.reads_wait or design.consistent or design.takes_over or design.tables
    known = _is_known(design.rule) and design.foreseen and design.stale == FRESH
    if waits or cluster.nodes > 1 or not known or not store.shard.size:
        return None
    return LocalPushes(store, receiver, cluster.ranks_per_core)


def _is_known(rule: Rule) -> bool:
    """Return whether the loop does all that a rule does, and its rates may be asked for ahead."""
    return rule.name in RULES and type(rule).apply is Rule.apply and not rule.ranges


def warm(rule: Rule, dtype: str) -> None:
    """Compile the loop, or load it from the cache on disk."""
    if not _is_known(rule) or rule.kernel is None:
        return
    vectors, words = (np.zeros(0, dtype),) * (1 + len(rule.slots)), np.zeros(4, np.int64)
    rates, said = np.zeros((0, len(rule.scalars(1, 0.0)))), np.zeros((0, HEADER_WORDS), np.int64)
    places = words[:0], np.zeros((0, 6), np.int64), rates, said
    serving(rule.kernel)(*vectors, *(words,) * 4, *places, *NOBODY, words, words[:2], 0, 0)
