"""Compiled parser of SVMlight/libsvm lines: ``label index:value index:value ...``.

It rounds numbers of up to 17 digits with powers of ten up to 22 as Python does. Other numbers are
within two units in the last place of float64.
"""

import numpy as np

from mpips.kernels.compiled import Vector, kernel

NEWLINE, HASH, COLON, DOT, PLUS, MINUS = b"\n#:.+-"
ZERO, NINE, SMALL_E, LARGE_E = b"09eE"
SPACE, TAB, RETURN = b" \t\r"  # spaces are these three, and the bytes between TAB and RETURN
QUERY = b"qid:"
MOST_DIGITS, MOST_POWER = 18, 22  # digits of a mantissa; power of ten that float64 holds exactly
SPLITTER = 2.0**27 + 1
MOST_INDEX = 2**31 - 1
MOST_VALUE = float(np.finfo(np.float32).max)
WHOLE, LOW, HIGH, BAD, WHY = range(5)  # indices of the facts
LABEL, FEATURE, ORDER = range(3)  # reasons to refuse a word


@kernel(quick=True)
def is_digit(text: Vector, at: int, end: int) -> bool:
    """Return whether the byte at an offset is a digit."""
    return at < end and ZERO <= text[at] <= NINE


@kernel(quick=True)
def is_space(text: Vector, at: int, end: int) -> bool:
    """Return whether the byte at an offset separates words of a line."""
    return at < end and (text[at] == SPACE or (TAB <= text[at] <= RETURN and text[at] != NEWLINE))


@kernel(quick=True)
def line_ends(text: Vector, at: int, end: int) -> bool:
    """Return whether a line has no more words at an offset."""
    return at >= end or text[at] == NEWLINE or text[at] == HASH


@kernel(quick=True)
def is_query(text: Vector, at: int, end: int) -> bool:
    """Return whether the text at an offset is ``qid:``."""
    named = at + 3 < end
    for k in range(4):
        named = named and text[at + k] == QUERY[k]
    return named


@kernel(quick=True)
def power_of_ten(value: float, power: int) -> float:
    """Return ``value * 10 ** power``, infinity if it is too large."""
    while power > 0 and 0 < value < np.inf:
        step = min(power, MOST_POWER)
        value, power = value * 10.0**step, power - step
    while power < 0 and value > 0:
        step = min(-power, MOST_POWER)
        value, power = value / 10.0**step, power + step
    return value


@kernel()
def product_error(a: float, b: float) -> float:
    """Return ``a * b`` minus its rounded value (Dekker, Numerische Mathematik 18, 1971)."""
    a_high = SPLITTER * a - (SPLITTER * a - a)
    b_high = SPLITTER * b - (SPLITTER * b - b)
    a_low, b_low = a - a_high, b - b_high
    return ((a_high * b_high - a * b) + a_high * b_low + a_low * b_high) + a_low * b_low


@kernel()
def scaled(mantissa: int, power: int) -> float:
    """Return ``mantissa * 10 ** power``, computed in twice the precision for small powers."""
    high = float(mantissa)
    low = float(mantissa - int(high))
    factor = 10.0 ** abs(power)
    if 0 < power <= MOST_POWER:
        return high * factor + (product_error(high, factor) + low * factor)
    if -MOST_POWER <= power < 0:
        quotient = high / factor
        rest = (high - quotient * factor) - product_error(quotient, factor) + low
        return quotient + rest / factor
    return power_of_ten(high, power)


@kernel()
def read_digits(text: Vector, at: int, end: int) -> tuple[int, int, int, bool]:
    """Read digits, with a decimal point or without.

    Returns:
        Offset of their end, or -1 without a digit; mantissa; its power of ten; whether there is no
        point.
    """
    mantissa, power, begin, point = 0, 0, at, -1
    while is_digit(text, at, end) or (at < end and point < 0 and text[at] == DOT):
        if text[at] == DOT:
            point = at
        elif mantissa < 10 ** (MOST_DIGITS - 1):
            mantissa = 10 * mantissa + int(np.int64(text[at])) - ZERO
            power -= point >= 0
        else:
            power += point < 0
        at += 1
    return at if at - begin > (point >= 0) else -1, mantissa, power, point < 0


