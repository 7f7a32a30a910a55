"""The ranks that train, those that evaluate, and what joins them.

The last ranks of the world evaluate. Each side has a communicator of its own, so that training
goes on as if its ranks were the whole world, with the same numbers; here are the messages between
the two, and the errors that both raise.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from mpips.cluster.agreement import Agreed, everywhere, together
from mpips.cluster.collectives import begin_barrier, gather_all
from mpips.cluster.failures import Failures
from mpips.cluster.messages import Mailbox
from mpips.cluster.start import Comm
from mpips.layout.roles import training

POLL_S = 1e-3

T = TypeVar("T")


class Link:
    """What joins the two sides of a job. Collective: yes, construction and `free`.

    Args:
        comm: All ranks.
        evaluators: How many of the last ones evaluate.

    Attributes:
        everyone: All ranks.
        side: Those of this rank's side.
        evaluators: The ranks that evaluate, increasing.
        evaluates: Whether this is one of them.

    Raises:
        Agreed: If no rank would be left to train, on every rank.
    """

    def __init__(self, comm: Comm, evaluators: int) -> None:
        first = everywhere(comm, lambda: training(comm.size, evaluators))
        self.everyone, self.evaluators = comm, tuple(range(first, comm.size))
        self.evaluates = comm.rank >= first
        self.side: Comm = comm.Split(int(self.evaluates), key=comm.rank)  # type: ignore[assignment]
        self._control = comm.Dup()
        self._failures = Failures([self._control])  # spares nobody: the death of any ends the job
        self._mailbox = Mailbox(self._control, self._failures)
        self._polled_s = 0.0

    def agreed(self, make: Callable[[], T]) -> T:
        """Call `make` on every rank; an error that one side has agreed on is raised on both.

        Collective: yes; both sides call it equally often. `make` may differ.
        """
        error: Agreed | None = None
        try:
            value = make()
        except Agreed as problem:
            error = problem
        try:
            together(self.everyone, error)
        except Agreed as shared:
            codes = gather_all(self.everyone, None if error is None else error.code)
            shared.code = next(code for code in codes if code is not None)
            raise
        return value

    def send(self, dest: int, kind: str, payload: Any = None) -> None:
        """Send a message to a rank, of all ranks. Blocks: no."""
        self._mailbox.send(dest, kind, payload)

    def poll(self) -> list[tuple[int, str, Any]]:
        """Return the messages that have come, as (source, kind, payload); looks once a ms.

        Raises:
            Lost: If a rank of the other side has died.

        Blocks: no.
        """
        now = time.perf_counter()
        if now - self._polled_s < POLL_S:
            return []
        self._polled_s = now
        return self._mailbox.poll()

    def free(self) -> None:
        """Free the communicators, and drop messages that nobody waits for any more.

        Collective: yes. Blocks: until all have come.
        """
        while not self._mailbox.empty():
            self._mailbox.poll()
            time.sleep(POLL_S)
        here = begin_barrier(self._control)
        while not here.Test():
            self._mailbox.poll()
            time.sleep(POLL_S)
        self._failures.forget()
        self._control.Free()
        self.side.Free()


def agreed(link: Link | None, make: Callable[[], T]) -> T:
    """Call `make`, with the other side where there is one; see `Link.agreed`."""
    return make() if link is None else link.agreed(make)
