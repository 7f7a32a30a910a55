"""Half precision (IEEE binary16) and bfloat16: two bytes an element."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpips.codecs import Codec, Loop, MessageId, State
from mpips.kernels.compiled import kernel

# Magnitudes as bits of IEEE binary32: the smallest that rounds to more than 65504 in binary16; 2 **
# -14, the smallest normal number of binary16; infinity.
_TOO_LARGE, _NORMAL, _INFINITE = 0x477FF000, 0x38800000, 0x7F800000
_HALF_ULP = np.float32(0.5)  # adding it rounds to the last place of a subnormal binary16 number


class TwoBytes(Codec):
    """Base class of codecs that write each element in two bytes, without a state.

    Attributes:
        loops: Two loops: one packs a vector into words of the same shape, dtype uint16; the other
            unpacks such words.
    """

    loops: ClassVar[tuple[Loop, Loop]]

    def for_rows(self, dim: int) -> Codec:
        """See `Codec.for_rows`: the codec itself, which packs each number separately."""
        return self

    def wire_bytes(self, n: int, dtype: np.typing.DTypeLike) -> int:
        """See `Codec.wire_bytes`."""
        return 2 * n

    def encode(self, grad: np.ndarray, out: np.ndarray, state: State, message_id: MessageId) -> int:
        """See `Codec.encode`."""
        self._check(out, grad)
        self.loops[0](grad, out.view("u2"))
        return out.size

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """See `Codec.decode`."""
        self._check(data, out)
        self.loops[1](data.view("u2"), out)


@kernel()
def pack_fp16(x: np.ndarray, out: np.ndarray) -> None:
    """Write `x` as binary16; every branch is a select, so LLVM vectorises the loop."""
    for i in range(x.size):
        value = np.float32(x[i])
        bits = value.view(np.uint32)
        size = np.uint32(bits & np.uint32(0x7FFFFFFF))
        odd = np.uint32(np.uint32(size >> np.uint32(13)) & np.uint32(1))
        rebased = np.uint32(size - np.uint32(0x38000000 - 0xFFF))
        half = np.uint32(np.uint32(rebased + odd) >> np.uint32(13))
        shifted = np.float32(size.view(np.float32) + _HALF_ULP)
        small = np.uint32(shifted.view(np.uint32) - np.uint32(0x3F000000))
        half = small if size < np.uint32(_NORMAL) else half
        half = np.uint32(0x7BFF) if size >= np.uint32(_TOO_LARGE) else half
        magnitude = abs(x[i])
        infinite = np.uint32(0x7C00) if magnitude > 0 else np.uint32(0x7E00)  # or NaN
        half = half if magnitude < np.inf else infinite
        sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
        out[i] = np.uint16(np.uint32(half | sign))


@kernel()
def unpack_fp16(halves: np.ndarray, out: np.ndarray) -> None:
    """Convert binary16 to the dtype of `out`, exactly."""
    magic = np.uint32(_NORMAL).view(np.float32)
    for i in range(out.size):
        half = np.uint32(halves[i])
        size = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13))
        normal = np.uint32(size + np.uint32(0x38000000))
        infinite = np.uint32(size | np.uint32(_INFINITE))
        lifted = np.float32(np.uint32(size + np.uint32(_NORMAL)).view(np.float32) - magic)
        size = normal if size < np.uint32(0x7C00 << 13) else infinite
        size = lifted.view(np.uint32) if (half & np.uint32(0x7C00)) == 0 else size
        sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
        out[i] = np.uint32(size | sign).view(np.float32)


@dataclass(frozen=True)
class Fp16(TwoBytes):
    """IEEE binary16, rounded to nearest, ties to even.

    ``|decode(x) - x| <= 2**-11 |x| + 2**-25`` for ``|x| <= 65504``. Larger finite elements become
    65504 with their sign. float64 is rounded to float32 first.

    References: IEEE 754-2019, 3.6; Micikevicius et al., ICLR 2018 (gradients in half precision).
    """

    name: ClassVar[str] = "fp16"
    loops = pack_fp16, unpack_fp16


@kernel()
def pack_bf16(x: np.ndarray, out: np.ndarray) -> None:
    """Write `x` as bfloat16; every branch is a select, so LLVM vectorises the loop."""
    for i in range(x.size):
        bits = np.float32(x[i]).view(np.uint32)
        size = np.uint32(bits & np.uint32(0x7FFFFFFF))
        odd = np.uint32(np.uint32(size >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(np.uint32(size + np.uint32(0x7FFF)) + odd)
        word = np.uint32(rounded >> np.uint32(16))
        word = np.uint32(0x7F7F) if word > np.uint32(0x7F7F) else word
        magnitude = abs(x[i])
        infinite = np.uint32(0x7F80) if magnitude > 0 else np.uint32(0x7FC0)  # or NaN
        word = word if magnitude < np.inf else infinite
        sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
        out[i] = np.uint16(np.uint32(word | sign))


@kernel()
def unpack_bf16(words: np.ndarray, out: np.ndarray) -> None:
    """Convert bfloat16 to the dtype of `out`, exactly."""
    for i in range(out.size):
        out[i] = np.uint32(np.uint32(words[i]) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Bf16(TwoBytes):
    """bfloat16, the upper half of a float32, rounded to nearest, ties to even.

    ``|decode(x) - x| <= 2**-8 |x|`` for float32 normals. A finite element that would round to
    infinity becomes the largest number of the format, about 3.39e38. float64 is rounded to float32
    first.

    References: Kalamkar et al., arXiv 1905.12322.
    """

    name: ClassVar[str] = "bf16"
    loops = pack_bf16, unpack_bf16
