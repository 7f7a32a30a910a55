"""Parameter files of other programs: ``.npz``, ``.safetensors``, ``.pt``, ``.parquet``.

A checkpoint is written to any of them. A run begins with those of the first two: to read a ``.pt``
means to unpickle it, which some versions of PyTorch let a file turn against its reader.

An ``.npz`` and a ``.safetensors`` have an array's shape before its numbers, so that no more than a
piece of any array has to be there to write them.
"""

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpips import extras
from mpips.checkpoint.files import NPZ, PT, SAFETENSORS, write_durably
from mpips.checkpoint.reader import Checkpoint
from mpips.checkpoint.rows import ROWS, Stream
from mpips.config.names import EMA
from mpips.errors import UserError, listed, nearest, unknown
from mpips.layout import Layout

PARQUET = ".parquet"
TABLES = "tables/"
VALUES = re.compile(rf"({TABLES}[^/]+/)?(rows|params)")  # of a table, without its slots
PARAMS, SLOTS = "params/", "slots/"  # in an npz that was exported; other programs' have names alone
SHOWN = 5  # names in a note
ALIGNED = 8  # bytes, of what precedes the numbers in a ``.safetensors``
TYPES = {"float32": "F32", "float64": "F64", "int64": "I64"}  # as a ``.safetensors`` names them


def export(checkpoint: Checkpoint, output: Path, table: str = "", average: bool = False) -> None:
    """Write a checkpoint's parameters to a file, or one of its tables, whole or not at all.

    An ``.npz`` has the optimizer's slots as well; the others have the parameters under their names.
    A piece of an array is in memory at a time, but for a ``.pt``, all of whose arrays are. Of a
    table all have the rows that were changed: ``rows`` their numbers, and ``params`` their values.

    Args:
        checkpoint: What is written.
        output: The file; its suffix says how.
        table: The table; empty for everything.
        average: Whether to write the average of the parameters in their place, without slots.

    Raises:
        UserError: If there is no such table or average, the suffix is none of them, the package for
            it is missing, the checkpoint cannot be read, or the file cannot be written.
    """
    if table and table not in checkpoint.tables:
        raise unknown("table", table, tuple(checkpoint.tables))
    writers = {NPZ: write_npz, SAFETENSORS: write_safetensors}
    writers |= {PARQUET: partial(_write_parquet, checkpoint, table)} if table else {PT: _write_pt}
    if output.suffix not in writers:
        what = f" for table {table!r}" if table else ""
        raise UserError(f"{output}{what}", f"a name that ends in {', '.join(writers)}")
    arrays = checkpoint.columns(table) if table else dict(named_streams(checkpoint))
    if average:
        arrays = {PARAMS + k: array for k, array in _average(checkpoint, arrays)}
    named = arrays if output.suffix == NPZ else _parameters(arrays)
    write_durably(output, lambda path: writers[output.suffix](path, named.items()))


def named_streams(checkpoint: Checkpoint) -> Iterator[tuple[str, Stream]]:
    """Yield ``params/<name>`` and ``slots/<slot>/<name>`` with their arrays.

    Then those of tables: ``tables/<table>/rows``, ``params`` and ``slots/<slot>`` of what was
    changed.
    """
    shapes = dict(zip(checkpoint.layout.names, checkpoint.layout.shapes, strict=True))
    for name, (begin, end) in checkpoint.layout.slices().items():
        yield f"{PARAMS}{name}", checkpoint.stream(begin, end, shapes[name])
        for slot in checkpoint.slot_names:
            yield f"{SLOTS}{slot}/{name}", checkpoint.stream(begin, end, shapes[name], slot)
    for name in checkpoint.tables:
        for column, array in checkpoint.columns(name).items():
            yield f"{TABLES}{name}/{column}", array


def _average(checkpoint: Checkpoint, arrays: Mapping[str, Stream]) -> Iterator[tuple[str, Stream]]:
    """Yield the average of each array by its name."""
    if EMA not in checkpoint.slot_names:
        raise UserError(f"{checkpoint.path} without an average", "a run with --ema")
    first = f"{SLOTS}{EMA}/"
    for name, array in arrays.items():
        if name.startswith(first):
            yield name.removeprefix(first), array


Named = Iterable[tuple[str, Stream]]


def _parameters(arrays: Mapping[str, Stream]) -> dict[str, Stream]:
    """Return all parameters by name, and the values of rows."""
    found = {k.removeprefix(PARAMS): a for k, a in arrays.items() if k.startswith(PARAMS)}
    return found | {name: a for name, a in arrays.items() if VALUES.fullmatch(name)}


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
    """Write arrays of the types in `TYPES` to a ``.safetensors``, as its own library orders them.

    References: https://github.com/huggingface/safetensors, section "Format".
    """
    ordered = sorted(arrays, key=lambda named: (-named[1].dtype.itemsize, named[0]))
    head, at = dict[str, object](), 0
    for name, array in ordered:
        ends = [at, at + array.nbytes]
        head[name] = {"dtype": TYPES[array.dtype.name], "shape": array.shape, "data_offsets": ends}
        at = ends[1]
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            for buffer in array.buffers():
                file.write(buffer)


def _write_pt(path: Path, arrays: Named) -> None:
    torch = extras.load("torch", "PyTorch", "torch", "writes .pt files")
    torch.save({name: torch.from_numpy(array.whole()) for name, array in arrays}, path)


