"""Parameter files of other programs: ``.npz``, ``.safetensors``, ``.pt``, ``.parquet``.

`export` writes a checkpoint to any of these formats. A run can start from the first two. A ``.pt``
file is never read: with some versions of PyTorch, unpickling runs code that is in the file.

In ``.npz`` and ``.safetensors``, an array's shape precedes its elements. So `export` writes them
with only a piece of an array in memory.
"""

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from mpips import extras
from mpips.checkpoint.files import NPZ, PT, SAFETENSORS, pieces, write_durably
from mpips.checkpoint.reader import Checkpoint, need_average
from mpips.checkpoint.rows import COLUMNS, ROWS, Stream
from mpips.config.names import EMA
from mpips.errors import UserError, listed, nearest, unknown
from mpips.layout import Layout

PARQUET = ".parquet"
TABLES = "tables/"
VALUES = re.compile(rf"({TABLES}[^/]+/)?(rows|params)")  # datasets of a table, without its slots
PARAMS, SLOTS = "params/", "slots/"  # prefixes in an exported npz; other programs use plain names
SHOWN = 5  # names in a note
ALIGNED = 8  # the header of a ``.safetensors`` is padded to a multiple of so many bytes
TYPES = {"float32": "F32", "float64": "F64", "int64": "I64"}  # names of types in ``.safetensors``


def export(checkpoint: Checkpoint, output: Path, table: str = "", average: bool = False) -> None:
    """Write a checkpoint's parameters, or one of its tables, to a file of another format.

    An ``.npz`` has the optimizer's slots too; the other formats have the parameters by name. A
    table has only its changed rows: their numbers in ``rows``, and their values in ``params``. One
    piece of an array is in memory at a time, but for a ``.pt`` all arrays are. After an error no
    incomplete file is left.

    Args:
        checkpoint: The checkpoint.
        output: The file; its suffix selects the format.
        table: Name of the table; empty for parameters and all tables.
        average: Whether to write the parameters' moving average in their place, without slots.
            Rows of tables have none, and are written as they are.

    Raises:
        UserError: If there is no such table or average, the suffix is unknown, the package for it
            is missing, the checkpoint cannot be read, or the file cannot be written.
    """
    if table and table not in checkpoint.tables:
        raise unknown("table", table, tuple(checkpoint.tables))
    if table and average:
        got = f"average of table {table!r}"
        raise UserError(got, "none: it has only values", "leave out --ema")
    writers = {NPZ: write_npz, SAFETENSORS: write_safetensors}
    writers |= {PARQUET: partial(_write_parquet, checkpoint, table)} if table else {PT: _write_pt}
    if output.suffix not in writers:
        what = f" for table {table!r}" if table else ""
        raise UserError(f"{output}{what}", f"a name that ends in {', '.join(writers)}")
    if average:
        need_average(checkpoint)
    arrays = checkpoint.columns(table) if table else dict(named_streams(checkpoint, average))
    named = arrays if output.suffix == NPZ else _parameters(arrays)
    write_durably(output, lambda path: writers[output.suffix](path, named.items()))


def named_streams(checkpoint: Checkpoint, average: bool) -> Iterator[tuple[str, Stream]]:
    """Yield all arrays of a checkpoint with their names, or with `average` those of `export`.

    The names are ``params/<name>`` and ``slots/<slot>/<name>``, then ``tables/<table>/rows``,
    ``tables/<table>/params`` and ``tables/<table>/slots/<slot>`` with a table's changed rows.
    """
    read = partial(checkpoint.read_slot, EMA) if average else checkpoint.read_params
    shapes = dict(zip(checkpoint.layout.names, checkpoint.layout.shapes, strict=True))
    for name, (begin, end) in checkpoint.layout.slices().items():
        where = begin, end, shapes[name], checkpoint.dtype
        yield f"{PARAMS}{name}", _stream(read, *where)
        for slot in () if average else checkpoint.slot_names:
            yield f"{SLOTS}{slot}/{name}", _stream(partial(checkpoint.read_slot, slot), *where)
    for name in checkpoint.tables:
        for column, array in checkpoint.columns(name).items():
            if column in COLUMNS or not average:
                yield f"{TABLES}{name}/{column}", array


Read = Callable[[int, int], np.ndarray]  # returns a range of a vector