@kernel()
def read_number(text: Vector, at: int, end: int) -> tuple[int, float, bool]:
    """Read a number. Returns the offset of its end (-1: none), its value, whether it is integer."""
    minus = at < end and text[at] == MINUS
    if at < end and (minus or text[at] == PLUS):
        at += 1
    at, mantissa, power, whole = read_digits(text, at, end)
    if 0 <= at < end and (text[at] == SMALL_E or text[at] == LARGE_E):
        whole, at, exponent = False, at + 1, 0
        down = at < end and text[at] == MINUS
        if at < end and (down or text[at] == PLUS):
            at += 1
        if not is_digit(text, at, end):
            return -1, 0.0, False
        while is_digit(text, at, end):
            exponent = min(10 * exponent + int(np.int64(text[at])) - ZERO, 9999)
            at += 1
        power += -exponent if down else exponent
    value = scaled(mantissa, power)
    if value > MOST_VALUE or not (line_ends(text, at, end) or is_space(text, at, end)):
        at = -1
    return at, -value if minus else value, whole


@kernel()
def read_features(
    text: Vector, at: int, end: int, indices: Vector, values: Vector, facts: Vector
) -> tuple[int, int]:
    """Read the features of a line, after its label.

    Args:
        text: See `read_lines`.
        at: Offset of the first byte.
        end: Offset of the end of the text.
        indices: Gets the indices.
        values: Gets the values.
        facts: See `read_lines`.

    Returns:
        Offset of the end of the line's words, -1 if one is refused; number of features.
    """
    last, count = -1, 0
    while True:
        while is_space(text, at, end):
            at += 1
        if line_ends(text, at, end):
            return at, count
        if is_query(text, at, end):
            while not (line_ends(text, at, end) or is_space(text, at, end)):
                at += 1
            continue
        index, begin = 0, at
        while is_digit(text, at, end) and index <= MOST_INDEX:
            index = 10 * index + int(np.int64(text[at])) - ZERO
            at += 1
        value, why = 0.0, FEATURE
        if at == begin or index > MOST_INDEX or at >= end or text[at] != COLON:
            at = -1
        elif index <= last:
            at, why = -1, ORDER
        else:
            at, value, _ = read_number(text, at + 1, end)
        if at < 0:
            facts[BAD], facts[WHY] = begin, why
            return -1, count
        indices[count], values[count], last = index, value, index
        facts[LOW], facts[HIGH] = min(facts[LOW], last), max(facts[HIGH], last)
        count += 1


@kernel()
def read_lines(
    text: Vector, labels: Vector, starts: Vector, indices: Vector, values: Vector, facts: Vector
) -> int:
    """Read the samples of whole lines.

    Args:
        text: The lines, shape (size,), dtype uint8.
        labels: Gets the labels; as many elements as lines, dtype float64.
        starts: Gets the offset of each sample's features, and their end; one more element than
            lines, dtype int64.
        indices: Gets the indices; as many elements as colons, dtype int32. Empty to read only
            labels.
        values: Gets the values; as many elements as colons, dtype float64.
        facts: Shape (5,), dtype int64. `WHOLE` becomes 0 if a label is not written as an integer.
            `LOW` and `HIGH` become the lowest and the highest index. If a word is refused, `BAD`
            becomes the offset of its first byte, and `WHY` the reason.

    Returns:
        Number of samples; if a word is refused, of those before its line.
    """
    at, end, count, stored = 0, text.size, 0, 0
    starts[0] = 0
    while at < end:
        while is_space(text, at, end):
            at += 1
        if not line_ends(text, at, end):
            begin = at
            at, labels[count], whole = read_number(text, at, end)
            if at < 0:
                facts[BAD], facts[WHY] = begin, LABEL
            elif indices.size:
                at, more = read_features(text, at, end, indices[stored:], values[stored:], facts)
                stored += more
            if at < 0:
                return count
            if not whole:
                facts[WHOLE] = 0
            count += 1
            starts[count] = stored
        while at < end and text[at] != NEWLINE:
            at += 1
        at += 1
    return count
