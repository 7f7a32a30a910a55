"""Reads of remote shards by message where ranks may die: the worker's half.

Each shard's messages have tags of their own, and each is asked for by itself. A shard whose owner
has died is asked for once more, of who takes it over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpips.codecs import Codec
from mpips.health import status_board
from mpips.layout import Shard
from mpips.mpi.start import Request
from mpips.mpi.world import Cluster
from mpips.transport.acknowledged import REPLIES, tag_of
from mpips.transport.remote_reads import CHUNK_BYTES, Owner, ReplyReads
from mpips.transport.wire import Chunked


@dataclass
class _Asked:
    """A shard that was asked for.

    Attributes:
        rank: Whom.
        requests: What has to complete.
        packed: Of each chunk what unpacks it, its message, and where it goes.
        here: Whether it is here.
    """

    rank: int
    requests: list[Request]
    packed: list[tuple[Chunked, np.ndarray, np.ndarray]]
    here: bool = False


class AcknowledgedReads(ReplyReads):
    """Reads by message; see `ReplyReads` and this module.

    Args:
        serving: Returns the rank that serves the shard of a server of that number.
    """

    def __init__(
        self,
        cluster: Cluster,
        owners: Sequence[Owner],
        servers: int,
        consistent: bool,
        codec: Codec | None,
        needs: Callable[[], tuple[int, ...]],
        serving: Callable[[int], int],
    ) -> None:
        super().__init__(cluster, owners, servers, consistent, codec, needs)
        self._serving = serving
        self._asked: dict[int, _Asked] = {}
        self._hurried = False

    def fetch(self) -> None:
        """See `RemoteReads.fetch`."""
        status_board.fetched()
        self._hurried, self._fetched = False, True
        self._asked = {server: self._ask(server, shard) for server, _, shard in self._owners}

    def _ask(self, server: int, shard: Shard) -> _Asked:
        out, rank = self._out, self._serving(server)
        chunked = Chunked(self._codec, shard, out.dtype, CHUNK_BYTES)
        chunks = chunked.cut(out[shard.range])
        messages = chunked.messages(chunks)
        begin, tag = self._cluster.arrays.begin_receive, tag_of(server, REPLIES)
        attempt = self._cluster.failures.attempt
        parts = (self._first[server], *messages, self._last[server])
        comes = [attempt(begin, part, rank, tag) for part in parts]
        self._received += sum(message.nbytes for message in messages)
        self._cluster.send(rank, "read of", (server, self._consistent, *self._needs()))
        if self._hurried:
            self._cluster.send(rank, "cancel wait")
        packed = []
        if messages is not chunks:
            packed = [(chunked, a, b) for a, b in zip(messages, chunks, strict=True)]
        return _Asked(rank, [request for request in comes if request is not None], packed)

    def advance(self) -> bool:
        """See `RemoteReads.advance`."""
        for server, _, shard in self._owners if self._asked else ():
            asked = self._asked[server]
            if asked.here or not self._cluster.failures.done(asked.requests):
                continue
            if asked.rank not in self._cluster.failures.lost:
                asked.here = True
                for chunked, message, chunk in asked.packed:
                    chunked.unpack(message, chunk)
            elif self._serving(server) != asked.rank:
                self._asked[server] = self._ask(server, shard)
        return self._fetched and all(asked.here for asked in self._asked.values())

    def cancel_wait(self) -> None:
        """See `RemoteReads.cancel_wait`."""
        self._hurried = True
        for asked in self._asked.values():
            self._cluster.send(asked.rank, "cancel wait")
