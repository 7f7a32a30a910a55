"""Owner and initial values of a table's row, from its number.

A keyed **permutation** maps row numbers to *places*, and each server owns a contiguous range of
places. So the place of a row is computed, not looked up, and frequent rows are spread over all
servers. The permutation divides a number into two halves, the upper one below 64, and adds to each
half a product of the other half; each step can be inverted. A result that is no row, in at most one
of thirty cases, is permuted again (cycle walking). With a key whose lower half has no bits, every
number stays the same; then servers own blocks of rows.

The initial values of a row come from SplitMix64, with one stream for each row. Normal numbers are
computed by Box and Muller's formula with polynomials in place of a library's logarithm, so all
machines with IEEE arithmetic compute the same bits.

References: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (the
generalised Feistel cipher, and the walk along cycles); G. Steele, D. Lea, C. Flood, "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014; G. Box, M. Muller, Ann. Math. Statist. 29
(1958); the polynomials are those of Cephes.
"""

import math

import numpy as np

from mpips.kernels.compiled import Vector, kernel

# Words of a key, dtype uint64, shape (KEY_WORDS,).
ROWS, FIRST, LOW, HIGH = range(4)  # LOW: bits of a right half, HIGH: number of left halves
KIND, STREAM, SCALE = 4, 5, 6  # initial values; SCALE contains the bits of a float32
ODD, ADDED, UNDO = slice(7, 9), slice(9, 11), slice(11, 13)  # factors of the permutation
OFFSET = 13
KEY_WORDS = 14
ZEROS, NORMAL, UNIFORM = range(3)  # values of KIND

_ODD, _ADDED, _UNDO, _OFFSET = ODD.start, ADDED.start, UNDO.start, OFFSET
_U = np.uint64
_GOLDEN = _U(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)
_S30, _S27, _S31, _S40, _S16, _ONE = _U(30), _U(27), _U(31), _U(40), _U(16), _U(1)
_LOW = _U(0xFFFFFF)
_F = np.float32
_UNIT = _F(2.0**-24)
_HALF, _1F, _2F, _3F, _4F = _F(0.5), _F(1), _F(2), _F(3), _F(4)
_QUARTER_PI, _HALF_PI = _F(math.pi / 4), _F(math.pi / 2)
_SQRT_HALF_BITS, _MANTISSA = np.int32(0x3F3504F3), np.int32(23)
_LN2 = _F(math.log(2))
_L0, _L1, _L2 = _F(7.0376836292e-2), _F(-1.1514610310e-1), _F(1.1676998740e-1)
_L3, _L4, _L5 = _F(-1.2420140846e-1), _F(1.4249322787e-1), _F(-1.6668057665e-1)
_L6, _L7, _L8 = _F(2.0000714765e-1), _F(-2.4999993993e-1), _F(3.3333331174e-1)
_S0, _S1, _S2 = _F(-1.9515295891e-4), _F(8.3321608736e-3), _F(-1.6666654611e-1)
_C0, _C1, _C2 = _F(2.443315711809948e-5), _F(-1.388731625493765e-3), _F(4.166664568298827e-2)


@kernel(quick=True)
def mixed(word: np.uint64) -> np.uint64:
    """Return a hash of a word: the finaliser of SplitMix64."""
    word = (word ^ (word >> _S30)) * _MIX_1
    word = (word ^ (word >> _S27)) * _MIX_2
    return word ^ (word >> _S31)


@kernel(quick=True)
def permuted(x: np.uint64, key: Vector) -> np.uint64:
    """Return the permuted number, before cycle walking."""
    low, high = key[LOW], key[HIGH]
    mask, shift = (_ONE << low) - _ONE, (low + _ONE) >> _ONE
    left, right = x >> low, x & mask
    right = ((right ^ (right >> shift)) * key[_ODD] + left * key[_ADDED] + key[_OFFSET]) & mask
    left += (right * high) >> low
    left = min(left, left - high)  # modulo high: as unsigned numbers, negative ones are the largest
    right = ((right ^ (right >> shift)) * key[_ODD + 1] + left * key[_ADDED + 1]) & mask
    return (left << low) | (right ^ (right >> shift))


@kernel(quick=True)
def place_of(row: np.uint64, key: Vector) -> np.uint64:
    """Return the place of a row, in ``[0, rows)``."""
    x = permuted(row, key)
    while x >= key[ROWS]:
        x = permuted(x, key)
    return x


