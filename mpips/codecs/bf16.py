"""bfloat16: 8 significant bits, the range of float32."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpips.codecs.base import TwoBytes
from mpips.kernels.compiled import kernel


@kernel()
def pack(x: np.ndarray, out: np.ndarray) -> None:
    """Write `x` as bfloat16; all branches are selects, so that the loop is vectorised."""
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
def unpack(words: np.ndarray, out: np.ndarray) -> None:
    """Read bfloat16; exact."""
    for i in range(out.size):
        out[i] = np.uint32(np.uint32(words[i]) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Bf16(TwoBytes):
    """The upper half of a float32, rounded to nearest, ties to even.

    ``|decode(x) - x| <= 2**-8 |x|`` for float32 normals; what would round to infinity becomes the
    largest, about 3.39e38. float64 is rounded to float32 first.

    References: Kalamkar et al., arXiv 1905.12322.
    """

    name: ClassVar[str] = "bf16"
    loops = pack, unpack
