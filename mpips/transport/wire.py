"""Wire format of packed pushes and replies; both halves.

A slice is packed by the codec, if there is one and the slice is large enough (see `mpips.codecs`).
The codec determines sizes, so a server's memory stays bounded. The sender keeps a codec's state,
one part for each remote shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpips.codecs import Codec, MessageId, buffer_for, codec_for, is_large, make_codec
from mpips.config import Config
from mpips.layout import Shard
from mpips.mpi.window import transfer_pieces
from mpips.planning.job import Job

if TYPE_CHECKING:
    from mpips.codecs.powersgd import Factors

# Small enough to be sent eagerly over TCP by both MPIs: a rendezvous would wait for an answer
# behind the bulk data of the other direction.
CHUNK_BYTES = 60 << 10
CHUNK_UNIT = 1024  # elements: a whole number of buckets in every codec


def push_codec(config: Config) -> Codec | None:
    """Return the codec of a job's remote pushes, or None."""
    c = config
    if c.codec == "powersgd":  # it packs sums of whole matrices: see `mpips.rounds.powersgd`
        return None
    if c.codec != "topk":
        return make_codec(c.codec)
    return make_codec("topk", ratio=c.topk_ratio, momentum=c.topk_momentum, warmup=c.topk_warmup)


def pull_codec(config: Config) -> Codec | None:
    """Return the codec of a job's remote pulls, or None; it keeps no state."""
    return make_codec(config.pull_codec)


def announcement(job: Job, shards: Sequence[Shard] | None = None) -> str | None:
    """Return a line about the packing between nodes, with the packed slices; None without a codec.

    Args:
        job: The run.
        shards: Slices that cross nodes at a time; by default the shards of servers or owners.
    """
    config = job.config
    if config.codec == "powersgd":
        return _low_rank_announcement(job)
    codecs = {"pushes": push_codec(config), "pulls": pull_codec(config)}
    if config.mode == "local_sgd":
        codecs = {"what a round changes": push_codec(config)}
    if not any(codecs.values()):
        return None
    sizes = [shard.size for shard, times in _crossing(job, shards) for _ in range(times)]
    if not sizes:
        who = "a server" if job.cluster.roles.servers else "an owner"
        return f"nothing is packed: no worker is on another node than {who}"
    words = ", ".join(f"{what} by {codec.name}" for what, codec in codecs.items() if codec)
    large = sum(is_large(n, config.dtype) for n in sizes)
    return f"packed between nodes: {words}; {large} of {len(sizes)} slices have the 64 KB"


def packed_by(job: Job, shards: Sequence[Shard] | None = None) -> set[str]:
    """Return the names of the codecs that pack slices between nodes; see `announcement`."""
    config = job.config
    if config.codec == "powersgd":
        packs = job.cluster.nodes > 1 and bool(_factors(job).matrices)
    else:
        packs = any(_packed(job, shards).values())
    return {config.codec, config.pull_codec} - {"none"} if packs else set()


def _factors(job: Job) -> "Factors":
    from mpips.codecs.powersgd import Factors

    return Factors.of(job.layout, job.config.dtype, job.config.powersgd_rank)


def _low_rank_announcement(job: Job) -> str:
    if job.cluster.nodes == 1:
        return "nothing is packed: all ranks are on one node"
    factors = _factors(job)
    return (
        f"packed between nodes: sums by powersgd of rank {factors.rank}; {len(factors.matrices)} "
        f"of {len(job.layout.names)} arrays are worth it; of {job.layout.size:,} elements "
        f"{factors.sent:,} are sent"
    )


def _crossing(job: Job, shards: Sequence[Shard] | None = None) -> list[tuple[Shard, int]]:
    """Return each slice, and how often it crosses nodes: once a worker, in a round once a node."""
    roles, node_of = job.cluster.roles, job.cluster.node_of
    workers = [node_of[rank] for rank in roles.workers]
    if job.config.in_rounds:
        workers = sorted(set(workers))
    return [
        (shard, sum(node != node_of[rank] for node in workers))
        for rank, shard in zip(roles.owners, shards or job.shards, strict=True)
        if shard.size
    ]