def _write_parquet(checkpoint: Checkpoint, table: str, path: Path, _: Named) -> None:
    """Write a table: a list of values a row."""
    parquet = extras.load("pyarrow.parquet", "pyarrow", "parquet", "writes Parquet files")
    pa = extras.load("pyarrow", "pyarrow", "parquet", "writes Parquet files")
    dim = int(checkpoint.tables[table]["dim"])
    kind = pa.from_numpy_dtype(np.dtype(checkpoint.dtype))
    schema = pa.schema([(ROWS, pa.int64()), ("params", pa.list_(kind, dim))])
    with parquet.ParquetWriter(path, schema) as file:
        for piece in checkpoint.read_table(table):
            values = pa.FixedSizeListArray.from_arrays(piece.params.reshape(-1), dim)
            file.write_table(pa.table({ROWS: piece.rows, "params": values}))


@dataclass(frozen=True)
class Entry:
    """An array in a file.

    Attributes:
        shape: Its shape.
        dtype: What the file calls its type.
        floats: Whether it is one that NumPy has, of floating-point numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    floats: bool


class ParameterFile:
    """A file of named arrays, as parameters of a model. It is opened for each reading.

    Args:
        path: The file; its suffix says how it is read.
        layout: Names and shapes of the model's parameters; the file has each under its name, or
            as ``params/<name>``.
        dtype: Of the run; the file's may be another one.

    Attributes:
        path: The file.
        unused: Names in the file that the model has no parameter for.

    Raises:
        UserError: If the file cannot be read, or a parameter is missing in it, has another shape
            or is of no floating-point type.
    """

    def __init__(self, path: Path, layout: Layout, dtype: np.dtype | str) -> None:
        self.path, self._layout, self._dtype = path, layout, np.dtype(dtype)
        with _opened(path) as (entries, _):
            found = dict(entries)
        self._names = {name: self._entry_of(name, found) for name in layout.names}
        used = set(self._names.values())
        self.unused = [k for k in found if k not in used and not k.startswith(SLOTS)]
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            entry = found[self._names[name]]
            if entry.shape != shape:
                got = f"{path}: {name!r} of shape {entry.shape}"
                raise UserError(got, f"{shape}, as in the model")
            if not entry.floats:
                got = f"{path}: {name!r} of type {entry.dtype}"
                raise UserError(got, "float16, float32 or float64", "convert it there")

    @property
    def notes(self) -> list[str]:
        """What to tell of it."""
        return left_out(self.unused, self.path)

    def read_params(
        self, begin: int = 0, end: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read parameters ``[begin, end)`` of the flat vector, as `Checkpoint.read_params` does.

        One array of the file is in memory at a time.

        Raises:
            UserError: If the file cannot be read, or an element is not finite.
        """
        end = self._layout.size if end is None else end
        if out is None:
            out = np.empty(end - begin, self._dtype)
        with _opened(self.path) as (_, read):
            for name, (first, last) in self._layout.slices().items():
                low, high = max(begin, first), min(end, last)
                if low < high:
                    part = out[low - begin : high - begin]
                    part[:] = read(self._names[name]).reshape(-1)[low - first : high - first]
                    if not np.isfinite(part).all():
                        got = f"{self.path}: NaN or infinity in {name!r}"
                        raise UserError(got, "finite parameters")
        return out

    def _entry_of(self, name: str, found: dict[str, Entry]) -> str:
        for key in (name, f"{PARAMS}{name}"):
            if key in found:
                return key
        expected = "an array for each parameter of the model"
        raise UserError(f"{self.path} without {name!r}", expected, nearest(name, found))


def left_out(unused: Sequence[str], source: object) -> list[str]:
    """Return what to tell of arrays that the model has no parameter for."""
    return [f"not in the model, left out of {source}: {listed(unused, SHOWN)}"] if unused else []


Opened = tuple[dict[str, Entry], Callable[[str], np.ndarray]]


@contextmanager
def _opened(path: Path) -> Iterator[Opened]:
    """Open a file; yields what is in it, and what reads an array of it.

    Raises:
        UserError: Whatever goes wrong in the block, as with a file that is cut off.
    """
    tensors = path.suffix == SAFETENSORS
    if tensors:  # its functions for NumPy are a module of their own
        reads = ("safetensors", "torch", "reads .safetensors files")
        module = [extras.load(name, *reads) for name in ("safetensors.numpy", "safetensors")][1]
    try:
        if tensors:
            with module.safe_open(path, framework="numpy") as file:
                yield _tensors(file)
        else:
            with zipfile.ZipFile(path) as archive:
                yield _npz(archive)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"cannot read {path}: {reason}", f"a whole {path.suffix} file") from None


def _npz(archive: zipfile.ZipFile) -> Opened:
    entries = {}
    for name in archive.namelist():
        with archive.open(name) as file:
            first = np.lib.format.read_magic(file) == (1, 0)
            form = np.lib.format
            read_header = form.read_array_header_1_0 if first else form.read_array_header_2_0
            shape, _, dtype = read_header(file)
        entries[name.removesuffix(".npy")] = Entry(shape, str(dtype), dtype.kind == "f")

    def read(name: str) -> np.ndarray:
        with archive.open(f"{name}.npy") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return entries, read


def _tensors(file: Any) -> Opened:
    entries = {}
    for name in file.keys():  # noqa: SIM118  (the file is no mapping)
        part = file.get_slice(name)
        dtype = part.get_dtype()
        entries[name] = Entry(tuple(part.get_shape()), dtype, dtype in ("F16", "F32", "F64"))
    return entries, file.get_tensor
