"""Raw TCP between two ranks, the limit of a link."""

import contextlib
import socket
import threading

import numpy as np

from mpips.mpi.collectives import broadcast
from mpips.mpi.world import Cluster

PIECE_BYTES = 1 << 20
TIMEOUT_S = 20.0


def _addresses() -> list[str]:
    """Return the addresses by which other hosts may reach this one, the likeliest first."""
    found = []
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing: asks the routing table
        found.append(probe.getsockname()[0])
    return sorted(dict.fromkeys(found), key=lambda a: a.startswith("127."))


class Link:
    """A connection between rank 0, which listens, and rank 1. Collective: yes, over both."""

    def __init__(self, cluster: Cluster) -> None:
        self._first = cluster.rank == 0
        if self._first:
            with socket.create_server(("", 0)) as server:
                server.settimeout(TIMEOUT_S)
                broadcast(cluster.comm, (_addresses(), server.getsockname()[1]))
                self._socket, _ = server.accept()
        else:
            place: tuple[list[str], int] = broadcast(cluster.comm, None)
            self._socket = self._connect(*place)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def _connect(names: list[str], port: int) -> socket.socket:
        for name in names:
            with contextlib.suppress(OSError):
                return socket.create_connection((name, port), timeout=TIMEOUT_S / len(names))
        raise OSError(f"no connection to {names} port {port}")

    def send(self, data: np.ndarray) -> None:
        """Send an array, as raw bytes."""
        self._socket.settimeout(None)
        self._socket.sendall(memoryview(data.data).cast("B"))

    def receive(self, out: np.ndarray) -> None:
        """Receive an array whole."""
        self._socket.settimeout(None)
        view, at = memoryview(out.data).cast("B"), 0
        while at < len(view):
            at += self._socket.recv_into(view[at : at + PIECE_BYTES])

    def one_way(self, data: np.ndarray, times: int, from_first: bool) -> None:
        """Move `data` so many times; one byte back says that all is there."""
        byte = np.zeros(1, "u1")
        if self._first == from_first:
            for _ in range(times):
                self.send(data)
            self.receive(byte)
        else:
            for _ in range(times):
                self.receive(data)
            self.send(byte)

    def both_ways(self, data: np.ndarray, out: np.ndarray, times: int) -> None:
        """Move `data` so many times in both directions at once."""

        def send() -> None:
            for _ in range(times):
                self.send(data)

        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(times):
            self.receive(out)
        sender.join()

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._socket.close()