def kept(job: Job) -> tuple[str, ...]:
    """Return the names of the push codec's state; empty if no slice is large enough for it."""
    codec = push_codec(job.config)
    return codec.state if codec is not None and any(_packed(job).values()) else ()


def unpacked(job: Job) -> str:
    """Return the slices that are not packed, as text: small, or without remote workers."""
    return ", ".join(
        f"{shard.begin:,} to {shard.end - 1:,}"
        for shard, is_packed in _packed(job).items()
        if not is_packed
    )


def _packed(job: Job, shards: Sequence[Shard] | None = None) -> dict[Shard, bool]:
    """Return for each slice whether it is large enough, and crosses nodes."""
    dtype, crossing = job.config.dtype, _crossing(job, shards)
    return {shard: times > 0 and is_large(shard.size, dtype) for shard, times in crossing}


@dataclass(frozen=True)
class Packing:
    """Packing of a run's messages.

    Attributes:
        codec: Codec of large slices, or None for no packing.
        seed: Seed of the run.
        before: Number of messages that this sender packed before this job began.
    """

    codec: Codec | None = None
    seed: int = 0
    before: int = 0


class Packer:
    """Packs one sender's messages of one slice. Collective: no.

    Args:
        source: Number of the sender; in rounds, of its node.
        buffers: Messages that may be on their way at a time.

    Attributes:
        shard: The server's shard.
        state: State of the codec, by name, each of shape (shard.size,).
        sums: Whether `pack` takes the sum of several gradients, rather than their mean. A mean is
            applied at as many times the rate as it has gradients. So the codec's state of one
            message would be applied at a wrong rate with another that has a different number of
            gradients.
    """

    def __init__(
        self, packing: Packing, shard: Shard, dtype: np.typing.DTypeLike, source: int, buffers: int
    ) -> None:
        self._packing, self._source, self.shard = packing, source, shard
        self._codec = codec_for(packing.codec, shard.size, dtype)
        self.state: dict[str, np.ndarray] = {}
        if self._codec is not None:
            nbytes = self._codec.wire_bytes(shard.size, dtype)
            self._messages = [buffer_for(nbytes) for _ in range(buffers)]
            fresh = self._codec.fresh_state(shard.size, dtype)
            self.state = dict(zip(self._codec.state, fresh, strict=True))
        self.sums = bool(self.state)

    @property
    def packs(self) -> bool:
        """Whether messages are packed."""
        return self._codec is not None

    def pack(self, grad: np.ndarray, number: int, slot: int, count: int = 1) -> list[np.ndarray]:
        """Return the message of `grad`, shape (shard.size,), in pieces of one transfer each.

        The number of pieces does not depend on the gradient. Without a codec the pieces are views
        of `grad`; else they are of a message that stays valid until `slot` is used again.

        Args:
            grad: The gradient, or the mean or sum of several, see `sums`; the receiver gets their
                mean.
            number: Number of the message, 1 for the first of this job.
            slot: Index of the buffer.
            count: Number of gradients in it.
        """
        if self._codec is None:
            return transfer_pieces(grad)
        message = self._messages[slot]
        p = self._packing
        message_id = MessageId(p.seed, self._source, p.before + number, self.shard.begin, count)
        used = self._codec.encode(grad, message, tuple(self.state.values()), message_id)
        pieces, at = [], 0
        for piece in transfer_pieces(message):
            pieces.append(piece[: max(0, used - at)])
            at += piece.size
        return pieces

    def unpack(self, slot: int, out: np.ndarray) -> None:
        """Write the content of the message in `slot`, as the receiver gets it, into `out`.

        `out` has shape (shard.size,). Only with a codec, whose messages have a fixed size.
        """
        assert self._codec is not None, "nothing is packed"
        self._codec.decode(self._messages[slot], out)


