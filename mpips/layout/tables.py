"""Tables of rows: shape, initial values, and the owner of each row.

Every row has a **place**: its number, or a keyed permutation of it (`mpips.kernels.row_keys`). Each
server owns a contiguous range of places. The permutation spreads frequently used rows evenly over
the servers. Without it, each server owns a block of consecutive rows. A server's **local places**
count from 0. A run that is resumed with another number of servers cuts the same places anew, as it
does with shards of the flat vector.

The row of a hashed id is a 64-bit hash modulo the number of rows. The hash of an integer is the
finaliser of SplitMix64, which is a bijection; that of a word is BLAKE2b of its UTF-8. The hash has
no state and no seed: an id has the same row in every run.

References: Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009;
Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpips.errors import UserError
from mpips.kernels import row_groups, row_keys
from mpips.layout import mixed

WORDS = {"capacity": ("auto", "full", "lazy"), "ownership": ("hash", "blocks")}  # legal values
LAZY_ROWS = 1 << 24  # with more rows, an index makes reads of few rows faster (`mpips bench rows`)
MOST_EPOCHS = 1 << 31
MOST = {"rows": 1 << 40, "dim": 1 << 20, "push_rows": 1 << 40, "evict_after": MOST_EPOCHS}
OPTIONAL = ("push_rows", "evict_after")
# Multipliers that spread consecutive numbers: fractions of the golden and plastic ratios.
SPREADING = (0x9E3779B97F4A7C15, 0xC13FA9A902A6328F)
HIGH_BITS = 6
MOST_DIGIT = 13  # bits: the counts of a pass stay in the second-level cache
_U = np.uint64


@dataclass(frozen=True)
class Init:
    """Initial values of rows; a subclass has one number, its scale, or none."""

    kind: ClassVar[int]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= float(np.finfo("f4").max):
                raise UserError(f"{name}={value!r}", f"a finite {name} >= 0")

    @property
    def scale(self) -> float:
        """The number of the subclass; 0 if it has none."""
        return next(iter(vars(self).values()), 0.0)


@dataclass(frozen=True)
class Zeros(Init):
    """Zeros."""

    kind = row_keys.ZEROS


@dataclass(frozen=True)
class Normal(Init):
    """Normal distribution with mean 0.

    Args:
        std: Standard deviation, at least 0.
    """

    kind = row_keys.NORMAL
    std: float


@dataclass(frozen=True)
class Uniform(Init):
    """Uniform distribution on ``[-bound, bound)``.

    Args:
        bound: Largest magnitude, at least 0.
    """

    kind = row_keys.UNIFORM
    bound: float


@dataclass(frozen=True)
class Table:
    """A table of rows of parameters, such as an embedding, addressed by row ids.

    Args:
        rows: Number of rows; ids go from 0 to ``rows - 1``.
        dim: Number of elements of a row.
        init: Initial values of a row: `Normal`, `Uniform` or `Zeros`.
        optimizer: Update rule of the rows, such as ``mpips.Adagrad(0.1)``; None for the run's rule.
        capacity: ``full`` allocates memory for all rows, ``lazy`` only for rows that were updated;
            ``auto`` is ``lazy`` from 16 M rows on, or with `evict_after`. The values are the same.
        push_rows: Largest number of rows in one push of a worker. None for as many as take 16 MiB,
            or 1,024 if these take no more than 256 MiB.
        ownership: ``hash`` spreads rows over servers by a permutation of their numbers; with
            ``blocks``, each server owns consecutive rows. The values are the same.
        hashed: Whether ids are arbitrary 64-bit integers or words (str), which are hashed to rows.
            mpips counts the ids that share a row.
        evict_after: Number of consecutive epochs without a push after which a row of a lazy table
            gets its initial values again, and its memory is freed; None for never.

    Raises:
        UserError: If a value has the wrong type or is out of range.
    """

    rows: int
    dim: int
    init: Init = field(default_factory=lambda: Normal(0.01))
    optimizer: object = None
    capacity: str = "auto"
    push_rows: int | None = None
    ownership: str = "hash"
    hashed: bool = False
    evict_after: int | None = None

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise UserError(f"{name}={value!r} of a table", "a whole number")
            if not 1 <= value <= most:
                raise UserError(f"{name}={value} of a table", f"{name} from 1 to {most}")
            object.__setattr__(self, name, int(value))  # JSON takes no integers of NumPy
        if not isinstance(self.init, Init):
            remedy = "such as mpips.Normal(0.01)"
            raise UserError(f"init={self.init!r} of a table", "Normal, Uniform or Zeros", remedy)
        for name, legal in WORDS.items():
            if (word := getattr(self, name)) not in legal:
                raise UserError(f"{name}={word!r} of a table", f"one of {', '.join(legal)}")
        if self.capacity == "full" and self.evict_after is not None:
            got = f"evict_after={self.evict_after} of a table of capacity 'full'"
            raise UserError(got, "capacity 'lazy' or 'auto'", "'full' has memory for all rows")
        if not isinstance(self.hashed, bool):
            raise UserError(f"hashed={self.hashed!r} of a table", "True or False")

    @property
    def lazy(self) -> bool:
        """Whether servers allocate memory only for rows that were updated."""
        better = self.rows >= LAZY_ROWS or self.evict_after is not None
        return self.capacity == "lazy" or (self.capacity == "auto" and better)


class Grouped(NamedTuple):
    """The distinct rows of a step's ids, sorted by server and then by place.

    Attributes:
        places: Place of each id's row, in the order of the ids, shape (n_ids,), int64.
        local: Local place of each row, shape (n_rows,), int64; ascending for each server.
        bounds: The rows of server s are ``bounds[s]`` to ``bounds[s + 1]``, shape (servers + 1,),
            int64.
        order: Indices of the ids, grouped by row, ascending within a row, shape (n_ids,), int64.
        starts: The ids of row r are ``order[starts[r] : starts[r + 1]]``, shape (n_rows + 1,),
            int64.
    """

    places: np.ndarray
    local: np.ndarray
    bounds: np.ndarray
    order: np.ndarray
    starts: np.ndarray

    def of(self, server: int) -> slice:
        """Return the slice of the rows that a server owns."""
        return slice(int(self.bounds[server]), int(self.bounds[server + 1]))


@dataclass(frozen=True)
class Ownership:
    """Owner of each row of a table, computed from the table and the number of servers.

    Attributes:
        name: Name of the table, the key of the permutation.
        table: The table.
        servers: Number of servers, spares included.
        seed: Seed of the rows' initial values.
        spares: Number of spares, the last of the servers, which own no rows.
    """

    name: str
    table: Table
    servers: int
    seed: int = 0
    spares: int = 0

    @cached_property
    def begins(self) -> np.ndarray:
        """First place of each server, and then the number of rows; shape (servers + 1,), int64."""
        owners = self.servers - self.spares
        return np.minimum(np.arange(self.servers + 1), owners) * self.table.rows // owners

    def count(self, server: int) -> int:
        """Return the number of rows that a server owns."""
        return int(self.begins[server + 1] - self.begins[server])

    def key(self, server: int = 0) -> np.ndarray:
        """Return the key of the table for a server's loops; see `mpips.kernels.row_keys`."""
        key = self._key.copy()
        key[row_keys.FIRST] = self.begins[server]
        return key

    @cached_property
    def _key(self) -> np.ndarray:
        low = max((self.table.rows - 1).bit_length() - HIGH_BITS, 1)
        if self.table.ownership == "blocks":
            low = 0
        digest = hashlib.blake2b(self.name.encode(), digest_size=32).digest()
        words = np.frombuffer(digest, "<u8").astype(np.uint64)
        key = np.zeros(row_keys.KEY_WORDS, np.uint64)
        key[row_keys.ROWS] = self.table.rows
        key[row_keys.LOW], key[row_keys.HIGH] = low, -(-self.table.rows >> low)
        odd = [number >> 64 - low | 1 for number in SPREADING]
        key[row_keys.ODD], key[row_keys.ADDED] = odd, words[:2]
        key[row_keys.UNDO] = [pow(number, -1, 1 << 64) for number in odd]
        key[row_keys.OFFSET] = words[2]
        key[row_keys.KIND] = self.table.init.kind
        key[row_keys.SCALE] = np.float32(self.table.init.scale).view(np.uint32)
        seed = hashlib.blake2b(digest + str(self.seed).encode(), digest_size=8).digest()
        key[row_keys.STREAM] = int.from_bytes(seed, "little")
        return key

    def check(self, ids: np.ndarray) -> np.ndarray:
        """Return ids as a contiguous vector of int64; no copy if they already are one.

        Raises:
            UserError: If they are not integers, or not of one dimension.
        """
        ids = np.asarray(ids)
        what = f"ids of table {self.name!r}"
        if ids.dtype.kind not in "iu":
            remedy = "convert them, such as by ids.astype('int64')"
            if ids.dtype.kind in "UT" or any(isinstance(each, str) for each in ids.flat):
                remedy = "give the table hashed=True if they are words"
            raise UserError(f"{what} of dtype {ids.dtype}", "an integer type", remedy)
        if ids.ndim != 1:
            raise UserError(f"{what} of shape {ids.shape}", "one dimension", "ravel them")
        return np.ascontiguousarray(ids, np.int64)

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Return the place of each id's row, shape (n,), int64.

        Args:
            ids: Row numbers, shape (n,), of any integer dtype; duplicates are allowed.

        Raises:
            UserError: As `check`, or if an id is not a row of the table.
        """
        numbers = self.check(ids)
        places = np.empty(len(numbers), np.int64)
        bad = row_keys.places_of(numbers, self._key, places)
        if bad >= 0:
            got = f"id {ids[bad]} at place {bad} for table {self.name!r}"
            raise UserError(got, f"ids from 0 to {self.table.rows - 1}")
        return places

    def group(self, ids: np.ndarray) -> Grouped:
        """Group the ids of a step by server and row; arguments and errors as `places`, `sort`."""
        return self.sort(self.places(ids))

    def sort(self, places: np.ndarray) -> Grouped:
        """Group ids by server and row.

        Args:
            places: Place of each id's row, as `places` returns them, shape (n,), int64.

        Raises:
            UserError: If there are too many ids.
        """
        n, bits = len(places), (self.table.rows - 1).bit_length()
        if bits + (n - 1).bit_length() > 64:
            raise UserError(f"{n} ids at once", f"at most {1 << 64 - bits}")
        passes = max(1, math.ceil(bits / MOST_DIGIT))
        counts = np.empty((passes, 1 << math.ceil(bits / passes)), np.int64)
        words, spare = np.empty((2, n), np.uint64)
        local, order = np.empty((2, n), np.int64)
        row_groups.sort_places(places, words, spare, counts)
        starts, bounds = np.empty(n + 1, np.int64), np.empty(self.servers + 1, np.int64)
        count = row_groups.group(words, self.begins, local, bounds, order, starts)
        return Grouped(places, local[:count], bounds, order, starts[: count + 1])

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the server and the local place of each id's row, each of shape (n,), int64.

        Raises:
            UserError: As `places`.
        """
        places = self.places(ids)
        owners = np.searchsorted(self.begins, places, "right") - 1
        return owners, places - self.begins[owners]

    def rows_of(self, server: int, local: np.ndarray) -> np.ndarray:
        """Return the row numbers at local places of a server, shape of `local`, int64."""
        out = np.empty(len(local), np.int64)
        rows_at = np.ascontiguousarray(local, np.int64) + self.begins[server]
        row_keys.rows_at(rows_at, self._key, out)
        return out


