"""Memory of a table's rows: lines, stripe words and an index.

A table's memory is a matrix of a line a row, its parameters and then its optimizer's slots, and a
vector of **stripe words**, one for 32 lines: whether each has been touched in the low half, a
version in the high one, odd while a line is written. Whoever reads a line looks at the word before
and after it, so that a torn row is seen and read again. A line that nobody has touched is not read
at all: `mpips.kernels.row_keys.make_row` says what it holds. Where lines are given to rows as they
are touched, an index by open addressing, `take_lines`, says which has which. Rows are read in
`mpips.kernels.row_reads`.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Matrix, Vector, kernel

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.intrinsics import (
        array_at,
        load_acquire,
        prefetch,
        prefetch_write,
        store_ordered,
    )

STRIPE = 32  # lines
STRIPE_BITS, BIT_MASK = 5, STRIPE - 1
WRITING = 1 << 32  # the lowest bit of the version
AHEAD = 32  # rows
LINES, STRIPES, HEADER, INDEX, KEYS = range(5)  # HEADER is 0 where a row's line is its place
# Words of the header: the size of the index, lines, how often these were taken from rows, twice a
# sweep, so that it is odd in one (`mpips.kernels.row_eviction`), and the bits of a line's number.
BITS, COUNT, MOVES, LINE_BITS, HEADER_WORDS = range(5)
FULL, FULL_OF = 3, 4  # of an index
MOST_PLACES = (1 << 32) - 2  # of an index: what stands in it, and in the keys, is of 32 bits
FREE = (1 << 32) - 1  # key of a line that was taken from its row

_U = np.uint64
_SPREADING = _U(0x9E3779B97F4A7C15)


@kernel(quick=True)
def owner_of(place: int, begins: Vector) -> int:
    """Return the server of a place."""
    owner = 0
    for k in range(1, begins.size - 1):
        owner += place >= begins[k]
    return owner


@kernel(quick=True)
def copy_line(line: Vector, out: Vector) -> None:
    """Copy a row."""
    for j in range(out.size):
        out[j] = line[j]


# Lines of rows that come as they are touched -----------------------------------------------------


@kernel(quick=True)
def find_line(local: int, where: Vector, words: Vector, numbers: Vector) -> np.int64:
    """Return the line of a row, or -1 where it has none; see `mpips.kernels.row_reads.gather`.

    An entry of the index is what `entry_of` says, or 0; it stands at its row's home, or behind it.
    A larger index is made elsewhere, and then its size is published: a row that is not found is
    looked for again if that has changed. What is found is a line of the row for ever, but where
    rows are evicted.
    """
    if where[HEADER] == 0:
        return np.int64(local)
    header = array_at(where[HEADER], words, HEADER_WORDS)
    line_bits = header[LINE_BITS]
    while True:
        bits = load_acquire(header, BITS)
        size = 1 << bits
        index = array_at(where[INDEX] + size * numbers.itemsize, numbers, size)
        keys = array_at(where[KEYS], numbers, load_acquire(header, COUNT))
        at, mark = home_of(local, bits), entry_of(local, -1, bits, line_bits)
        found = np.int64(index[at])  # once: between two reads its page may be given back
        while found != 0:
            line = line_of(found, mark, line_bits)
            if line >= 0 and np.int64(keys[line]) == local:
                return line
            at = (at + 1) & (size - 1)
            found = np.int64(index[at])
        if load_acquire(header, BITS) == bits:
            return np.int64(-1)


@kernel(quick=True)
def fetch_entry(place: int, begins: Vector, where: Matrix, numbers: Vector) -> None:
    """Have the entry of the index that a row is looked for in first on its way."""
    owner = owner_of(place, begins)
    if where[owner, HEADER]:
        bits = array_at(where[owner, HEADER], begins, HEADER_WORDS)[BITS]
        at = (1 << bits) + home_of(place - begins[owner], bits)
        prefetch(where[owner, INDEX] + at * numbers.itemsize, 1)


@kernel(quick=True)
def home_of(local: int, bits: int) -> np.int64:
    """Return where a row is looked for first in an index of ``2**bits`` entries."""
    return np.int64((_U(local) * _SPREADING) >> _U(64 - bits))


@kernel(quick=True)
def entry_of(local: int, line: int, bits: int, line_bits: int) -> np.int64:
    """Return the entry of a row in an index of ``2**bits`` entries.

    It is the line's number and one more. Above that, as far as there is room in 32 bits, are those
    of the row's hash that its home leaves over: most rows that are not looked for are known by them
    before their keys are here.
    """
    mark = ((_U(local) * _SPREADING) << _U(bits)) >> _U(32)
    return np.int64(((mark >> _U(line_bits)) << _U(line_bits)) | _U(line + 1))


@kernel(quick=True)
def line_of(entry: np.int64, mark: np.int64, line_bits: int) -> np.int64:
    """Return the line that an entry has if it may be a row's, -1 if not.

    Args:
        entry: It, not 0.
        mark: `entry_of` the row and line -1.
        line_bits: See `LINE_BITS`.
    """
    if (entry ^ mark) >> line_bits != 0:
        return np.int64(-1)
    return np.int64(entry & ((1 << line_bits) - 1)) - 1


@kernel()
def take_lines(
    local: Vector, first: int, header: Vector, index: Vector, keys: Vector, slot: Vector
) -> int:
    """Find the lines of rows, and give one to each that has none, while the index has room.

    Args:
        local: Places of rows in the server, shape (n,), dtype int64.
        first: The first of them to look at; entries and keys of those behind it are fetched ahead.
        header: The size of the index and the number of lines: see `BITS` and `COUNT`.
        index: All of it, of which ``[size, 2 size)`` is in use, dtype uint32.
        keys: The row of each line, dtype uint32; as many as there can be.
        slot: Where the lines go, shape (n,), dtype int64.

    Returns:
        n, or the first row for which there was no room in the index or in `keys`.
    """
    bits, line_bits, count = header[BITS], header[LINE_BITS], header[COUNT]
    size, lines = 1 << bits, (1 << line_bits) - 1
    most = min(FULL * size // FULL_OF, keys.size)
    entries = index[size : 2 * size]
    first_entry = np.int64(entries.ctypes.data)
    for i in range(first, local.size):
        if i + 2 * AHEAD < local.size:
            prefetch(first_entry + entries.itemsize * home_of(local[i + 2 * AHEAD], bits), 1)
        if i + AHEAD < local.size:
            at = home_of(local[i + AHEAD], bits)
            line = max((np.int64(entries[at]) & lines) - 1, 0)
            prefetch(np.int64(keys.ctypes.data) + keys.itemsize * line, 1)
        at, mark = home_of(local[i], bits), entry_of(local[i], -1, bits, line_bits)
        slot[i] = -1
        while entries[at] != 0:
            line = line_of(np.int64(entries[at]), mark, line_bits)
            if line >= 0 and np.int64(keys[line]) == local[i]:
                slot[i] = line
                break
            at = (at + 1) & (size - 1)
        if slot[i] < 0:
            if count == most:
                return i
            keys[count] = local[i]
            slot[i] = count
            count += 1
            store_ordered(header, COUNT, count)
            entries[at] = mark + count
    return local.size


@kernel()
def fill_index(bits: int, header: Vector, index: Vector, keys: Vector) -> None:
    """Make an index of ``2**bits`` entries, and publish it; other arguments as for `take_lines`."""
    size = 1 << bits
    entries = index[size : 2 * size]
    for slot in range(header[COUNT]):
        at = home_of(keys[slot], bits)
        while entries[at] != 0:
            at = (at + 1) & (size - 1)
        entries[at] = entry_of(keys[slot], slot, bits, header[LINE_BITS])
    store_ordered(header, BITS, bits)


# Writing ---------------------------------------------------------------------------------------


@kernel(quick=True)
def fetch(slot: int, lines: Matrix, stripes: Vector) -> None:
    """Have a line that is to be written, or its beginning, and its stripe's word on their way."""
    size = lines.shape[1] * lines.itemsize
    prefetch_write(np.int64(stripes.ctypes.data) + 8 * (slot >> STRIPE_BITS), 1)
    prefetch_write(np.int64(lines.ctypes.data) + slot * size, size)