class Unpacker:
    """Unpacks messages of one slice by a codec, one at a time. Collective: no.

    Args:
        codec: The codec, or None.
        size: Elements of the slice.
        dtype: Their dtype.
        out: Gets the elements, shape (size,). By default they are in memory that is valid until the
            next call, or in the message itself if it is not packed.
    """

    def __init__(
        self,
        codec: Codec | None,
        size: int,
        dtype: np.typing.DTypeLike,
        out: np.ndarray | None = None,
    ) -> None:
        self._codec, self._size, self._dtype = codec_for(codec, size, dtype), size, dtype
        self._out = np.zeros(size, dtype) if out is None and self._codec is not None else out

    def place(self) -> np.ndarray:
        """Return memory for a message: `out` itself, if it was given and nothing is packed."""
        if self._codec is not None:
            return buffer_for(self._codec.wire_bytes(self._size, self._dtype))
        return np.zeros(self._size, self._dtype) if self._out is None else self._out

    def unpack(self, place: np.ndarray) -> np.ndarray:
        """Return the elements of a message."""
        if self._codec is None or self._out is None:
            return place
        self._codec.decode(place, self._out)
        return self._out


class Chunks(NamedTuple):
    """Chunks of a shard or of table rows for reads, each packed on its own.

    Sender and receiver each have an object.

    Attributes:
        codec: Codec of the chunks, or None.
        step: Elements, or rows, of a chunk.
        first: Elements, or rows, of the first chunk. Each further chunk is as long as all before
            it, up to `step`. So the link is busy while later chunks are read and packed.
    """

    codec: Codec | None
    step: int
    first: int

    @classmethod
    def of_shard(cls, codec: Codec | None, size: int, dtype: np.dtype) -> "Chunks":
        """Return the chunks of a shard: whole buckets of any codec."""
        found = codec_for(codec, size, dtype)
        if found is None:
            step = CHUNK_BYTES // dtype.itemsize
        else:
            step = CHUNK_UNIT * (CHUNK_BYTES // found.wire_bytes(CHUNK_UNIT, dtype))
        return cls(found, step, step)

    @classmethod
    def of_rows(cls, codec: Codec | None, rows: int, dim: int, dtype: np.dtype) -> "Chunks":
        """Return the chunks of an answer of `rows` rows: at least one row each."""
        found = codec_for(codec, rows * dim, dtype)
        each = dim * dtype.itemsize if found is None else found.wire_bytes(dim, dtype)
        step = max(1, CHUNK_BYTES // each)
        return cls(found, step, max(1, step // 4))

    def length(self, begin: int) -> int:
        """Return the most elements, or rows, of the chunk that begins at `begin`."""
        return min(self.step, max(self.first, begin))

    def cut(self, whole: np.ndarray) -> list[np.ndarray]:
        """Return the chunks of a shard, or of rows, as views of it."""
        found, begin = [], 0
        while begin < len(whole):
            found.append(whole[begin : begin + self.length(begin)])
            begin += len(found[-1])
        return found

    def message(self, chunk: np.ndarray) -> np.ndarray:
        """Return the receive buffer of a chunk: the chunk, or memory for its packed message."""
        if self.codec is None:
            return chunk
        return buffer_for(self.codec.wire_bytes(chunk.size, chunk.dtype))

    def pack(self, chunk: np.ndarray, message_id: MessageId, live: bool = False) -> np.ndarray:
        """Return the message of a chunk; it is the chunk itself if that needs no packing or copy.

        MPI sends a message in pieces, which may end within an element, and reads some of them
        later. So an element of a live chunk could mix bytes of two versions.

        Args:
            chunk: The chunk.
            message_id: Identity of the message.
            live: Whether the chunk may change before the message is sent.
        """
        if self.codec is None:
            return chunk.copy() if live else chunk
        message = self.message(chunk)
        self.codec.encode(chunk.reshape(-1), message, (), message_id)
        return message

    def unpack(self, message: np.ndarray, chunk: np.ndarray) -> None:
        """Unpack a message into its chunk, unless it was received there."""
        if self.codec is not None:
            self.codec.decode(message, chunk.reshape(-1))
