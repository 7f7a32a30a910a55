"""One table's rows in a file that other programs read: ``.npz``, ``.parquet``, ``.safetensors``.

All have the rows that were changed, by their numbers. A piece of them is in memory at a time.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpips import extras
from mpips.checkpoint.exchange import NPZ, SAFETENSORS
from mpips.checkpoint.files import write_durably
from mpips.checkpoint.reader import Checkpoint
from mpips.checkpoint.rows import ROWS
from mpips.checkpoint.shards import PARAMS
from mpips.checkpoint.stream import write_npz, write_safetensors
from mpips.errors import UserError, unknown

PARQUET = ".parquet"


def export_table(checkpoint: Checkpoint, name: str, output: Path) -> None:
    """Write a table to a file, whole or not at all.

    ``rows`` has the numbers of rows, and ``params`` their values. An ``.npz`` has the rule's slots
    as well, as ``slots/<slot>``; ``.parquet`` a list of values a row.

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
    return lambda path: write_npz(path, checkpoint.columns(name).items())


def _safetensors(checkpoint: Checkpoint, name: str) -> Callable[[Path], None]:
    columns = checkpoint.columns(name)
    return lambda path: write_safetensors(path, [(c, columns[c]) for c in (ROWS, PARAMS)])


def _parquet(checkpoint: Checkpoint, name: str) -> Callable[[Path], None]:
    parquet = extras.load("pyarrow.parquet", "pyarrow", "parquet", "writes Parquet files")
    pa = extras.load("pyarrow", "pyarrow", "parquet", "writes Parquet files")
    dim = int(checkpoint.tables[name]["dim"])
    kind = pa.from_numpy_dtype(np.dtype(checkpoint.dtype))
    schema = pa.schema([(ROWS, pa.int64()), (PARAMS, pa.list_(kind, dim))])

    def write(path: Path) -> None:
        with parquet.ParquetWriter(path, schema) as file:
            for piece in checkpoint.read_table(name):
                values = pa.FixedSizeListArray.from_arrays(piece.params.reshape(-1), dim)
                file.write_table(pa.table({ROWS: piece.rows, PARAMS: values}))

    return write
