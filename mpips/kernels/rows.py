"""Memory of a table's rows: lines, stripe words and an index.

A **line** contains the parameters of one row and then its optimizer's slots. Lines are the rows of
a matrix. Each 32 lines have one **stripe word**. Its low half has one bit for each line: whether
the line has been touched (updated or written). Its high half is a version, which is odd while a
line is written. A reader compares the word before and after it reads a line, and reads a torn row
again. An untouched line is not read; `mpips.kernels.row_keys.make_row` computes the row's initial
values.

With sparse storage, a row gets a line when it is first touched. An index by open addressing maps
rows to lines (`take_lines`). `mpips.kernels.row_reads` has the loops that read rows.
"""

from typing import TYPE_CHECKING

import numpy as np

from mpips.kernels.compiled import Matrix, Vector, kernel

if TYPE_CHECKING:  # the compiler of loops defines these names
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
AHEAD = 32  # rows between a prefetch and the use of its data
# Addresses of a server's memory. HEADER is 0 with dense storage: row k of a server is line k.
LINES, STRIPES, HEADER, INDEX, KEYS = range(5)
# Words of the header: log2 of the index's size; number of lines in use; a counter that evictions
# raise at begin and end, so it is odd during one; number of bits of a line's number in the index.
BITS, COUNT, MOVES, LINE_BITS, HEADER_WORDS = range(5)
FULL, FULL_OF = 3, 4  # the index is enlarged when it is 3/4 full
MOST_PLACES = (1 << 32) - 2  # largest number of rows of a server: entries and keys have 32 bits
FREE = (1 << 32) - 1  # key of a line without a row

_U = np.uint64
_SPREADING = _U(0x9E3779B97F4A7C15)


@kernel(quick=True)
def owner_of(place: int, begins: Vector) -> int:
    """Return the number of the server that owns a place."""
    owner = 0
    for k in range(1, begins.size - 1):
        owner += place >= begins[k]
    return owner


@kernel(quick=True)
def copy_line(line: Vector, out: Vector) -> None:
    """Copy the first ``out.size`` elements of a line."""
    for j in range(out.size):
        out[j] = line[j]


# Lines of rows that come as they are touched -----------------------------------------------------


@kernel(quick=True)
def find_line(local: int, where: Vector, words: Vector, numbers: Vector) -> np.int64:
    """Return the line of a row, or -1 if it has none; arguments as in `row_reads.gather`.

    An entry of the index is 0 or the value of `entry_of`. The entry of a row is at its home or
    after it. The owner builds a larger index in other memory and then publishes its size; if the
    size has changed, a row that was not found is looked up again. A row keeps its line, unless the
    table evicts rows.
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
        found = np.int64(index[at])  # read once: its page may be freed before a second read
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
    """Prefetch the entry of the index at a row's home."""
    owner = owner_of(place, begins)
    if where[owner, HEADER]:
        bits = array_at(where[owner, HEADER], begins, HEADER_WORDS)[BITS]
        at = (1 << bits) + home_of(place - begins[owner], bits)
        prefetch(where[owner, INDEX] + at * numbers.itemsize, 1)


@kernel(quick=True)
def home_of(local: int, bits: int) -> np.int64:
    """Return the home of a row in an index of ``2**bits`` entries: the first entry to check."""
    return np.int64((_U(local) * _SPREADING) >> _U(64 - bits))


@kernel(quick=True)
def entry_of(local: int, line: int, bits: int, line_bits: int) -> np.int64:
    """Return the entry of a row in an index of ``2**bits`` entries.

    The low `line_bits` bits are the line's number plus 1. The other bits, up to 32 in all, are
    bits of the row's hash that its home does not use. They tell most other rows apart without a
    read of their keys.
    """
    mark = ((_U(local) * _SPREADING) << _U(bits)) >> _U(32)
    return np.int64(((mark >> _U(line_bits)) << _U(line_bits)) | _U(line + 1))


@kernel(quick=True)
def line_of(entry: np.int64, mark: np.int64, line_bits: int) -> np.int64:
    """Return the line of an entry if the entry may belong to a row, or -1.

    Args:
        entry: The entry, not 0.
        mark: `entry_of` for the row and line -1.
        line_bits: See `LINE_BITS`.
    """
    if (entry ^ mark) >> line_bits != 0:
        return np.int64(-1)
    return np.int64(entry & ((1 << line_bits) - 1)) - 1


