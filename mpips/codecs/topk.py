"""Top-k: the largest elements alone, with error feedback."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpips.codecs import Codec, MessageId, State, bits_of, wire_parts
from mpips.errors import UserError
from mpips.kernels.compiled import kernel

MAX_SIZE = 1 << 32  # positions have 32 bits
FIRST_RATIO = 0.25  # where the warm-up begins
_DIGIT = 11  # bits of a magnitude that are looked at in one pass
_BLOCK = 2048


@dataclass(frozen=True)
class TopK(Codec):
    """``v = r + g``; the k elements of largest ``|v|`` are sent as they are, the others stay in r.

    With a momentum m, ``u = m u + g`` and ``v = r + u``, and both u and r are cleared where v is
    sent (momentum correction and factor masking): what reaches the server in the end is what
    momentum SGD would have applied, so the server's rule must have none. k is ``ratio`` times the
    length, rounded up; in the first `warmup` pushes it comes down geometrically from a quarter of
    the length. ``|r|^2 <= (1 - k / n) |v|^2``. Of equal magnitudes the first are taken; NaN and
    infinity are the largest.

    References: Lin et al., ICLR 2018 (DGC), section 3 and algorithm 4; Stich et al., NeurIPS 2018
    (the bound).
    """

    name: ClassVar[str] = "topk"

    ratio: float = 0.01
    momentum: float = 0.0
    warmup: int = 0

    @property
    def state(self) -> tuple[str, ...]:
        """See `Codec.state`."""
        return ("residual", "velocity") if self.momentum else ("residual",)

    def count(self, n: int, number: int) -> int:
        """Return k for push `number` of `n` elements."""
        ratio = self.ratio
        if number <= self.warmup and ratio < FIRST_RATIO:
            ratio = FIRST_RATIO * (ratio / FIRST_RATIO) ** ((number - 1) / self.warmup)
        return math.ceil(ratio * n)

    def wire_bytes(self, n: int, dtype: np.typing.DTypeLike) -> int:
        """See `Codec.wire_bytes`: k, then k values, then k positions."""
        return self._used(self.count(n, 1), dtype)

    def _used(self, k: int, dtype: np.typing.DTypeLike) -> int:
        return 8 + k * (np.dtype(dtype).itemsize + 4)

    def encode(self, grad: np.ndarray, out: np.ndarray, state: State, message_id: MessageId) -> int:
        """See `Codec.encode`."""
        self._check(out, grad, *state)
        if grad.size >= MAX_SIZE:
            remedy = "use more servers"
            raise UserError(f"topk of {grad.size} elements", f"fewer than {MAX_SIZE}", remedy)
        k = self.count(grad.size, message_id.number)
        counts = np.zeros(1 << _DIGIT, "i8")
        bits = bits_of(state[0])
        mask, shift = np.iinfo(bits.dtype).max, 8 * bits.itemsize - 1 - _DIGIT
        if self.momentum:
            accumulate(grad, state[0], state[1], self.momentum)
            count_first(bits, mask, shift, counts)
        else:
            add_and_count(grad, state[0], bits, mask, shift, counts)
        threshold(bits, mask, shift, counts, k)
        above, ties = int(counts[0]), int(counts[1])
        head, values, places = self._parts(out, k, grad.dtype)
        head[0] = k
        take(state[0], state[-1], bits, mask, above, ties, values, places, message_id.count)
        return self._used(k, grad.dtype)

    def _parts(self, message: np.ndarray, k: int, dtype: np.typing.DTypeLike) -> list[np.ndarray]:
        return wire_parts(message, (1, "i8"), (k, dtype), (k, "u4"))

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """See `Codec.decode`."""
        largest = self.count(out.size, 1)
        k = int(data[:8].view("i8")[0]) if data.size >= 8 else -1
        if not 0 <= k <= largest or data.size < self._used(k, out.dtype):
            raise ValueError(f"topk: {k} elements in {data.size} bytes, expected 0 to {largest}")
        _, values, places = self._parts(data, k, out.dtype)
        if not scatter(values, places, out):
            raise ValueError(f"topk: a position outside {out.size} elements")


@kernel()
def accumulate(
    grad: np.ndarray, residual: np.ndarray, velocity: np.ndarray, momentum: float
) -> None:
    """Set ``velocity = momentum * velocity + grad``, and add it to the residual."""
    factor = grad.dtype.type(momentum)
    for i in range(grad.size):
        velocity[i] = factor * velocity[i] + grad[i]
        residual[i] += velocity[i]


@kernel()
def count_first(bits: np.ndarray, mask: int, shift: int, counts: np.ndarray) -> None:
    """Count the magnitudes by their highest digit."""
    for i in range(bits.size):
        counts[(np.int64(bits[i]) & mask) >> shift] += 1


@kernel()
def add_and_count(
    grad: np.ndarray,
    residual: np.ndarray,
    bits: np.ndarray,
    mask: int,
    shift: int,
    counts: np.ndarray,
) -> None:
    """Add the gradient to the residual, and count the sums' magnitudes by their highest digit."""
    for offset in range(0, grad.size, _BLOCK):
        block, rest = grad[offset : offset + _BLOCK], residual[offset : offset + _BLOCK]
        for i in range(block.size):
            rest[i] += block[i]
        count_first(bits[offset : offset + _BLOCK], mask, shift, counts)


@kernel()
def threshold(bits: np.ndarray, mask: int, shift: int, counts: np.ndarray, k: int) -> None:
    """Find the k largest magnitudes, digit by digit from the highest: O(n), whatever they are.

    The magnitudes greater than the first element of `counts` afterwards, and as many equal to it as
    the second one says, are k.

    Args:
        bits: The values as integers; their magnitudes have the same order.
        mask: What leaves the sign out.
        shift: Bits below the highest digit.
        counts: Of the highest digit; overwritten.
        k: At most the number of values.
    """
    prefix, left, width = 0, k, _DIGIT
    while True:
        digit = counts.size - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix = prefix << width | digit
        if counts[digit] == left:
            counts[0], counts[1] = (prefix << shift) - 1, 0
            return
        if shift == 0:
            counts[0], counts[1] = prefix, left
            return
        width = min(_DIGIT, shift)
        shift -= width
        counts[:] = 0
        for i in range(bits.size):
            size = np.int64(bits[i]) & mask
            if size >> (shift + width) == prefix:
                counts[size >> shift & ((1 << width) - 1)] += 1


@kernel()
def take(
    residual: np.ndarray,
    other: np.ndarray,
    bits: np.ndarray,
    mask: int,
    above: int,
    ties: int,
    values: np.ndarray,
    places: np.ndarray,
    count: int,
) -> None:
    """Move what `threshold` found, over `count`, to the message; clear it in both vectors.

    A loop takes plain numbers and vectors, each by itself.
    """
    at, over = 0, residual.dtype.type(count)
    for i in range(residual.size):
        size = np.int64(bits[i]) & mask
        if size < above or (size == above and ties == 0):
            continue
        ties -= size == above
        values[at], places[at] = residual[i] / over, i
        residual[i] = other[i] = 0
        at += 1


@kernel()
def scatter(values: np.ndarray, places: np.ndarray, out: np.ndarray) -> bool:
    """Set `out` to the values at their places and zero elsewhere; False if one is outside."""
    out[:] = 0
    for k in range(values.size):
        if places[k] >= out.size:
            return False
        out[places[k]] = values[k]
    return True
