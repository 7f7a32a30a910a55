"""Recovery of rounds of several nodes, by their leaders; see `mpips.rounds.survivable_nodes`."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpips.failover.takeover import fence
from mpips.kernels.atomics import observe, publish
from mpips.mpi.collectives import Mailbox, first_ranks
from mpips.mpi.start import TAG_REPLICA, Request
from mpips.mpi.window import transfer_pieces
from mpips.mpi.world import Cluster
from mpips.rounds.node import TURN
from mpips.rounds.survivable import PAST_ALL, next_owner

if TYPE_CHECKING:
    from mpips.rounds.survivable_nodes import NodesRound

# Words of each rank, and of leaders.
GIVEN_UP, ALARM, EPISODE, VERDICT, ERA = range(5)
COMPLETED, AGAIN = 1, 2
ARBITER = 0  # rank of the first leader, which decides
# States of a leader.
ELSEWHERE, ENTERING, BETWEEN, UP, LEAVING = range(5)


class InterruptedNode(NamedTuple):
    """Report of the leader of a held node.

    Attributes:
        episode: Number of verdicts that the node has had.
        step: Round that the node is in.
        dead: Its dead ranks, each with the first round without it.
    """

    episode: int
    step: int
    dead: tuple[tuple[int, int], ...]


class Arbiter:
    """Decisions of the first leader about deaths, from the leaders' reports.

    Args:
        cluster: The job's ranks.
        owners: Returns the owner of each slice.
        send: Sends a message to a leader.
    """

    def __init__(
        self,
        cluster: Cluster,
        owners: Callable[[], list[int]],
        send: Callable[[int, tuple[Any, ...]], None],
    ) -> None:
        self._cluster, self._owners_now, self._send = cluster, owners, send
        self._leaders = first_ranks(cluster.node_of)
        self._held: dict[int, InterruptedNode] = {}
        self._completed: dict[int, int] = dict.fromkeys(self._leaders, 0)
        self._verdicts: dict[int, int] = dict.fromkeys(self._leaders, 0)

    def hear(self, leader: int, report: InterruptedNode | int) -> None:
        """Take a leader's report, and decide.

        Args:
            leader: Rank of the leader.
            report: State of its held node, or the number of rounds that its node has left.
        """
        completed = report.step - 1 if isinstance(report, InterruptedNode) else report
        self._completed[leader] = max(self._completed[leader], completed)
        if isinstance(report, InterruptedNode) and report.episode == self._verdicts[leader]:
            self._held[leader] = report
        for each, held in list(self._held.items()):
            ahead = [rank for rank in self._leaders if self._completed[rank] >= held.step]
            if ahead:
                self._decide(each, ("complete", ahead[0]))
                self._send(ahead[0], ("give", each))
        steps = {held.step for held in self._held.values()}
        first = dict(each for held in self._held.values() for each in held.dead)
        if len(self._held) == len(self._leaders) and len(steps) == 1 and first:
            owners = self._owners_without(set(first))
            for each in self._leaders:
                self._decide(each, ("again", first, owners))

    def _decide(self, leader: int, what: tuple[Any, ...]) -> None:
        del self._held[leader]
        self._verdicts[leader] += 1
        self._send(leader, what)

    def _owners_without(self, dead: set[int]) -> list[int]:
        """Return the owner of each slice, with living ranks of a node in place of its dead ones."""
        owners, node_of = self._owners_now(), self._cluster.node_of
        gone = dead | self._cluster.failures.lost
        for number, owner in enumerate(owners):
            if owner in dead:
                local = {r for r, node in enumerate(node_of) if node == node_of[owner]}
                owners[number] = next_owner(owners, local - gone)
        return owners


class Recovery:
    """A leader's reaction to deaths while it waits; the first leader also decides.

    Args:
        rounds: Round of this rank.
    """

    def __init__(self, rounds: "NodesRound") -> None:
        self._rounds, cluster = rounds, rounds.cluster
        self._cluster = cluster
        leaders = first_ranks(cluster.node_of)
        self._hears = set(leaders if cluster.rank == ARBITER else [ARBITER])
        self._mailbox = Mailbox(cluster.comm, cluster.failures)
        self._words = rounds.words_of(cluster.rank)
        self._others = set(cluster.my_node) - {cluster.rank}
        self._state, self._step, self._turn = ELSEWHERE, 0, 0
        self._completed = 0
        self._dead: set[int] = set()  # ranks that have left the rounds
        self._last_report: InterruptedNode | int | None = None
        self._sending: list[Request] = []
        self._coming: list[Request] | None = None
        self._handlers: dict[str, Callable[..., None]] = {
            "give": self._give, "complete": self._complete, "again": self._again,
        }  # fmt: skip
        if cluster.rank == ARBITER:
            arbiter = Arbiter(cluster, rounds.owners, self._send)
            self._handlers["tell"] = arbiter.hear

    def hear(self, ranks: Iterable[int], what: str, handler: Callable[..., None]) -> None:
        """Register a handler of messages from other ranks after a death.

        Args:
            ranks: Ranks that may send the message.
            what: Kind of the message.
            handler: Called with the content of the message.
        """
        self._hears.update(ranks)
        self._handlers[what] = handler

    def set_state(self, state: int, step: int, turn: int) -> None:
        """Set the state of this rank.

        Args:
            state: One of the states of a leader.
            step: The present round, or the last one.
            turn: Number of barriers that are complete or begun.
        """
        self._state, self._step, self._turn = state, step, turn + 1
        if state == ELSEWHERE:
            self._completed = step

    def advance(self) -> None:
        """React to deaths, if there are any.

        Blocks: only until the process of a dead rank is gone.
        """
        lost = self._cluster.failures.lost
        if not lost <= self._dead:
            self._report()
        for rank in self._hears if lost else ():
            for what, *given in self._mailbox.brought_by(rank):
                self._handlers[what](*given)
        self._receive_replica()

    def _report(self) -> None:
        """Report the state of this node to the arbiter after a death."""
        if self._state in (BETWEEN, UP, LEAVING):
            publish(self._words, ALARM, observe(self._words, EPISODE) + 1)
        report = self._held_now() or self._completed
        if report != self._last_report:
            self._last_report = report
            self._send(ARBITER, ("tell", self._cluster.rank, report))

    def _send(self, rank: int, what: tuple[Any, ...]) -> None:
        if rank == self._cluster.rank:
            self._handlers[what[0]](*what[1:])
        else:
            self._mailbox.bring(rank, what)

    def _held_now(self) -> InterruptedNode | None:
        """Return the report of this node if it is held; else None."""
        if self._state in (ELSEWHERE, BETWEEN):
            return None
        episode, turns = observe(self._words, EPISODE), self._rounds.turns
        lost, others = self._cluster.failures.lost, self._others
        dead = sorted(others & lost - self._dead)
        behind = {rank for rank in others if observe(turns[rank], TURN) < self._turn}
        up = {rank for rank in others if observe(self._rounds.words_of(rank), GIVEN_UP) > episode}
        entered = self._state != ENTERING
        if behind - lost - (up if entered else set()):
            return None
        if not entered:
            dead = [rank for rank in dead if rank in behind]
        if not (self._state == UP or behind):
            return None
        for rank in dead:
            fence(self._rounds.memory, rank)
        first = [self._step + self._rounds.counts(rank, entered) for rank in dead]
        return InterruptedNode(episode, self._step, tuple(zip(dead, first, strict=True)))

    def _give(self, leader: int) -> None:
        """Send this node's replica to another leader."""
        begin = self._cluster.arrays.begin_send
        self._sending += [begin(part, leader, TAG_REPLICA) for part in self._pieces()]

    def _complete(self, leader: int) -> None:
        """Begin to receive the replica of another leader's node; see `_receive_replica`."""
        begin = self._cluster.arrays.begin_receive
        self._coming = [begin(part, leader, TAG_REPLICA) for part in self._pieces()]

    def _pieces(self) -> list[np.ndarray]:
        return [part for each in self._rounds.replicas for part in transfer_pieces(each)]

    def _receive_replica(self) -> None:
        if self._coming is None or not self._cluster.failures.done(self._coming):
            return
        self._coming = None
        self._go_on(COMPLETED)
        for rank in self._others & self._cluster.failures.lost - self._dead:
            if observe(self._rounds.turns[rank], TURN) < self._turn:
                publish(self._rounds.turns[rank], TURN, self._turn)

    def _again(self, first: dict[int, int], owners: list[int]) -> None:
        """Repeat the round without dead ranks, each with the first round without it."""
        self._rounds.leave_out(first, owners)
        self._dead |= first.keys()
        self._cluster.failures.lost |= self._dead
        publish(self._words, ERA, observe(self._words, ERA) + 1)
        self._go_on(AGAIN)
        for rank in first.keys() & self._others:
            publish(self._rounds.turns[rank], TURN, PAST_ALL)

    def _go_on(self, verdict: int) -> None:
        publish(self._words, VERDICT, verdict)
        publish(self._words, EPISODE, observe(self._words, EPISODE) + 1)
        self._last_report = None
        if self._state == UP:
            self._state = BETWEEN
