"""Messages between two ranks: Python values for control, and arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpips.mpi.abort import Failures
from mpips.mpi.start import MPI, Comm, Request, Status
from mpips.mpi.tags import TAG_CONTROL, TAG_GATHER

ANY_SOURCE, ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG
Handler = Callable[[int, Any], object]  # takes who sent a control message, and what is in it
Found = MPI.Message  # a message that a probe has found, and that nobody else receives


class Arrays:
    """Messages of arrays on one communicator. Collective: no. Blocks: no.

    Args:
        comm: The communicator.
        failures: The ranks that have died: nothing is found of them.

    What begins a message is MPI's own function, taken once: it costs no call more.

    Attributes:
        begin_send: ``(array, dest, tag)`` to a request; leave the array alone until it is complete.
        begin_synchronous_send: The same; complete only when it is being received.
        begin_receive: ``(array, source, tag)`` to a request; `ANY_SOURCE` and `ANY_TAG` match all.
        find: ``(source, tag)`` to a message that is here or coming, for `begin_receive_found`, or
            None.
    """

    begin_send: Callable[[np.ndarray, int, int], Request]
    begin_synchronous_send: Callable[[np.ndarray, int, int], Request]
    begin_receive: Callable[[np.ndarray, int, int], Request]
    find: Callable[..., Found | None]

    def __init__(self, comm: Comm, failures: Failures | None = None) -> None:
        self.begin_send, self.begin_synchronous_send = comm.Isend, comm.Issend
        self.begin_receive = comm.Irecv
        self.find = comm.Improbe if failures is None else failures.guard(comm.Improbe)
        self._status = Status()

    def rows(self, tag: int, width: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the messages that have come, of rows of so many int64 each.

        Yields:
            Rank of the sender, and the rows, shape (rows, width).
        """
        status = self._status
        while (found := self.find(ANY_SOURCE, tag, status)) is not None:
            rows = np.empty((status.Get_count(MPI.INT64_T) // width, width), "i8")
            source = status.source
            found.Recv(rows)
            yield source, rows

    def begin_receives(self, tag: int) -> Iterator[tuple[int, Request, np.ndarray]]:
        """Begin to receive the messages that have come or are coming, of any length.

        Yields:
            Rank of the sender, the request, and what the message goes to, dtype uint8, aligned as
            any number wants it.
        """
        status = self._status
        while (found := self.find(ANY_SOURCE, tag, status)) is not None:
            nbytes = status.Get_count(MPI.BYTE)
            out = np.empty(-(-nbytes // 8), "u8").view("u1")[:nbytes]
            yield status.source, found.Irecv(out), out


def begin_receive_found(found: Found, out: np.ndarray) -> Request:
    """Begin to receive a message that `Arrays.find` has found. Collective: no. Blocks: no."""
    return found.Irecv(out)


class Mailbox:
    """A rank's control messages, which are rare and small. Collective: no. Blocks: no.

    Args:
        comm: A communicator that nothing else travels on.
        failures: The ranks that have died: what is sent to them is dropped.
    """

    def __init__(self, comm: Comm, failures: Failures) -> None:
        self._rank, self._failures = comm.rank, failures
        self._isend, self._find = comm.Isend, failures.guard(comm.Improbe)
        self._status = Status()
        self._sending: list[tuple[Request, bytes]] = []
        self._later: list[tuple[int, str, Any]] = []

    def send(self, dest: int, kind: str, payload: Any) -> None:
        """Send a control message, which `poll` receives; also to this rank itself."""
        if dest == self._rank:
            self._later.append((dest, kind, payload))
        else:
            self._send(dest, TAG_CONTROL, (kind, payload))

    def bring(self, dest: int, value: object) -> None:
        """Send a value for which `dest` calls `brought_by`."""
        self._send(dest, TAG_GATHER, value)

    def _send(self, dest: int, tag: int, value: object) -> None:
        self.empty()
        message = MPI.pickle.dumps(value)
        request = self._failures.begin_send(self._isend, message, dest, tag)
        if request is not None:
            self._sending.append((request, message))

    def poll(self) -> list[tuple[int, str, Any]]:
        """Return the control messages that have come, as (source, kind, payload).

        Messages of one source come in the order in which they were sent.
        """
        messages, self._later = self._later, []
        while (found := self._find(ANY_SOURCE, TAG_CONTROL, self._status)) is not None:
            source = self._status.source
            messages.append((source, *self._value(found)))
        return messages

    def brought_by(self, rank: int) -> list[Any]:
        """Return the next value that a rank has brought, as a list; [] if none has come."""
        found = self._find(rank, TAG_GATHER, self._status)
        return [] if found is None else [self._value(found)]

    def _value(self, found: Found) -> Any:
        body = bytearray(self._status.Get_count(MPI.BYTE))
        found.Recv(body)  # already here or on its way: does not wait for anybody's step
        return MPI.pickle.loads(body)

    def empty(self) -> bool:
        """Return whether every message has left."""
        test = self._failures.attempt
        self._sending = [(r, m) for r, m in self._sending if test(r.Test) is False]
        return not self._sending