def _stream(read: Read, begin: int, end: int, shape: tuple[int, ...], dtype: np.dtype) -> Stream:
    """Return elements ``[begin, end)`` of the parameters or of a slot, read in pieces by `read`."""
    return Stream(shape, dtype, lambda: starmap(read, pieces(begin, end, dtype.itemsize)))


Named = Iterable[tuple[str, Stream]]


def _parameters(arrays: Mapping[str, Stream]) -> dict[str, Stream]:
    """Return all parameters by name, and the numbers and values of tables' rows."""
    dense = {k.removeprefix(PARAMS): a for k, a in arrays.items() if k.startswith(PARAMS)}
    return dense | {name: a for name, a in arrays.items() if VALUES.fullmatch(name)}


def write_npz(path: Path, arrays: Named) -> None:
    """Write arrays to an ``.npz`` file, one after another."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays:
            head = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, head)
                for buffer in array.buffers():
                    entry.write(buffer)


def write_safetensors(path: Path, arrays: Named) -> None:
    """Write arrays of the types in `TYPES` to a ``.safetensors`` file, in its library's order.

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
    tensors = {name: torch.from_numpy(array.whole()) for name, array in arrays}
    try:
        torch.save(tensors, path)
    except RuntimeError as problem:  # if the file cannot be written
        raise OSError(str(problem)) from None


def _write_parquet(checkpoint: Checkpoint, table: str, path: Path, _: Named) -> None:
    """Write a table to a Parquet file, with a row's values as a list."""
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
        shape: Shape of the array.
        dtype: Name of its type in the file.
        floats: Whether NumPy has this type, and it is a floating-point one.
    """

    shape: tuple[int, ...]
    dtype: str
    floats: bool


class ParameterFile:
    """Parameters of a model in a file of named arrays, which is opened for each read.

    Args:
        path: The file; its suffix selects the format.
        layout: Names and shapes of the model's parameters. The file has each under its name, or as
            ``params/<name>``.
        dtype: Dtype of the run; the file may have another one.

    Attributes:
        path: The file.
        unused: Names in the file that the model has no parameter for.

    Raises:
        UserError: If the file cannot be read, or a parameter is missing in it, has another shape,
            or has no floating-point type.
    """

    def __init__(self, path: Path, layout: Layout, dtype: np.dtype | str) -> None:
        self.path, self._layout, self._dtype = path, layout, np.dtype(dtype)
        with _opened(path) as (entries, _):
            self._names = {name: self._entry_of(name, entries) for name in layout.names}
        used = set(self._names.values())
        self.unused = [k for k in entries if k not in used and not k.startswith(SLOTS)]
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            entry = entries[self._names[name]]
            if entry.shape != shape:
                got = f"{path}: {name!r} of shape {entry.shape}"
                raise UserError(got, f"{shape}, as in the model")
            if not entry.floats:
                got = f"{path}: {name!r} of type {entry.dtype}"
                raise UserError(got, "float16, float32 or float64", "convert it there")

    @property
    def notes(self) -> list[str]:
        """Messages about the file, for the user."""
        return left_out(self.unused, self.path)

    def read_params(
        self, begin: int = 0, end: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read parameters ``[begin, end)`` of the flat vector, as `Checkpoint.read_params` does.

        Only one array of the file is in memory at a time.

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

    def _entry_of(self, name: str, entries: dict[str, Entry]) -> str:
        for key in (name, f"{PARAMS}{name}"):
            if key in entries:
                return key
        expected = "an array for each parameter of the model"
        raise UserError(f"{self.path} without {name!r}", expected, nearest(name, entries))


def left_out(unused: Sequence[str], source: object) -> list[str]:
    """Return a message that names the arrays without a parameter in the model; [] for none."""
    return [f"not in the model, left out of {source}: {listed(unused, SHOWN)}"] if unused else []


Opened = tuple[dict[str, Entry], Callable[[str], np.ndarray]]


@contextmanager
def _opened(path: Path) -> Iterator[Opened]:
    """Open a file; yields its entries by name, and a function that reads one array.

    Raises:
        UserError: At any error in the block, such as a truncated file.
    """
    tensors = path.suffix == SAFETENSORS
    if tensors:  # safetensors.numpy must be imported too
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
    for name in file.keys():  # noqa: SIM118  (the file is not iterable)
        part = file.get_slice(name)
        dtype = part.get_dtype()
        entries[name] = Entry(tuple(part.get_shape()), dtype, dtype in ("F16", "F32", "F64"))
    return entries, file.get_tensor
