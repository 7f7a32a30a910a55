"""Codecs: compression of gradients and parameters.

A codec module is imported only if the job uses the codec.

A codec with error feedback keeps the error of one message, and adds it to the next gradient. This
is its **state**: vectors of the gradient's length and dtype. Random bits depend only on the seed,
the worker, the number of the push and the position, so a run can be repeated.

NaN and infinity stay visible: if a vector contains one, so does the decoded vector. A finite
element is never decoded as infinite: if it is too large for a format, it becomes the format's
largest number.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from mpips.config import Config

CODECS = {  # name: (module, class)
    "fp16": ("float16", "Fp16"),
    "bf16": ("float16", "Bf16"),
    "int8": ("qsgd", "Int8"),
    "int4": ("qsgd", "Int4"),
    "topk": ("topk", "TopK"),
    "onebit": ("onebit", "OneBit"),
}
AUTO = "auto"  # the fastest of several codecs, measured when the job starts
RAW_BYTES = 64 << 10  # slices of fewer bytes are sent uncompressed
ERROR, BASIS = "error", "basis"  # state of `mpips.codecs.powersgd`, in checkpoints
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

State = tuple[np.ndarray, ...]
Loop = Callable[..., None]


@dataclass(frozen=True)
class MessageId:
    """Identity of a message within a run, from which its random bits are derived.

    Attributes:
        seed: Seed of the run.
        source: Worker number, or another number that is unique to the sender.
        number: Number of the push; a worker's first is 1.
        begin: Index of the first element in the flat vector.
        count: Number of gradients in the sum that a codec with a state encodes. It sends their
            mean, and keeps the error of the sum; so the next message may have another count. It
            does not enter `key`.
    """

    seed: int = 0
    source: int = 0
    number: int = 1
    begin: int = 0
    count: int = 1

    @property
    def key(self) -> np.uint64:
        """Hash of 64 bits of seed, source, number and begin (SplitMix64; Steele et al., 2014)."""
        key = 0
        for word in (self.seed, self.source, self.number, self.begin):
            key = (key ^ word) + _GOLDEN & _WORD
            key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _WORD
            key = (key ^ key >> 27) * 0x94D049BB133111EB & _WORD
            key ^= key >> 31
        return np.uint64(key)


@dataclass(frozen=True)
class Codec(ABC):
    """Base class of codecs, which encode a vector in fewer bytes. Collective: no. Blocks: no.

    Attributes:
        name: Name on the command line.
    """

    name: ClassVar[str]

    @property
    def state(self) -> tuple[str, ...]:
        """Return the names of its state vectors, each of the gradient's shape and dtype."""
        return ()

    def for_rows(self, dim: int) -> "Codec | None":
        """Return the codec for table rows of `dim` numbers, or None if this codec packs no rows.

        Each message contains other rows, so a codec with a state packs no rows.
        """
        return None

    def fresh_state(self, n: int, dtype: np.typing.DTypeLike) -> State:
        """Return the state before the first message: a vector of zeros for each name of `state`.

        Args:
            n: Number of elements of each vector.
            dtype: dtype of each vector.
        """
        return tuple(np.zeros(n, dtype) for _ in self.state)

    @abstractmethod
    def wire_bytes(self, n: int, dtype: np.typing.DTypeLike) -> int:
        """Return the largest size in bytes of a message of `n` elements."""

    @abstractmethod
    def encode(self, grad: np.ndarray, out: np.ndarray, state: State, message_id: MessageId) -> int:
        """Encode a vector into a message.

        Args:
            grad: Vector to encode, shape (n,), dtype float32 or float64, contiguous; only read.
            out: The message, shape (wire_bytes(n, dtype),), dtype uint8, 8-byte aligned.
            state: State vectors, as `fresh_state` returns them; updated in place.
            message_id: Identity of the message.

        Returns:
            Length of the message: the number of bytes of `out` that are used.

        Raises:
            ValueError: If a length is wrong.
        """

    @abstractmethod
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """Decode a message into a vector.

        Args:
            data: The message that `encode` wrote, dtype uint8. Unused bytes at its end may be cut
                off, if the codec's messages differ in length.
            out: Gets the decoded vector, shape (n,), of the encoded vector's dtype.

        Raises:
            ValueError: If a length is wrong, or `encode` cannot have written the message.
        """

    def _check(self, message: np.ndarray, vector: np.ndarray, *state: np.ndarray) -> None:
        """Raise ValueError unless message, vector and state vectors have matching lengths."""
        expected = self.wire_bytes(vector.size, vector.dtype)
        if message.size != expected or any(part.size != vector.size for part in state):
            got = f"{self.name}: {message.size} bytes for {vector.size} elements"
            raise ValueError(f"{got}, expected {expected} and a state of that length")


def bits_of(vector: np.ndarray) -> np.ndarray:
    """Return a view of a float32 or float64 vector as signed integers of the same width."""
    return vector.view(f"i{vector.itemsize}")


def buffer_for(nbytes: int) -> np.ndarray:
    """Return a buffer of zeros for a message, shape (nbytes,), dtype uint8, 8-byte aligned."""
    return np.zeros(-(-nbytes // 8), "u8").view("u1")[:nbytes]


def wire_parts(message: np.ndarray, *parts: tuple[int, Any]) -> list[np.ndarray]:
    """Return views of consecutive parts of a message, from its first byte on.

    Args:
        message: The message, dtype uint8.
        parts: Number of elements and dtype of each part.
    """
    views, at = [], 0
    for n, dtype in parts:
        end = at + n * np.dtype(dtype).itemsize
        views.append(message[at:end].view(dtype))
        at = end
    return views


def is_open(config: Config) -> bool:
    """Return whether mpips chooses a codec of the job (``auto``)."""
    return AUTO in (config.codec, config.pull_codec)


def make_codec(name: str, **options: float) -> Codec | None:
    """Return a codec, or None for "none".

    Args:
        name: Name of the codec, a key of `CODECS`, or "none".
        options: Fields of the codec that differ from their defaults.
    """
    if name == "none":
        return None
    module, kind = CODECS[name]
    return getattr(import_module(f"mpips.codecs.{module}"), kind)(**options)


def codec_for(codec: Codec | None, n: int, dtype: np.typing.DTypeLike) -> Codec | None:
    """Return the codec for a slice of `n` elements, or None if it is sent uncompressed."""
    return codec if is_large(n, dtype) else None


def is_large(n: int, dtype: np.typing.DTypeLike) -> bool:
    """Return whether a slice of `n` elements has at least `RAW_BYTES`, and so is compressed."""
    return n * np.dtype(dtype).itemsize >= RAW_BYTES


@cache
def warm(codec: Codec | None, dtype: str) -> None:
    """Compile the loops of a codec, or load them from the cache on disk."""
    if codec is not None:
        grad = np.ones(1, dtype)
        message = buffer_for(codec.wire_bytes(1, dtype))
        codec.encode(grad, message, codec.fresh_state(1, dtype), MessageId())
        codec.decode(message, grad)
