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
# Where a leader is.
ELSEWHERE, ENTERING, BETWEEN, UP, LEAVING = range(5)


class Held(NamedTuple):
    """What the leader of a node that is held tells of it.

    Attributes:
        episode: How many verdicts it has had.
        step: The round that it is in.
        dead: Its ranks that have died, each with the first round without it.
    """

    episode: int
    step: int
    dead: tuple[tuple[int, int], ...]


class Arbiter:
    """What the first leader decides about deaths, by what the leaders say.

    Args:
        cluster: The job's ranks.
        owners: Returns who owns each slice.
        say: Says something to a leader.
    """

    def __init__(
        self,
        cluster: Cluster,
        owners: Callable[[], list[int]],
        say: Callable[[int, tuple[Any, ...]], None],
    ) -> None:
        self._cluster, self._owners_now, self._say = cluster, owners, say
        self._leaders = first_ranks(cluster.node_of)
        self._held: dict[int, Held] = {}
        self._behind: dict[int, int] = dict.fromkeys(self._leaders, 0)
        self._verdicts: dict[int, int] = dict.fromkeys(self._leaders, 0)

    def hear(self, leader: int, said: Held | int) -> None:
        """Take what a leader says, and decide.

        Args:
            leader: Its rank.
            said: How its node is held, or how many rounds it has left behind.
        """
        completed = said.step - 1 if isinstance(said, Held) else said
        self._behind[leader] = max(self._behind[leader], completed)
        if isinstance(said, Held) and said.episode == self._verdicts[leader]:
            self._held[leader] = said
        for each, held in list(self._held.items()):
            ahead = [rank for rank in self._leaders if self._behind[rank] >= held.step]
            if ahead:
                self._decide(each, ("complete", ahead[0]))
                self._say(ahead[0], ("give", each))
        steps = {held.step for held in self._held.values()}
        first = dict(each for held in self._held.values() for each in held.dead)
        if len(self._held) == len(self._leaders) and len(steps) == 1 and first:
            owners = self._owners_without(set(first))
            for each in self._leaders:
                self._decide(each, ("again", first, owners))

    def _decide(self, leader: int, what: tuple[Any, ...]) -> None:
        del self._held[leader]
        self._verdicts[leader] += 1
        self._say(leader, what)

    def _owners_without(self, dead: set[int]) -> list[int]:
        """Return who owns each slice, by the load of those of the node that live."""
        owners, node_of = self._owners_now(), self._cluster.node_of
        gone = dead | self._cluster.failures.lost
        for number, owner in enumerate(owners):
            if owner in dead:
                near = {r for r, node in enumerate(node_of) if node == node_of[owner]}
                owners[number] = next_owner(owners, near - gone)
        return owners


class Recovery:
    """What a leader does about deaths while it waits, and the first one decides.

    Args:
        rounds: Of this rank.
    """

    def __init__(self, rounds: "NodesRound") -> None:
        self._rounds, cluster = rounds, rounds.cluster
        self._cluster = cluster
        leaders = first_ranks(cluster.node_of)
        self._hears = set(leaders if cluster.rank == ARBITER else [ARBITER])
        self._mailbox = Mailbox(cluster.comm, cluster.failures)
        self._words = rounds.words_of(cluster.rank)
        self._others = set(cluster.my_node) - {cluster.rank}
        self._where, self._step, self._turn = ELSEWHERE, 0, 0
        self._completed = 0
        self._dead: set[int] = set()  # which are in no round any more
        self._told: Held | int | None = None
        self._sending: list[Request] = []
        self._coming: list[Request] | None = None
        self._handlers: dict[str, Callable[..., None]] = {
            "give": self._give, "complete": self._complete, "again": self._again,
        }  # fmt: skip
        if cluster.rank == ARBITER:
            arbiter = Arbiter(cluster, rounds.owners, self._say)
            self._handlers["tell"] = arbiter.hear

    def hear(self, ranks: Iterable[int], what: str, handler: Callable[..., None]) -> None:
        """Have `handler` called with what other ranks say to this one, of whom one has died."""
        self._hears.update(ranks)
        self._handlers[what] = handler

    def stand(self, where: int, step: int, turn: int) -> None:
        """Note where this rank is.

        Args:
            where: Of these.
            step: The round in which it is, or was last.
            turn: Barriers behind it, or begun.
        """
        self._where, self._step, self._turn = where, step, turn + 1
        if where == ELSEWHERE:
            self._completed = step

    def advance(self) -> None:
        """Get on with what is to be done about the dead, if there are any. Blocks: no.

        But until the process of a dead rank is gone.
        """
        lost = self._cluster.failures.lost
        if not lost <= self._dead:
            self._tell()
        for rank in self._hears if lost else ():
            for what, *given in self._mailbox.brought_by(rank):
                self._handlers[what](*given)
        self._receive_replica()

    def _tell(self) -> None:
        """Tell who decides where this node is, as somebody has died."""
        if self._where in (BETWEEN, UP, LEAVING):
            publish(self._words, ALARM, observe(self._words, EPISODE) + 1)
        said = self._held_now() or self._completed
        if said != self._told:
            self._told = said
            self._say(ARBITER, ("tell", self._cluster.rank, said))

    def _say(self, rank: int, what: tuple[Any, ...]) -> None:
        if rank == self._cluster.rank:
            self._handlers[what[0]](*what[1:])
        else:
            self._mailbox.bring(rank, what)

    def _held_now(self) -> Held | None:
        """Return what is to be told where this node is held."""
        if self._where in (ELSEWHERE, BETWEEN):
            return None
        episode, turns = observe(self._words, EPISODE), self._rounds.turns
        lost, others = self._cluster.failures.lost, self._others
        dead = sorted(others & lost - self._dead)
        behind = {rank for rank in others if observe(turns[rank], TURN) < self._turn}
        up = {rank for rank in others if observe(self._rounds.words_of(rank), GIVEN_UP) > episode}
        entered = self._where != ENTERING
        if behind - lost - (up if entered else set()):
            return None
        if not entered:
            dead = [rank for rank in dead if rank in behind]
        if not (self._where == UP or behind):
            return None
        for rank in dead:
            fence(self._rounds.memory, rank)
        first = [self._step + self._rounds.counts(rank, entered) for rank in dead]
        return Held(episode, self._step, tuple(zip(dead, first, strict=True)))

    def _give(self, leader: int) -> None:
        """Send this node's replica to another leader."""
        begin = self._cluster.arrays.begin_send
        self._sending += [begin(part, leader, TAG_REPLICA) for part in self._pieces()]

    def _complete(self, leader: int) -> None:
        """Have the replica of another leader's node; see `_receive_replica`."""
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
        """Have the round made again without ranks, each with its first round without it."""
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
        self._told = None
        if self._where == UP:
            self._where = BETWEEN
