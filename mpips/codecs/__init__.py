"""Codecs: gradients and parameters in fewer bytes.

The module of a codec is imported where a job asks for that codec.

What a codec leaves out of one message it may keep, and add to the next: its **state**, vectors of
the length and dtype of what it encodes. Everything random is a function of the seed, the worker,
the number of the push and the position, never of a state, so that a run can be repeated.

NaN and infinity stay visible: what is decoded from a vector that holds one holds one as well.
Finite elements are never made infinite; what is too large for a format becomes its largest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from mpips.config import Config
from mpips.errors import unknown

CODECS = {  # module and class of each
    "fp16": ("float16", "Fp16"),
    "bf16": ("float16", "Bf16"),
    "int8": ("qsgd", "Int8"),
    "int4": ("qsgd", "Int4"),
    "topk": ("topk", "TopK"),
    "onebit": ("onebit", "OneBit"),
}
AUTO = "auto"  # the fastest of some, which is measured when the job starts
RAW_BYTES = 64 << 10  # slices of fewer bytes are not worth it
ERROR, BASIS = "error", "basis"  # what ranks keep between rounds of `mpips.codecs.powersgd`
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

State = tuple[np.ndarray, ...]
Loop = Callable[..., None]


@dataclass(frozen=True)
class MessageId:
    """What tells a message from all others of a run, and so keys its random bits.

    Attributes:
        seed: Of the run.
        source: Number of the worker, or whatever else tells senders apart.
        number: Of the push, 1 for a worker's first.
        begin: Position of the first element in the flat vector.
        count: Gradients whose sum is encoded, where the codec keeps a state; what is sent is
            their mean, and the state is of sums, so that another count may follow.
    """

    seed: int = 0
    source: int = 0
    number: int = 1
    begin: int = 0
    count: int = 1

    @property
    def key(self) -> np.uint64:
        """64 bits that depend on all of it (SplitMix64; Steele et al., OOPSLA 2014)."""
        key = 0
        for word in (self.seed, self.source, self.number, self.begin):
            key = (key ^ word) + _GOLDEN & _WORD
            key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _WORD
            key = (key ^ key >> 27) * 0x94D049BB133111EB & _WORD
            key ^= key >> 31
        return np.uint64(key)


@dataclass(frozen=True)
class Codec(ABC):
    """One way to write a vector as fewer bytes. Collective: no. Blocks: no.

    Attributes:
        name: Name on the command line.
    """

    name: ClassVar[str]

    @property
    def state(self) -> tuple[str, ...]:
        """Return the names of what it keeps between two messages: vectors like the gradient."""
        return ()

    def for_rows(self, dim: int) -> "Codec | None":
        """Return what rows of `dim` numbers are packed by, or None where this packs no rows.

        A vector of rows is another one each time, so that nothing can be kept of it.
        """
        return None

    def fresh_state(self, n: int, dtype: np.typing.DTypeLike) -> State:
        """Return the state before the first message: zeroes, shape (n,) each."""
        return tuple(np.zeros(n, dtype) for _ in self.state)

    @abstractmethod
    def wire_bytes(self, n: int, dtype: np.typing.DTypeLike) -> int:
        """Return the size of a message of `n` elements, the largest if sizes differ."""

    @abstractmethod
    def encode(self, grad: np.ndarray, out: np.ndarray, state: State, message_id: MessageId) -> int:
        """Write a message.

        Args:
            grad: Shape (n,), dtype float32 or float64, contiguous; only read.
            out: Shape (wire_bytes(n, dtype),), dtype uint8, 8-byte aligned.
            state: What `fresh_state` gave, brought up to date here.
            message_id: Which message it is.

        Returns:
            Bytes of `out` that are in use.

        Raises:
            ValueError: If a length is wrong.
        """

    @abstractmethod
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """Read a message.

        Args:
            data: As `encode` wrote it; bytes after those in use may be there or not.
            out: Shape (n,), of the dtype that was encoded.

        Raises:
            ValueError: If a length is wrong, or the message is not one of `encode`.
        """

    def _check(self, message: np.ndarray, vector: np.ndarray, *state: np.ndarray) -> None:
        """Raise ValueError unless these belong together."""
        expected = self.wire_bytes(vector.size, vector.dtype)
        if message.size != expected or any(part.size != vector.size for part in state):
            got = f"{self.name}: {message.size} bytes for {vector.size} elements"
            raise ValueError(f"{got}, expected {expected} and a state of that length")
        if len(state) not in (0, len(self.state)):
            raise ValueError(f"{self.name}: {len(state)} states, expected {len(self.state)}")


def bits_of(vector: np.ndarray) -> np.ndarray:
    """Return a view of a vector of float32 or float64 as signed integers of that width."""
    return vector.view(f"i{vector.itemsize}")


def buffer_for(nbytes: int) -> np.ndarray:
    """Return zeroes to encode into, shape (nbytes,), dtype uint8, 8-byte aligned."""
    return np.zeros(-(-nbytes // 8), "u8").view("u1")[:nbytes]


def wire_parts(message: np.ndarray, *parts: tuple[int, Any]) -> list[np.ndarray]:
    """Cut the head of a message into vectors of these lengths and dtypes, one after another."""
    found, at = [], 0
    for n, dtype in parts:
        end = at + n * np.dtype(dtype).itemsize
        found.append(message[at:end].view(dtype))
        at = end
    return found


def is_open(config: Config) -> bool:
    """Return whether a job leaves a codec to be chosen."""
    return AUTO in (config.codec, config.pull_codec)


def make_codec(name: str, **options: float) -> Codec | None:
    """Return a codec, or None for "none".

    Args:
        name: Its name.
        options: Those of its fields that differ from the default.

    Raises:
        UserError: If there is none of that name.
    """
    if name == "none":
        return None
    if name not in CODECS:
        raise unknown("codec", name, ("none", *CODECS))
    module, kind = CODECS[name]
    return getattr(import_module(f"mpips.codecs.{module}"), kind)(**options)


def codec_for(codec: Codec | None, n: int, dtype: np.typing.DTypeLike) -> Codec | None:
    """Return the codec for a slice of `n` elements, or None where it goes as it is."""
    return codec if is_large(n, dtype) else None


def is_large(n: int, dtype: np.typing.DTypeLike) -> bool:
    """Return whether a slice of `n` elements is worth packing."""
    return n * np.dtype(dtype).itemsize >= RAW_BYTES


@cache
def warm(codec: Codec | None, dtype: str) -> None:
    """Compile, or load from the cache on disk, the loops of a codec."""
    if codec is not None:
        grad = np.ones(1, dtype)
        message = buffer_for(codec.wire_bytes(1, dtype))
        codec.encode(grad, message, codec.fresh_state(1, dtype), MessageId())
        codec.decode(message, grad)