@kernel()
def take_lines(
    local: Vector, first: int, header: Vector, index: Vector, keys: Vector, slot: Vector
) -> int:
    """Find the lines of rows, and assign a line to each row without one.

    Args:
        local: Local places of the rows on this server, shape (n,), dtype int64.
        first: Index in `local` of the first row to process.
        header: Header words; see `BITS` and `COUNT`.
        index: Memory of the index, dtype uint32; entries ``[size, 2 * size)`` are in use.
        keys: Local place of the row of each line, dtype uint32; its size is the largest possible
            number of lines.
        slot: Gets the line of each row, shape (n,), dtype int64.

    Returns:
        n, or the index of the first row for which the index or `keys` was full.
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
    """Fill an index of ``2**bits`` entries and publish it; other arguments as in `take_lines`."""
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
    """Prefetch the beginning of a line, and its stripe word, for a write."""
    size = lines.shape[1] * lines.itemsize
    prefetch_write(np.int64(stripes.ctypes.data) + 8 * (slot >> STRIPE_BITS), 1)
    prefetch_write(np.int64(lines.ctypes.data) + slot * size, size)


@kernel(quick=True)
def begin_write(slot: int, stripes: Vector) -> int:
    """Mark a line as being written; return its stripe word."""
    word = stripes[slot >> STRIPE_BITS] | WRITING
    store_ordered(stripes, slot >> STRIPE_BITS, word)
    return word


@kernel(quick=True)
def close_line(slot: int, stripes: Vector, word: int) -> None:
    """Mark a line as written. The low half of `word` has the stripe's bits of touched lines."""
    store_ordered(stripes, slot >> STRIPE_BITS, word + WRITING)


@kernel()
def put(slot: Vector, given: Matrix, lines: Matrix, stripes: Vector) -> None:
    """Write whole lines: parameters and slots, shape (n, width). They are touched from then on."""
    for u in range(slot.size):
        word = begin_write(slot[u], stripes)
        copy_line(given[u], lines[slot[u]])
        close_line(slot[u], stripes, word | 1 << (slot[u] & BIT_MASK))


# Undoing ---------------------------------------------------------------------------------------


@kernel()
def keep(slot: Vector, lines: Matrix, stripes: Vector, kept: Matrix, touched: Vector) -> None:
    """Copy lines and their bits in the stripe words, to restore them by `put_back`.

    Args:
        slot: Numbers of the lines, each once, shape (n,), dtype int64.
        lines: Lines of the table.
        stripes: Stripe words of the table.
        kept: Gets the lines, shape (n, width).
        touched: Gets 1 for each touched line, else 0; shape (n,), dtype int64.
    """
    for u in range(slot.size):
        if u + AHEAD < slot.size:
            fetch(slot[u + AHEAD], lines, stripes)
        copy_line(lines[slot[u]], kept[u])
        touched[u] = stripes[slot[u] >> STRIPE_BITS] >> (slot[u] & BIT_MASK) & 1


@kernel()
def put_back(slot: Vector, kept: Matrix, touched: Vector, lines: Matrix, stripes: Vector) -> None:
    """Restore lines that were copied by `keep`, even if a write of theirs was not completed."""
    for u in range(slot.size):
        word = begin_write(slot[u], stripes)
        copy_line(kept[u], lines[slot[u]])
        if not touched[u]:
            word &= ~(1 << (slot[u] & BIT_MASK))
        close_line(slot[u], stripes, word)


@kernel()
def mend_index(header: Vector, index: Vector, keys: Vector) -> None:
    """Enter the line assigned last into the index, if it is not there; see `take_lines`."""
    bits, count = header[BITS], header[COUNT]
    if count == 0:
        return
    size = 1 << bits
    entries, last = index[size : 2 * size], keys[count - 1]
    at, entry = home_of(last, bits), entry_of(last, count - 1, bits, header[LINE_BITS])
    while entries[at] != 0 and entries[at] != entry:
        at = (at + 1) & (size - 1)
    entries[at] = entry