@kernel(quick=True)
def row_at(place: np.uint64, key: Vector) -> np.uint64:
    """Return the row at a place: the inverse of `place_of`."""
    low, high = key[LOW], key[HIGH]
    mask, shift = (_ONE << low) - _ONE, (low + _ONE) >> _ONE
    x = place
    while True:
        left, right = x >> low, x & mask
        right ^= right >> shift
        right = ((right - left * key[_ADDED + 1]) * key[_UNDO + 1]) & mask
        right ^= right >> shift
        left -= (right * high) >> low
        left = min(left, left + high)
        right = ((right - left * key[_ADDED] - key[_OFFSET]) * key[_UNDO]) & mask
        x = (left << low) | (right ^ (right >> shift))
        if x < key[ROWS]:
            return x


@kernel()
def places_of(rows: Vector, key: Vector, out: Vector) -> int:
    """Set `out` to the places of rows, dtype int64.

    Returns:
        -1, or the index of the first number that is no row. Only the numbers before it then have
        places.
    """
    for i in range(rows.size):  # without a branch, so LLVM can vectorise it
        out[i] = np.int64(permuted(np.uint64(rows[i]), key))
    for i in range(rows.size):
        if np.uint64(rows[i]) >= key[ROWS]:  # also negative numbers, as they are unsigned here
            return i
        if np.uint64(out[i]) >= key[ROWS]:
            out[i] = np.int64(place_of(np.uint64(out[i]), key))
    return -1


@kernel()
def rows_at(places: Vector, key: Vector, out: Vector) -> None:
    """Set `out` to the rows at places, dtype int64."""
    for i in range(places.size):
        out[i] = np.int64(row_at(np.uint64(places[i]), key))


@kernel(quick=True)
def make_row(place: int | np.int64, key: Vector, out: Vector) -> None:
    """Write the initial values of the row at a place to `out`, of any float dtype."""
    if key[KIND] == np.uint64(ZEROS):
        for j in range(out.size):
            out[j] = 0
        return
    scale = np.uint32(key[SCALE]).view(np.float32)
    stream = mixed(key[STREAM] + _GOLDEN * row_at(np.uint64(place), key))
    if key[KIND] == np.uint64(UNIFORM):
        for j in range(out.size):
            bits = mixed(stream + _GOLDEN * np.uint64(j + 1)) >> _S40
            out[j] = (_F(np.int32(bits)) * _UNIT * _2F - _1F) * scale
        return
    half = out.size // 2
    first, second = out[:half], out[half:]
    for j in range(half):
        bits = mixed(stream + _GOLDEN * np.uint64(j + 1))
        length = radius(bits) * scale
        first[j] = length * cosine(turn(bits))
        second[j] = length * cosine(turn(bits) + _3F)
    if out.size % 2:
        bits = mixed(stream + _GOLDEN * np.uint64(half + 1))
        out[out.size - 1] = radius(bits) * scale * cosine(turn(bits))


@kernel(quick=True)
def turn(bits: np.uint64) -> np.float32:
    """Return Box and Muller's angle, in quarters of a turn, from bits 16 to 39."""
    return _F(np.int32((bits >> _S16) & _LOW)) * _UNIT * _4F


@kernel(quick=True)
def radius(bits: np.uint64) -> np.float32:
    """Return Box and Muller's radius, from the 24 highest bits."""
    uniform = _F(np.int32((bits >> _S40) + _ONE)) * _UNIT
    return _F(math.sqrt(-_2F * logarithm(uniform)))


@kernel(quick=True)
def cosine(quarters: np.float32) -> np.float32:
    """Return the cosine of an angle less an eighth of a turn.

    Args:
        quarters: The angle in quarters of a turn, at least 0.
    """
    quarter = np.int32(quarters)
    x = (quarters - _F(quarter)) * _HALF_PI - _QUARTER_PI
    z = x * x
    even = ((_C0 * z + _C1) * z + _C2) * z * z - _HALF * z + _1F
    odd = ((_S0 * z + _S1) * z + _S2) * z * x + x
    size = odd if quarter & 1 else even
    return -size if (quarter + 1) & 2 else size


@kernel(quick=True)
def logarithm(x: np.float32) -> np.float32:
    """Return the natural logarithm of a positive number."""
    # The mantissa goes from sqrt(1/2) to sqrt(2).
    bits = np.float32(x).view(np.int32)
    exponent = np.int32((bits - _SQRT_HALF_BITS) >> _MANTISSA)
    m = np.int32(bits - (exponent << _MANTISSA)).view(np.float32) - _1F
    z = m * m
    y = (((((((_L0 * m + _L1) * m + _L2) * m + _L3) * m + _L4) * m + _L5) * m + _L6) * m + _L7) * m
    return _F(exponent) * _LN2 + ((y + _L8) * m * z - _HALF * z + m)
