"""QSGD codecs of 8 and 4 bits, with one scale per bucket."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from mpips.codecs import Codec, MessageId, State, bits_of, wire_parts
from mpips.kernels.compiled import kernel

BUCKET_8, BUCKET_4 = 512, 128
LEVELS_8, LEVELS_4 = 127, 7  # s of the paper
ZERO = 8  # code of level 0 in 4 bits
ROWS_LEAST = 16  # least elements of a bucket of whole rows: a scale takes as much as one element


@kernel()
def largest_of(bits: np.ndarray) -> int:
    """Return the bits of the largest magnitude, compared as integers; NaN is the largest."""
    word = bits.dtype.type
    mask = word(np.iinfo(bits.dtype).max)
    top = word(0)
    for i in range(bits.size):
        size = word(bits[i] & mask)
        top = size if size > top else top
    return top


@kernel()
def draw_of(key: np.uint64, b: int) -> np.uint64:
    """Return the random bits of bucket b, for `level_of`."""
    draw = np.uint64(key + np.uint64(b + 1) * np.uint64(0x9E3779B97F4A7C15))
    draw = np.uint64((draw ^ (draw >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    return np.uint64((draw ^ (draw >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))


@kernel()
def level_of(block: np.ndarray, i: int, scale: float, levels: int, draw: np.uint64) -> np.int32:
    """Return element i of a bucket in units of ``scale / levels``, rounded stochastically."""
    real = block.dtype.type
    first, second = np.uint32(draw), np.uint32(draw >> np.uint64(32))
    # A 32-bit hash of the position (lowbias32 by Wellons), keyed twice; LLVM vectorises it.
    u = np.uint32(np.uint32(i) ^ first)
    u = np.uint32(np.uint32(u ^ (u >> np.uint32(16))) * np.uint32(0x7FEB352D))
    u = np.uint32(np.uint32(u ^ (u >> np.uint32(15))) ^ second)
    u = np.uint32(u * np.uint32(0x846CA68B))
    u = np.uint32(u ^ (u >> np.uint32(16)))
    below = real(np.int32(u >> np.uint32(8))) * real(2.0**-24)  # in [0, 1)
    level = abs(block[i]) / scale * real(levels)
    low = np.int32(level)
    up = np.int32(below < level - real(low))
    whole = np.int32(low + up)
    return np.int32(whole if block[i] > 0 else -whole)


@kernel()
def form_of(codes: np.ndarray) -> tuple[int, int, int]:
    """Return the number of levels, the code of level 0, and the codes in one byte."""
    if np.iinfo(codes.dtype).min < 0:
        return LEVELS_8, 0, 1
    return LEVELS_4, ZERO, 2


@kernel()
def pack(
    x: np.ndarray,
    x_bits: np.ndarray,
    scales: np.ndarray,
    scale_bits: np.ndarray,
    codes: np.ndarray,
    key: np.uint64,
    bucket: int,
) -> None:
    """Write the scale and the codes of each bucket.

    If a byte has two codes, the lower one is of an element of the bucket's first half.
    """
    levels, zero, in_one = form_of(codes)
    byte, width = codes.dtype.type, bucket // in_one
    for b in range(scales.size):
        block = x[b * bucket : (b + 1) * bucket]
        out = codes[b * width : (b + 1) * width]
        scale_bits[b] = largest_of(x_bits[b * bucket : (b + 1) * bucket])
        scale = scales[b]
        if not 0 < scale < np.inf:
            out[:] = zero + 16 * zero
            continue
        draw, half = draw_of(key, b), out.size
        for i in range(half):
            out[i] = byte(zero + level_of(block, i, scale, levels, draw))
        for i in range(half, block.size):
            upper = byte((zero + level_of(block, i, scale, levels, draw)) << 4)
            out[i - half] = byte(out[i - half] | upper)


@kernel()
def unpack(scales: np.ndarray, codes: np.ndarray, out: np.ndarray, bucket: int) -> None:
    """Write the decoded elements to `out`; the largest magnitude of a bucket is exact."""
    levels, zero, in_one = form_of(codes)
    real, width = out.dtype.type, bucket // in_one
    mask = np.int32(15 if in_one == 2 else -1)
    for b in range(scales.size):
        block = out[b * bucket : (b + 1) * bucket]
        code = codes[b * width : (b + 1) * width]
        scale, half = scales[b], code.size
        for i in range(half):
            level = np.int32(np.int32(np.int32(code[i]) & mask) - np.int32(zero))
            block[i] = real(level) / real(levels) * scale
        for i in range(half, block.size):
            level = np.int32(np.int32(code[i - half] >> 4) - np.int32(zero))
            block[i] = real(level) / real(levels) * scale


@dataclass(frozen=True)
class Int8(Codec):
    """``Q(x) = m sgn(x) xi / s``, with s = 127 levels and m the largest magnitude of a bucket.

    xi is ``|x| s / m``, rounded up or down at random so that its expected value is ``|x| s / m``:
    Q is unbiased. For each element ``|Q(x) - x| < m / s`` and ``E |Q(x) - x|^2 <= (m / s)^2 / 4``.

    A bucket has 512 elements. In a message of table rows, it is one row, or as many short rows as
    make 16 elements or more. A bucket with a NaN or an infinity is decoded as NaN.

    Attributes:
        bucket: Elements of a bucket; a multiple of `in_one`.

    References: Alistarh et al., NeurIPS 2017, sections 3.1 (Q) and 4 (buckets, m for the norm).
    """

    name: ClassVar[str] = "int8"
    stored: ClassVar[str] = "i1"  # dtype of the array of codes in a message; see `form_of`
    in_one: ClassVar[int] = 1  # codes in one element of that array
    bucket: int = BUCKET_8

    def for_rows(self, dim: int) -> "Int8":
        """See `Codec.for_rows`: a bucket of whole rows, as rows differ in magnitude."""
        rows = -(-ROWS_LEAST // dim)
        return replace(self, bucket=dim * (rows + dim * rows % self.in_one))

    def wire_bytes(self, n: int, dtype: np.typing.DTypeLike) -> int:
        """See `Codec.wire_bytes`: one scale for each bucket, then the levels."""
        return -(-n // self.bucket) * np.dtype(dtype).itemsize + -(-n // self.in_one)

    def _parts(self, message: np.ndarray, vector: np.ndarray) -> list[np.ndarray]:
        self._check(message, vector)
        buckets, stored = -(-vector.size // self.bucket), -(-vector.size // self.in_one)
        return wire_parts(message, (buckets, vector.dtype), (stored, self.stored))

    def encode(self, grad: np.ndarray, out: np.ndarray, state: State, message_id: MessageId) -> int:
        """See `Codec.encode`."""
        scales, codes = self._parts(out, grad)
        key = message_id.key
        pack(grad, bits_of(grad), scales, bits_of(scales), codes, key, self.bucket)
        return out.size

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """See `Codec.decode`."""
        scales, codes = self._parts(data, out)
        unpack(scales, codes, out, self.bucket)


@dataclass(frozen=True)
class Int4(Int8):
    """`Int8` with s = 7 levels and buckets of 128 elements.

    It is unbiased, with ``|Q(x) - x| < m / 7``. It is meant for the changes of parameters that
    `mpips.rounds.averaging` averages over workers. Errors grow with the largest magnitude of a
    bucket, so buckets are smaller than with 8 bits. The lower four bits of a bucket's bytes hold
    its first half.

    References: Alistarh et al., NeurIPS 2017; Douillard et al., arXiv 2501.18512, section 3.3 (4
    bits for outer gradients, there in floating point).
    """

    name: ClassVar[str] = "int4"
    stored: ClassVar[str] = "u1"
    in_one: ClassVar[int] = 2
    bucket: int = BUCKET_4
