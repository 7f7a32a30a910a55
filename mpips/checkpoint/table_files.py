"""One table's rows in a file that other programs read: ``.npz``, ``.parquet``, ``.safetensors``.

All have the rows that were changed, by their numbers. But for ``.safetensors`` a piece of them is
in memory at a time.
"""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpips import extras
from mpips.checkpoint.exchange import NPZ, SAFETENSORS, safetensors_writer
from mpips.checkpoint.files import write_durably
from mpips.checkpoint.nearest import words_of
from mpips.checkpoint.reader import Checkpoint
from mpips.checkpoint.rows import ROWS
from mpips.checkpoint.shards import PARAMS
from mpips.errors import UserError, unknown

PARQUET = ".parquet"


def export_table(checkpoint: Checkpoint, name: str, output: Path) -> None:
    """Write a table to a file, whole or not at all.

    ``rows`` has the numbers of rows, and ``params`` their values. An ``.npz`` has the rule's slots
    as well, as ``slots/<slot>``; ``.parquet`` a list of values a row, and the ``word`` where rows
    are those of words.

    Args:
        checkpoint: What is written.
        name: Of the table.
        output: The file; its suffix says how.

    Raises:
        UserError: If there is no such table, the suffix is none of them, the package for it is
            missing, the checkpoint cannot be read, or the file cannot be written.
    """
    if name not in checkpoint.tables:
        raise unknown("table", name, tuple(checkpoint.tables))
    write = {NPZ: _npz, SAFETENSORS: _safetensors, PARQUET: _parquet}.get(output.suffix)
    if write is None:
        expected = f"a name that ends in {NPZ}, {PARQUET} or {SAFETENSORS}"
        raise UserError(f"{output} for table {name!r}", expected)
    write_durably(output, write(checkpoint, name))


def _npz(checkpoint: Checkpoint, name: str) -> Callable[[Path], None]:
    count = len(checkpoint.read_column(name, ROWS))

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for column in checkpoint.columns(name):
                with archive.open(f"{column}.npy", "w", force_zip64=True) as entry:
                    for number, piece in enumerate(checkpoint.read_table(name)):
                        array = piece.arrays[column]
                        if not number:
                            header = np.lib.format.header_data_from_array_1_0(array)
                            header["shape"] = (count, *array.shape[1:])
                            np.lib.format.write_array_header_1_0(entry, header)
                        entry.write(np.ascontiguousarray(array).data.cast("B"))
                    if not count:
                        np.lib.format.write_array(entry, checkpoint.read_column(name, column))

    return write


def _safetensors(checkpoint: Checkpoint, name: str) -> Callable[[Path], None]:
    read = checkpoint.read_column
    return safetensors_writer(lambda: {column: read(name, column) for column in (ROWS, PARAMS)})


def _parquet(checkpoint: Checkpoint, name: str) -> Callable[[Path], None]:
    parquet = extras.load("pyarrow.parquet", "pyarrow", "parquet", "writes Parquet files")
    pa = extras.load("pyarrow", "pyarrow", "parquet", "writes Parquet files")
    dim, words = int(checkpoint.tables[name]["dim"]), words_of(checkpoint.path)
    kind = pa.from_numpy_dtype(np.dtype(checkpoint.dtype))
    fields = [(ROWS, pa.int64()), *[("word", pa.string())] * bool(words)]
    schema = pa.schema([*fields, (PARAMS, pa.list_(kind, dim))])

    def write(path: Path) -> None:
        with parquet.ParquetWriter(path, schema) as file:
            for piece in checkpoint.read_table(name):
                values = pa.FixedSizeListArray.from_arrays(piece.params.reshape(-1), dim)
                found = {ROWS: piece.rows, PARAMS: values}
                if words:
                    found["word"] = pa.array([words[k] for k in piece.rows.tolist()])
                file.write_table(pa.table(found).select(schema.names))

    return write
