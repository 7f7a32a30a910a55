"""One-bit codec: the sign of each element, with error feedback."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpips.codecs import Codec, MessageId, State, wire_parts
from mpips.kernels.compiled import kernel

BUCKET = 1024


@dataclass(frozen=True)
class OneBit(Codec):
    """The sign of each element of ``v = g + r``, and two means for each bucket of 1,024 elements.

    g is the gradient and r the residual. An element v >= 0 is decoded as the mean of all v >= 0 of
    its bucket, and an element v < 0 as the mean of all v < 0. The error ``r = v - decode(v)`` is
    added to the next gradient. No other two values have a smaller squared error: ``|r|^2 = |v|^2 -
    |decode(v)|^2``. A NaN or an infinity makes one mean of its bucket NaN or infinite. The residual
    of these elements then stays so in all later messages.

    References: Seide et al., Interspeech 2014, section 3 (a bucket there is a column of a matrix).
    """

    name: ClassVar[str] = "onebit"

    @property
    def state(self) -> tuple[str, ...]:
        """See `Codec.state`."""
        return ("residual",)

    def wire_bytes(self, n: int, dtype: np.typing.DTypeLike) -> int:
        """See `Codec.wire_bytes`: two means for each bucket, then one bit for each element."""
        return -(-n // BUCKET) * 2 * np.dtype(dtype).itemsize + -(-n // 8)

    def _parts(self, message: np.ndarray, vector: np.ndarray) -> list[np.ndarray]:
        means, signs = 2 * -(-vector.size // BUCKET), -(-vector.size // 8)
        return wire_parts(message, (means, vector.dtype), (signs, "u1"))

    def encode(self, grad: np.ndarray, out: np.ndarray, state: State, message_id: MessageId) -> int:
        """See `Codec.encode`."""
        self._check(out, grad, *state)
        means, signs = self._parts(out, grad)
        pack(grad, state[0], means, signs, message_id.count)
        return out.size

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """See `Codec.decode`."""
        self._check(data, out)
        means, signs = self._parts(data, out)
        unpack(means, signs, out)


@kernel()
def _mean(shares: float, count: int, largest: float) -> float:
    """Return the mean of `count` elements x from the sum of ``x / BUCKET``, within +-`largest`.

    A sum that is not finite gives a mean that is not finite.
    """
    if count == 0:
        return 0.0
    mean = shares * (BUCKET / count)
    return min(max(mean, -largest), largest) if -np.inf < shares < np.inf else mean


@kernel()
def pack(
    grad: np.ndarray, residual: np.ndarray, means: np.ndarray, signs: np.ndarray, count: int
) -> None:
    """Write the means, divided by `count`, and the signs; update the residual.

    A bucket is small enough to stay in the L1 cache.
    """
    real, part, largest = grad.dtype.type, 1.0 / BUCKET, np.finfo(grad.dtype).max
    over = real(count)
    for b in range(means.size // 2):
        block = grad[b * BUCKET : (b + 1) * BUCKET]
        rest = residual[b * BUCKET : (b + 1) * BUCKET]
        above, below, positive = 0.0, 0.0, 0
        for i in range(block.size):
            v = block[i] + rest[i]
            rest[i] = v
            share = np.float64(v) * part  # scaled first: no sum of finite elements is infinite
            above += share if v >= 0 else 0.0
            below += 0.0 if v >= 0 else share
            positive += v >= 0
        above = real(_mean(above, positive, largest))
        below = real(_mean(below, block.size - positive, largest))
        means[2 * b], means[2 * b + 1] = above / over, below / over
        bits = signs[b * (BUCKET // 8) : (b + 1) * (BUCKET // 8)]
        for j in range(bits.size):
            byte = np.int64(0)
            for i in range(8 * j, min(8 * j + 8, rest.size)):
                plus = rest[i] >= 0
                byte |= np.int64(plus) << (i - 8 * j)
                rest[i] -= above if plus else below
            bits[j] = byte


@kernel()
def unpack(means: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    """Write the mean of each element's sign to `out`."""
    for b in range(means.size // 2):
        block = out[b * BUCKET : (b + 1) * BUCKET]
        bits = signs[b * (BUCKET // 8) : (b + 1) * (BUCKET // 8)]
        above, below = means[2 * b], means[2 * b + 1]
        for i in range(block.size):
            block[i] = above if (bits[i >> 3] >> (i & 7)) & 1 else below
