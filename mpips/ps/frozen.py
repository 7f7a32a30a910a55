"""Arrays that a worker's pushes leave alone, as its program has frozen them; both halves.

A push says nothing of them. Where they become others the worker tells every server, with the number
of the first push that this holds for, and announces that push when all have answered: so a server
that takes it knows. It waits for no other worker; a server answers whatever it waits for itself.
"""

from collections import deque
from collections.abc import Callable

from mpips.mpi.world import Cluster
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
        frozen: What servers know that pushes leave alone.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.frozen: Ranges = ()
        self._missing: set[int] = set()  # servers that have not answered yet

    def tell(self, first: int, frozen: Ranges, get_on: Callable[[], object]) -> float:
        """Tell every server what pushes leave alone from number `first` on.

        Args:
            first: The number.
            frozen: The arrays.
            get_on: Gets on with all that the worker does for others.

        Returns:
            The seconds waited.

        Blocks: until all have answered.
        """
        self.frozen = frozen
        self._missing = set(self._cluster.roles.servers) - self._cluster.failures.lost
        for rank in self._missing:
            self._cluster.send(rank, "frozen", (first, frozen))

        def told() -> bool:
            get_on()
            return not self._missing

        return self._cluster.wait(told)

    def noted(self, source: int, _: None = None) -> None:
        """Note the answer of a server, or that it gives none: it has died."""
        self._missing.discard(source)
