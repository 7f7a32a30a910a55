"""Codecs: gradients and parameters in fewer bytes.

The module of a codec is imported where a job asks for that codec.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from mpips.codecs.base import RAW_BYTES, Codec, MessageId, State, buffer_for
from mpips.errors import unknown

if TYPE_CHECKING:
    from mpips.config import Config

__all__ = [
    "AUTO",
    "CODECS",
    "Codec",
    "MessageId",
    "State",
    "buffer_for",
    "codec_for",
    "is_large",
    "is_open",
    "make_codec",
    "warm",
]

CODECS = ("fp16", "bf16", "int8", "int4", "topk", "onebit")
AUTO = "auto"  # the fastest of some, which is measured when the job starts


def is_open(config: "Config") -> bool:
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
    return _kind(name)(**options)


def _kind(name: str) -> type[Codec]:
    """Import a codec's module, and return its class."""
    if name == "topk":
        from mpips.codecs.topk import TopK

        return TopK
    if name == "onebit":
        from mpips.codecs.onebit import OneBit

        return OneBit
    if name in ("int8", "int4"):
        from mpips.codecs.qsgd import Int4, Int8

        return Int8 if name == "int8" else Int4
    from mpips.codecs.float16 import Bf16, Fp16

    return Fp16 if name == "fp16" else Bf16


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
