"""Arrays that a worker's pushes leave alone, as its program has frozen them; both halves.

A push says nothing of them. Where they become others the worker tells every server, with the number
of the first push that this holds for, and announces that push when all have answered: so a server
that takes it knows. It waits for no other worker; a server answers whatever it waits for itself.
"""

from collections import deque

from mpips.cluster.world import Cluster
from mpips.optim import Ranges, common
from mpips.transport.push import Push


class Frozen:
    """What each worker's pushes leave alone, as a server knows it. Collective: no.

    Attributes:
        nothing: Whether no worker has left anything alone so far.
    """

    def __init__(self) -> None:
        self._of: dict[int, deque[tuple[int, Ranges]]] = {}  # by worker: from which push on
        self.nothing = True

    def note(self, worker: int, first: int, frozen: Ranges) -> None:
        """Note what a worker's pushes leave alone from number `first` on."""
        self.nothing = False
        self._of.setdefault(worker, deque()).append((first, frozen))

    def of(self, push: Push) -> Ranges:
        """Return what a push leaves alone; with several in it, what all of them do."""
        return common(self._one(part.worker, part.seq) for part in push)

    def _one(self, worker: int, seq: int) -> Ranges:
        since = self._of.get(worker, deque())
        while len(since) > 1 and since[1][0] <= seq:  # pushes come in their order
            since.popleft()
        return since[0][1] if since and since[0][0] <= seq else ()


class Freezing:
    """A worker's half. Collective: no.

    Args:
        cluster: The job's ranks.

    Attributes:
        missing: Ranks of servers that have not answered yet.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._frozen: Ranges = ()
        self.missing: set[int] = set()

    def begin(self, first: int, frozen: Ranges) -> bool:
        """Tell what pushes leave alone from number `first` on. Blocks: no.

        Returns:
            Whether it is something else than before, and `missing` is to be waited for.
        """
        if frozen == self._frozen:
            return False
        self._frozen = frozen
        self.missing = set(self._cluster.roles.servers) - self._cluster.failures.lost
        for rank in self.missing:
            self._cluster.send(rank, "frozen", (first, frozen))
        return True

    def handle(self, source: int, kind: str) -> bool:
        """Act on a message; returns whether it was an answer, or of one that gives none."""
        if kind not in ("noted", "lost"):
            return False
        self.missing.discard(source)
        return True