def combine(grouped: Grouped, grads: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Sum the gradients of each row, in the order of the ids.

    Args:
        grouped: The ids, grouped by `Ownership.group`.
        grads: Gradient of each id, shape (n_ids, dim), float32 or float64, C-contiguous.
        out: Gets the sums, shape (n_rows, dim), dtype of `grads`; None for a new array.

    Returns:
        The sums, in the order of ``grouped.local``.
    """
    if out is None:
        out = np.empty((len(grouped.local), grads.shape[1]), grads.dtype)
    row_groups.add_up(grads, grouped.order, grouped.starts, out)
    return out


def as_array(name: str, ids: Any) -> np.ndarray:
    """Return the ids that a program gives as an array of any shape, in which each keeps its type.

    Args:
        name: Name of the table, for messages.
        ids: An array, a number or a word, or lists of these.

    Raises:
        UserError: If lists have several lengths.
    """
    try:
        found = np.asarray(ids)
    except ValueError:  # NumPy makes no array of lists of different lengths
        raise UserError(f"ids of table {name!r} of several lengths", "one array of them") from None
    if not found.size:  # an empty list is an array of floats
        return found.astype(np.int64)
    if found.dtype.kind == "U" and found is not ids:  # it makes words of numbers beside words
        return np.array(ids, object)
    return found


def digests_of(name: str, ids: np.ndarray) -> np.ndarray:
    """Return the 64-bit hash of each id.

    Args:
        name: Name of the table, for messages.
        ids: Integers, or words (str), of any shape. A negative integer wraps around to uint64.

    Returns:
        The hashes, shape of `ids`, uint64.

    Raises:
        UserError: If the ids are neither integers nor words.
    """
    if ids.dtype.kind in "iu":
        return mixed(ids.astype(np.uint64))
    words = ids.reshape(-1).tolist()
    if ids.dtype.kind not in "UTO" or not all(isinstance(word, str) for word in words):
        expected = "integers, or str; integers fit into int64, or into uint64"
        raise UserError(f"ids of table {name!r} of dtype {ids.dtype}", expected)
    digests = b"".join(map(_digest, words))
    return np.frombuffer(digests, "<u8").astype(np.uint64).reshape(ids.shape)


def rows_of(digests: np.ndarray, rows: int) -> np.ndarray:
    """Return the row of each hash that `digests_of` returns, the same shape, int64."""
    return (digests % _U(rows)).astype(np.int64)


def _digest(word: str) -> bytes:
    return hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
