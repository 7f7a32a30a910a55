"""Parameters as named arrays in one flat vector, cut into shards, and the roles of ranks."""

from mpips.layout.arrays import (
    CACHE_LINE_BYTES,
    Layout,
    Shard,
    aligned_zeros,
    check_alike,
    cut,
)

__all__ = [
    "CACHE_LINE_BYTES",
    "Layout",
    "Shard",
    "aligned_zeros",
    "check_alike",
    "cut",
]
