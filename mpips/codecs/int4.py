"""QSGD with 4 bits: two levels a byte, against a scale per bucket."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpips.codecs.int8 import Int8, draw_of, largest_of, level_of
from mpips.kernels.compiled import kernel

BUCKET = 128
LEVELS = 7
ZERO = 8  # what is written for level 0


@kernel()
def pack(
    x: np.ndarray,
    x_bits: np.ndarray,
    scales: np.ndarray,
    scale_bits: np.ndarray,
    pairs: np.ndarray,
    key: np.uint64,
    bucket: int,
) -> None:
    """Write scales and pairs of levels."""
    for b in range(scales.size):
        block = x[b * bucket : (b + 1) * bucket]
        out = pairs[b * (bucket // 2) : (b + 1) * (bucket // 2)]
        scale_bits[b] = largest_of(x_bits[b * bucket : (b + 1) * bucket])
        scale = scales[b]
        out[:] = ZERO + 16 * ZERO
        if not 0 < scale < np.inf:
            continue
        draw, half = draw_of(key, b), out.size
        for i in range(half):
            out[i] = np.uint8(ZERO + level_of(block, i, scale, LEVELS, draw))
        for i in range(half, block.size):
            upper = np.uint8((ZERO + level_of(block, i, scale, LEVELS, draw)) << 4)
            out[i - half] = np.uint8(out[i - half] | upper)


@kernel()
def unpack(scales: np.ndarray, pairs: np.ndarray, out: np.ndarray, bucket: int) -> None:
    """Read them; the largest of a bucket is exact."""
    real = out.dtype.type
    for b in range(scales.size):
        block = out[b * bucket : (b + 1) * bucket]
        pair = pairs[b * (bucket // 2) : (b + 1) * (bucket // 2)]
        scale, half = scales[b], pair.size
        for i in range(half):
            block[i] = real(np.int32(pair[i] & 15) - ZERO) / real(LEVELS) * scale
        for i in range(half, block.size):
            block[i] = real(np.int32(pair[i - half] >> 4) - ZERO) / real(LEVELS) * scale


@dataclass(frozen=True)
class Int4(Int8):
    """`mpips.codecs.int8.Int8` with s = 7 levels, and a bucket of 128 elements.

    Unbiased, with ``|Q(x) - x| < m / 7``: for what many workers' steps have changed, which a
    round of `mpips.rounds.averaging` adds up. A bucket is smaller than with 8 bits, as an error
    grows with the largest of it. Its first half is in the lower four bits of its bytes.

    References: Alistarh et al., NeurIPS 2017; 4 bits for outer gradients are of Douillard et al.,
    arXiv 2501.18512, section 3.3 (floating-point ones there).
    """

    name: ClassVar[str] = "int4"
    stored: ClassVar[str] = "u1"
    in_one: ClassVar[int] = 2
    loops = pack, unpack
    bucket: int = BUCKET
