"""Codecs: gradients and parameters in fewer bytes."""

from functools import cache

import numpy as np

from mpips.codecs.base import RAW_BYTES, Codec, MessageId, State, buffer_for
from mpips.codecs.float16 import Bf16, Fp16
from mpips.codecs.onebit import OneBit
from mpips.codecs.qsgd import Int4, Int8
from mpips.codecs.topk import TopK
from mpips.errors import unknown

__all__ = [
    "CODECS",
    "Codec",
    "MessageId",
    "State",
    "buffer_for",
    "codec_for",
    "is_large",
    "make_codec",
    "warm",
]

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (Fp16, Bf16, Int8, Int4, TopK, OneBit)
}


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
    return CODECS[name](**options)


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