@kernel(quick=True)
def begin_write(slot: int, stripes: Vector) -> int:
    """Say that a line is written from now on; returns the word of its stripe."""
    word = stripes[slot >> STRIPE_BITS] | WRITING
    store_ordered(stripes, slot >> STRIPE_BITS, word)
    return word


@kernel(quick=True)
def close_line(slot: int, stripes: Vector, word: int) -> None:
    """Say that a line is written; `word` has its stripe's bits of lines that were touched."""
    store_ordered(stripes, slot >> STRIPE_BITS, word + WRITING)


@kernel()
def put(slot: Vector, given: Matrix, lines: Matrix, stripes: Vector) -> None:
    """Write whole lines, parameters and slots, shape (n, width); each is touched from then on."""
    for u in range(slot.size):
        word = begin_write(slot[u], stripes)
        copy_line(given[u], lines[slot[u]])
        close_line(slot[u], stripes, word | 1 << (slot[u] & BIT_MASK))


# Undoing ---------------------------------------------------------------------------------------


@kernel()
def keep(slot: Vector, lines: Matrix, stripes: Vector, kept: Matrix, touched: Vector) -> None:
    """Copy lines, and note which of them have been touched.

    Args:
        slot: Which, no two alike, shape (n,), dtype int64.
        lines: Of the table.
        stripes: Its stripe words.
        kept: Where the lines go, shape (n, width).
        touched: Where it is noted, shape (n,), dtype int64.
    """
    for u in range(slot.size):
        if u + AHEAD < slot.size:
            fetch(slot[u + AHEAD], lines, stripes)
        copy_line(lines[slot[u]], kept[u])
        touched[u] = stripes[slot[u] >> STRIPE_BITS] >> (slot[u] & BIT_MASK) & 1


@kernel()
def put_back(slot: Vector, kept: Matrix, touched: Vector, lines: Matrix, stripes: Vector) -> None:
    """Undo what was done to lines since `keep`, whose arguments these are, even half a write."""
    for u in range(slot.size):
        word = begin_write(slot[u], stripes)
        copy_line(kept[u], lines[slot[u]])
        if not touched[u]:
            word &= ~(1 << (slot[u] & BIT_MASK))
        close_line(slot[u], stripes, word)


@kernel()
def mend_index(header: Vector, index: Vector, keys: Vector) -> None:
    """See to it that the line given last is in the index; see `take_lines`."""
    bits, count = header[BITS], header[COUNT]
    if count == 0:
        return
    size = 1 << bits
    entries, last = index[size : 2 * size], keys[count - 1]
    at, entry = home_of(last, bits), entry_of(last, count - 1, bits, header[LINE_BITS])
    while entries[at] != 0 and entries[at] != entry:
        at = (at + 1) & (size - 1)
    entries[at] = entry
