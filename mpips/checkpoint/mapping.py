"""Whole named arrays as HDF5 virtual datasets over shard files."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import h5py

    from mpips.checkpoint.index import Contents


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[slice, ...]]:
    """Cut a flat range of an N-d array (C order) into boxes, in order.

    Args:
        shape: Shape of the array; () has one element.
        begin: First flat index.
        end: Last flat index + 1.

    Yields:
        For each box one slice an axis. Tsuccessor flat ranges are contiguous and ascending, so that
        the box's elements in C order are the range's; at most 2 * ndim - 1 boxes.

    Example:
        >>> list(boxes((3, 4), 2, 8))
        [(slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None), slice(0, 4, None))]
    """
    if not shape and begin < end:
        yield ()
        return
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    while begin < end:
        # The outermost axis along which a whole row fits: everything inside it is whole.
        axis = next(k for k, s in enumerate(strides) if not begin % s and end - begin >= s)
        index = [begin // s % n for s, n in zip(strides, shape, strict=True)]
        rows = min((end - begin) // strides[axis], shape[axis] - index[axis])
        fixed = (slice(k, k + 1) for k in index[:axis])
        whole = (slice(0, n) for n in shape[axis + 1 :])
        yield (*fixed, slice(index[axis], index[axis] + rows), *whole)
        begin += rows * strides[axis]


def map_arrays(file: "h5py.File", source: str, contents: "Contents") -> None:
    """Add ``<source>/<name>`` for each named array, mapped over dataset `source` of the shards."""
    import h5py

    dtype, group = contents.dtype, file.require_group(source)
    sources = [h5py.VirtualSource(s.file, source, (s.size,), dtype) for s in contents.shards]
    for shape, (name, (first, last)) in zip(
        contents.layout.shapes, contents.layout.slices().items(), strict=True
    ):
        if first == last:
            group.create_dataset(name, shape, dtype)
            continue
        target = h5py.VirtualLayout(shape, dtype)
        for record, whole in zip(contents.shards, sources, strict=True):
            begin, end = max(first, record.begin), min(last, record.end)
            at = begin - record.begin
            for box in boxes(shape, begin - first, end - first):
                count = math.prod(s.stop - s.start for s in box)
                target[box] = whole[at : at + count]
                at += count
        group.create_virtual_dataset(name, target, fillvalue=np.nan)
