"""Layout of named arrays in one flat vector, and its shards.

All dense parameters of a model are one flat vector. A `Layout` has the range of each named array in
this vector. `cut` divides the vector into one contiguous shard for each owner. By default, a shard
may begin or end within an array.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.errors import UserError

if TYPE_CHECKING:
    from mpips.layout.tables import Table

CACHE_LINE_BYTES = 64
_U = np.uint64
_MIX_1, _MIX_2 = _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)


@dataclass(frozen=True)
class Shard:
    """A contiguous range ``[begin, end)`` of the flat vector, which one owner updates."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements; 0 for an empty shard."""
        return self.end - self.begin

    @property
    def range(self) -> slice:
        """The shard as an index into the flat vector."""
        return slice(self.begin, self.end)


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the arrays in the flat vector, and the embedding tables beside it.

    Attributes:
        names: Names of the arrays, in their order in the vector.
        shapes: Shape of each array, in the same order.
        tables: Tables of rows, by name. Their rows are not in the vector.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tables: Mapping[str, "Table"] = field(default_factory=dict, hash=False)

    @classmethod
    def of(
        cls, shapes: Mapping[str, Iterable[int]], tables: Mapping[str, "Table"] | None = None
    ) -> "Layout":
        """Build a layout from ``{name: shape}``.

        Args:
            shapes: Shape of each array; their order is the order in the vector.
            tables: Tables of rows, ``{name: mpips.Table(...)}``.
        """
        sizes = tuple(tuple(int(k) for k in shape) for shape in shapes.values())
        return cls(tuple(shapes), sizes, {} if tables is None else tables)

    @cached_property
    def size(self) -> int:
        """Number of elements of the flat vector, which each read of a range asks for."""
        return sum(math.prod(shape) for shape in self.shapes)

    def slices(self) -> dict[str, tuple[int, int]]:
        """Return ``{name: (begin, end)}``, the range of each array in the flat vector."""
        out, begin = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            out[name] = (begin, begin + math.prod(shape))
            begin = out[name][1]
        return out

    def views(self, vector: np.ndarray, *, writable: bool = True) -> dict[str, np.ndarray]:
        """Return ``{name: array}``, where each array is a view of `vector`.

        Args:
            vector: Flat vector, shape (size,).
            writable: Whether the views may be written.

        Raises:
            ValueError: If the vector has another shape.
        """
        if vector.shape != (self.size,):
            raise ValueError(f"vector of shape {vector.shape}, expected ({self.size},)")
        if not writable:
            vector = vector.view()
            vector.flags.writeable = False
        shapes = dict(zip(self.names, self.shapes, strict=True))
        return {k: vector[b:e].reshape(shapes[k]) for k, (b, e) in self.slices().items()}

    def to_json(self) -> list[dict[str, Any]]:
        """Return names and shapes of the arrays as JSON values, for `from_json`."""
        return [{"name": n, "shape": list(s)} for n, s in zip(self.names, self.shapes, strict=True)]

    @classmethod
    def from_json(cls, items: Iterable[Mapping[str, Any]]) -> "Layout":
        """Build a layout from the value of `to_json`.

        Raises:
            ValueError: If an element of a shape is not an integer >= 0.
        """
        items = list(items)
        for item in items:
            if not all(type(k) is int and k >= 0 for k in item["shape"]):
                raise ValueError(f"shape {item['shape']} of {item['name']}")
        return cls.of({item["name"]: item["shape"] for item in items})


def cut(
    n: int,
    parts: int,
    itemsize: int = 4,
    between: Sequence[int] = (),
    portions: Sequence[float] = (),
) -> list[Shard]:
    """Cut ``[0, n)`` into `parts` contiguous shards, equal to within a cache line.

    Shards begin on cache lines of a 64-byte aligned vector. If there are more parts than cache
    lines, the last ones are empty; part 0 is empty only if n is 0.

    Args:
        n: Number of elements.
        parts: Number of shards.
        itemsize: Bytes of an element.
        between: Allowed boundaries of shards, ascending, with 0 and n; by default all. Each
            boundary moves to the nearest allowed one, so shards may begin within a cache line.
        portions: Fraction of the elements for each shard; by default equal ones.
    """
    line = CACHE_LINE_BYTES // itemsize
    lines = -(-n // line)
    whole, extra = divmod(lines, parts)
    edges = [min(n, line * (k * whole + min(k, extra))) for k in range(parts + 1)]
    if portions:
        edges = [min(n, line * round(lines * end)) for end in accumulate(portions, initial=0.0)]
        edges[-1] = n
    if between:
        chosen = sorted({0, n, *(min(between, key=lambda b: abs(b - edge)) for edge in edges)})
        edges = chosen + [n] * (len(edges) - len(chosen))
    return [Shard(b, e) for b, e in pairwise(edges)]


def aligned_zeros(n: int, dtype: np.dtype) -> np.ndarray:
    """Return a vector of zeros, shape (n,), that begins on a cache line.

    XLA uses an aligned vector in place, and copies any other.
    """
    memory = np.zeros(n * dtype.itemsize + CACHE_LINE_BYTES, "u1")
    skip = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[skip : skip + n * dtype.itemsize].view(dtype)


def check_names(names: Sequence[str]) -> None:
    """Raise UserError unless all names of arrays can name datasets in one HDF5 group.

    A slash makes a group (``layer1/w``). So no name may be the group of another name.
    """
    groups = {"/".join(n.split("/")[:k]) for n in names for k in range(1, n.count("/") + 1)}
    counts = Counter([*names, *groups])
    for name in names:
        if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            raise UserError(f"array name {name!r}", "parts that are neither empty nor dots")
        if counts[name] > 1:
            raise UserError(f"array name {name!r}", "a name that is not another's or its group")


def check_alike(layouts: Sequence[Layout]) -> None:
    """Check that all ranks have the same parameters and tables, in the same order.

    Checkpoints must be able to save the parameters by their names.

    Args:
        layouts: Layout of each rank, by rank.

    Raises:
        UserError: If the layouts differ, or have names that a checkpoint cannot save.
    """
    first = layouts[0]
    check_names(first.names)
    for rank, layout in enumerate(layouts):
        if (layout.names, layout.shapes) != (first.names, first.shapes):
            got = f"params {dict(zip(layout.names, layout.shapes, strict=True))} on rank {rank}"
            raise UserError(got, "names and shapes as on rank 0", "make them alike on every rank")
        if list(layout.tables.items()) != list(first.tables.items()):
            got = f"tables {layout.tables} on rank {rank}"
            raise UserError(got, f"{first.tables}, as on rank 0", "give the same on every rank")


def fragment_shards(shards: Sequence[Shard], fragments: int, itemsize: int) -> list[list[Shard]]:
    """Divide each shard into fragments.

    Args:
        shards: Shard of each owner.
        fragments: Number of fragments.
        itemsize: Bytes of an element.

    Returns:
        For each fragment, a list of its parts, one for each owner.
    """
    parts = [cut(shard.size, fragments, itemsize) for shard in shards]
    return [
        [
            Shard(shard.begin + part[p].begin, shard.begin + part[p].end)
            for shard, part in zip(shards, parts, strict=True)
        ]
        for p in range(fragments)
    ]


def mixed(words: np.ndarray) -> np.ndarray:
    """Return the finaliser of SplitMix64 of each word, shape and dtype (uint64) of `words`."""
    words = (words ^ (words >> _U(30))) * _MIX_1
    words = (words ^ (words >> _U(27))) * _MIX_2
    return words ^ (words >> _U(31))
