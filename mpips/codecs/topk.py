"""Top-k codec: only the largest elements, with error feedback."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpips.codecs import Codec, MessageId, State, bits_of, wire_parts
from mpips.errors import UserError
from mpips.kernels.compiled import kernel

MAX_SIZE = 1 << 32  # positions have 32 bits
FIRST_RATIO = 0.25  # k / n of the first push of a warm-up
_DIGIT = 11  # bits of a digit of a magnitude; one pass counts one digit
_BLOCK = 2048


@dataclass(frozen=True)
class TopK(Codec):
    """The k elements of largest magnitude of ``v = r + g``; all others stay in the residual r.

    The k elements are sent unchanged. With a momentum m, ``u = m u + g`` and ``v = r + u``; both u
    and r are set to 0 for elements that are sent (momentum correction and factor masking). The
    server then gets the updates of momentum SGD in the end, so its rule must have no momentum.

    k is ``ratio`` times the length n, rounded up. In the first `warmup` pushes it decreases
    geometrically from a quarter of n. The error satisfies ``|r|^2 <= (1 - k / n) |v|^2``. Of equal
    magnitudes the first ones are sent. NaN and infinity count as the largest.

    Attributes:
        ratio: Share of the elements that are sent.
        momentum: Momentum m; 0 for none.
        warmup: Number of pushes of the warm-up; 0 for none.

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
        velocity = state[1] if self.momentum else state[0][:0]
        add_and_count(grad, state[0], velocity, self.momentum, bits, mask, shift, counts)
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
def count_first(bits: np.ndarray, mask: int, shift: int, counts: np.ndarray) -> None:
    """Add to `counts` how many magnitudes have each highest digit."""
    for i in range(bits.size):
        counts[(np.int64(bits[i]) & mask) >> shift] += 1


@kernel()
def add_and_count(
    grad: np.ndarray,
    residual: np.ndarray,
    velocity: np.ndarray,
    momentum: float,
    bits: np.ndarray,
    mask: int,
    shift: int,
    counts: np.ndarray,
) -> None:
    """Add the gradient to the residual, and count the magnitudes with each highest digit.

    With a velocity, set ``velocity = momentum * velocity + grad``, and add that instead.

    Args:
        grad: Gradient, shape (n,).
        residual: Vector v, shape (n,).
        velocity: Shape (n,), or (0,) for none.
        momentum: Factor of the velocity.
        bits: View of `residual` as integers.
        mask: All bits but the sign.
        shift: Number of bits below the highest digit.
        counts: Number of magnitudes with each highest digit; added to.
    """
    factor = grad.dtype.type(momentum)
    for offset in range(0, grad.size, _BLOCK):
        block, rest = grad[offset : offset + _BLOCK], residual[offset : offset + _BLOCK]
        if velocity.size:
            moving = velocity[offset : offset + _BLOCK]
            for i in range(block.size):
                moving[i] = factor * moving[i] + block[i]
                rest[i] += moving[i]
        else:
            for i in range(block.size):
                rest[i] += block[i]
        count_first(bits[offset : offset + _BLOCK], mask, shift, counts)


@kernel()
def threshold(bits: np.ndarray, mask: int, shift: int, counts: np.ndarray, k: int) -> None:
    """Find the k largest magnitudes by radix selection, from the highest digit on, in O(n).

    Afterwards, ``counts[0]`` is a threshold, and ``counts[1]`` a number of ties. The k largest are
    all magnitudes above the threshold, and that many of the magnitudes equal to it.

    Args:
        bits: The values as integers; their magnitudes as integers have the same order.
        mask: All bits but the sign.
        shift: Number of bits below the highest digit.
        counts: Number of magnitudes with each highest digit; overwritten.
        k: Number of magnitudes to find, at most the number of values.
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
    """Write the elements that `threshold` found to the message, and set them to 0 in the state.

    It has 9 parameters, since a loop takes only numbers and vectors.

    Args:
        residual: Vector v, shape (n,); the elements that are sent become 0.
        other: Velocity, or the residual again, shape (n,); the same elements become 0.
        bits: View of `residual` as integers.
        mask: All bits but the sign.
        above: Threshold, ``counts[0]`` of `threshold`.
        ties: Number of elements equal to the threshold to send, ``counts[1]``.
        values: Gets the elements, divided by `count`, shape (k,).
        places: Gets their indices, shape (k,), dtype uint32.
        count: See `mpips.codecs.MessageId`.
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
    """Set `out` to zero, and then ``out[places[k]] = values[k]``.

    Returns:
        False if an index is outside `out`.
    """
    out[:] = 0
    for k in range(values.size):
        if places[k] >= out.size:
            return False
        out[places[k]] = values[k]
    return True
