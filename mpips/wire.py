"""What crosses nodes in fewer bytes: both halves of a packed push, and of a packed reply.

A slice goes by its codec if it has one and is large enough, and else as it is (see
`mpips.codecs`). Sizes are fixed by the codec, so that a server's memory stays bounded. The state
that a codec keeps lives with the sender, a part for each far shard.
"""

from dataclasses import dataclass

import numpy as np

from mpips.codecs import Codec, Origin, State, buffer_for, codec_for, make_codec
from mpips.config import Config
from mpips.layout import Shard
from mpips.window import transfer_pieces


def push_codec(config: Config) -> Codec | None:
    """Return the codec of far pushes that a job asks for, or None."""
    c = config
    if c.codec != "topk":
        return make_codec(c.codec)
    return make_codec("topk", ratio=c.topk_ratio, momentum=c.topk_momentum, warmup=c.topk_warmup)


@dataclass(frozen=True)
class Packing:
    """How a run packs.

    Attributes:
        codec: What large slices go by, or None for no packing.
        seed: Of the run.
        before: Number of what this sender had packed before this job began.
    """

    codec: Codec | None = None
    seed: int = 0
    before: int = 0


class Packer:
    """Packs what one sender sends to one server. Collective: no.

    Args:
        source: Number of the sender.
        buffers: Messages that may be on their way at a time.

    Attributes:
        shard: The server's shard.
        state: What the codec keeps, each of shape (shard.size,).
    """

    def __init__(
        self,
        packing: Packing,
        shard: Shard,
        dtype: np.typing.DTypeLike,
        source: int,
        buffers: int,
    ) -> None:
        self._packing, self._source, self.shard = packing, source, shard
        self._codec, self.state = codec_for(packing.codec, shard.size, dtype), State()
        if self._codec is not None:
            nbytes = self._codec.wire_bytes(shard.size, dtype)
            self._messages = [buffer_for(nbytes) for _ in range(buffers)]
            self.state = self._codec.fresh_state(shard.size, dtype)

    def pack(self, grad: np.ndarray, number: int, slot: int) -> list[np.ndarray]:
        """Return what to send for `grad`, shape (shard.size,), as pieces of one transfer each.

        The number of pieces does not depend on the gradient. They are `grad` itself where there
        is nothing to pack, and else a message that is kept until `slot` is used again.

        Args:
            grad: The gradient, or the mean of several.
            number: Of the message, 1 for the first of this job.
            slot: Which of the `buffers` to use.
        """
        if self._codec is None:
            return transfer_pieces(grad)
        message = self._messages[slot]
        p = self._packing
        origin = Origin(p.seed, self._source, p.before + number, self.shard.begin)
        used = self._codec.encode(grad, message, self.state, origin)
        pieces, at = [], 0
        for piece in transfer_pieces(message):
            pieces.append(piece[: max(0, used - at)])
            at += piece.size
        return pieces


class Unpacker:
    """Unpacks the pushes to one server, one at a time. Collective: no."""

    def __init__(self, codec: Codec | None, size: int, dtype: np.typing.DTypeLike) -> None:
        self._codec, self._size, self._dtype = codec_for(codec, size, dtype), size, dtype
        self._grad = np.zeros(size, dtype) if self._codec is not None else None

    def place(self) -> np.ndarray:
        """Return room for a message."""
        if self._codec is None:
            return np.zeros(self._size, self._dtype)
        return buffer_for(self._codec.wire_bytes(self._size, self._dtype))

    def unpack(self, place: np.ndarray) -> np.ndarray:
        """Return the gradient in a message: `place` itself, or a copy valid until the next call."""
        if self._codec is None or self._grad is None:
            return place
        self._codec.decode(place, self._grad)
        return self._grad
