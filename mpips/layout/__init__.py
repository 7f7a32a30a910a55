"""Layout of named arrays in one flat vector, and its shards.

All dense parameters of a model are one flat vector. A `Layout` says where each named array
lies in it; `cut` divides it into one contiguous shard an owner, wherever the cut falls.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """The contiguous range ``[begin, end)`` of the flat vector that one owner holds."""

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
    """Where each named array lies in the flat vector, and which tables of rows are beside it.

    Attributes:
        names: Array names, in the order in which they lie in the vector.
        shapes: Shape of each, in the same order.
        tables: Tables by name; nothing of them is in the vector.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tables: Mapping[str, "Table"] = field(default_factory=dict, hash=False)

    @classmethod
    def of(
        cls, shapes: Mapping[str, Iterable[int]], tables: Mapping[str, "Table"] | None = None
    ) -> "Layout":
        """Build a layout from ``{name: shape}``; the order of the mapping is kept.

        Args:
            shapes: Of the arrays.
            tables: Tables of rows beside them, ``{name: mpips.Table(...)}``.
        """
        sizes = tuple(tuple(int(k) for k in shape) for shape in shapes.values())
        return cls(tuple(shapes), sizes, {} if tables is None else tables)

    @property
    def size(self) -> int:
        """Number of elements of the flat vector."""
        return sum(math.prod(shape) for shape in self.shapes)

    def slices(self) -> dict[str, tuple[int, int]]:
        """Return ``{name: (begin, end)}``, the range of each array in the flat vector."""
        out, begin = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            out[name] = (begin, begin + math.prod(shape))
            begin = out[name][1]
        return out

    def views(self, vector: np.ndarray, *, writable: bool = True) -> dict[str, np.ndarray]:
        """Return ``{name: array}``, each a view of `vector`, shape (size,), without a copy."""
        if vector.shape != (self.size,):
            raise ValueError(f"vector of shape {vector.shape}, expected ({self.size},)")
        if not writable:
            vector = vector.view()
            vector.flags.writeable = False
        shapes = dict(zip(self.names, self.shapes, strict=True))
        return {k: vector[b:e].reshape(shapes[k]) for k, (b, e) in self.slices().items()}

    def to_json(self) -> list[dict[str, Any]]:
        """Return a plain description of the arrays that `from_json` reads back."""
        return [{"name": n, "shape": list(s)} for n, s in zip(self.names, self.shapes, strict=True)]

    @classmethod
    def from_json(cls, items: Iterable[Mapping[str, Any]]) -> "Layout":
        """Build a layout from what `to_json` returned.

        Raises:
            ValueError: If a shape is not of whole numbers from 0.
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

    Shards begin on cache lines of a 64-byte aligned vector. Where there are more parts than
    cache lines, the last ones are empty, so that part 0 is empty only if n is 0.

    Args:
        n: Elements.
        parts: Shards.
        itemsize: Bytes of an element.
        between: Where cuts may be, 0 and n among them, in their order; by default anywhere. Shards
            are as equal then as the nearest of these are to where cuts would be.
        portions: Of the whole, of each shard; by default equal ones.
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
    """Return a vector of zeroes, shape (n,), that begins on a cache line.

    XLA shares what begins so, and copies what does not.
    """
    memory = np.zeros(n * dtype.itemsize + CACHE_LINE_BYTES, "u1")
    skip = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[skip : skip + n * dtype.itemsize].view(dtype)


def check_alike(layouts: Sequence[Layout]) -> None:
    """Check that the parameters and tables of all ranks, in their order, are the same.

    Raises:
        UserError: If they are not.
    """
    first = layouts[0]
    for rank, layout in enumerate(layouts):
        if (layout.names, layout.shapes) != (first.names, first.shapes):
            got = f"params {dict(zip(layout.names, layout.shapes, strict=True))} on rank {rank}"
            raise UserError(got, "names and shapes as on rank 0", "make them alike on every rank")
        if list(layout.tables.items()) != list(first.tables.items()):
            got = f"tables {layout.tables} on rank {rank}"
            raise UserError(got, f"{first.tables}, as on rank 0", "give the same on every rank")


def fragment_shards(shards: Sequence[Shard], fragments: int, itemsize: int) -> list[list[Shard]]:
    """Return what each owner updates of each fragment, by fragment and then by owner."""
    parts = [cut(shard.size, fragments, itemsize) for shard in shards]
    return [
        [
            Shard(shard.begin + part[p].begin, shard.begin + part[p].end)
            for shard, part in zip(shards, parts, strict=True)
        ]
        for p in range(fragments)
    ]


def mixed(words: np.ndarray) -> np.ndarray:
    """Return what the finaliser of SplitMix64 makes of each word, shape and dtype of `words`."""
    words = (words ^ (words >> _U(30))) * _MIX_1
    words = (words ^ (words >> _U(27))) * _MIX_2
    return words ^ (words >> _U(31))
