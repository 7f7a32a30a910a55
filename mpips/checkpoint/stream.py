"""Arrays read and written in pieces, for files of other programs.

An ``.npz`` and a ``.safetensors`` have an array's shape before its numbers, so that no more than a
piece of any array has to be there.
"""

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

ALIGNED = 8  # bytes, of what precedes the numbers in a ``.safetensors``
NAMES = {"float32": "F32", "float64": "F64", "int64": "I64"}  # of types, there


@dataclass(frozen=True)
class Stream:
    """An array that comes a piece at a time.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        pieces: Returns its pieces, in the order of its elements; may be called again.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterator[np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> "Stream":
        """Return an array that is there, in one piece."""
        return cls(array.shape, array.dtype, lambda: iter([array]))

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """Return all of it."""
        out, at = np.empty(self.shape, self.dtype), 0
        flat = out.reshape(-1)
        for piece in self.pieces():
            flat[at : at + piece.size] = piece.reshape(-1)
            at += piece.size
        return out

    def buffers(self) -> Iterator[memoryview]:
        """Yield the bytes of its pieces."""
        for piece in self.pieces():
            yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data


Named = Iterable[tuple[str, Stream]]


def write_npz(path: Path, arrays: Named) -> None:
    """Write arrays to an ``.npz``, one after another."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays:
            head = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, head)
                for buffer in array.buffers():
                    entry.write(buffer)


def write_safetensors(path: Path, arrays: Named) -> None:
    """Write arrays of the types in `NAMES` to a ``.safetensors``, as its own library orders them.

    References: https://github.com/huggingface/safetensors, section "Format".
    """
    ordered = sorted(arrays, key=lambda named: (-named[1].dtype.itemsize, named[0]))
    head, at = dict[str, object](), 0
    for name, array in ordered:
        ends = [at, at + array.nbytes]
        head[name] = {"dtype": NAMES[array.dtype.name], "shape": array.shape, "data_offsets": ends}
        at = ends[1]
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            for buffer in array.buffers():
                file.write(buffer)
