"""Columns of tables as arrays of numbers, by pyarrow: what Parquet and CSV files share.

``::a,b,c,label`` names columns: the last has the targets, the others the inputs. One column of
inputs may be of lists of one length.
"""

import csv
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpips import extras
from mpips.datasets.hashed import ids_of
from mpips.datasets.table import Table, no_numbers
from mpips.errors import UserError, nearest

MAX_NAMES_SHOWN = 20


@dataclass(frozen=True)
class Column:
    """A column: its name, the shape of a row of it, its dtype, whether it is read as ids."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    hashed: bool = False


def load(module: str, what: str) -> Any:
    """Import a module of pyarrow.

    Raises:
        UserError: If there is none.
    """
    return extras.load(f"pyarrow{module}", "pyarrow", "parquet", f"reads {what}")


def chosen(path: str, names: str, there: list[str]) -> list[str]:
    """Return the columns that `names` names, at least two.

    Raises:
        UserError: If they are not in the file, or one is named twice.
    """
    shown = ", ".join(there[:MAX_NAMES_SHOWN])
    found = next(csv.reader([names])) if names else []
    if len(found) < 2:
        got = f"columns {names!r} of {path}" if names else f"{path} without names of columns"
        expected = f"inputs and a target among {shown}"
        raise UserError(got, expected, f"write it as {path}::{there[0]},{there[-1]}")
    for name in found:
        if name not in there:
            remedy = nearest(name, there) or "name inputs, then the target"
            raise UserError(f"{path}: column {name!r} is missing", f"one of {shown}", remedy)
        if found.count(name) > 1:
            raise UserError(f"{path}: column {name!r} is named twice", "each once")
        if there.count(name) > 1:
            raise UserError(f"{path} has two columns {name!r}", "one", "rename one of them")
    return found


def column_of(path: str, name: str, kind: Any, length: int) -> Column:
    """Return what a column holds.

    Args:
        path: The file, for messages.
        name: The column's name.
        kind: Its type.
        length: Of its first list, if it holds lists.

    Raises:
        UserError: If it holds no numbers.
    """
    types = load(".types", "columns")
    shape: tuple[int, ...] = ()
    is_fixed = types.is_fixed_size_list(kind)
    if is_fixed or types.is_list(kind) or types.is_large_list(kind):
        shape, kind = (kind.list_size if is_fixed else length,), kind.value_type
    if types.is_dictionary(kind):
        raise no_numbers(path, name, "categories")
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        is_text = types.is_string(kind) or types.is_large_string(kind)
        raise no_numbers(path, name, "text" if is_text else f"values of type {kind}")
    return Column(name, shape, np.dtype(kind.to_pandas_dtype()))


def inputs_of(path: str, columns: list[Column]) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype of a sample's inputs, which several columns make.

    Raises:
        UserError: If several columns are not of plain numbers.
    """
    if len(columns) == 1:
        return columns[0].shape, columns[0].dtype
    for column in columns:
        if column.shape:
            got = f"{path}: column {column.name!r} of lists beside others"
            raise UserError(got, "one column of lists, or columns of numbers as inputs")
    return (len(columns),), np.result_type(*(column.dtype for column in columns))


def numbers(path: str, column: Column, values: Any, first: int) -> np.ndarray:
    """Return a column's values, shape (n, *column.shape).

    Args:
        path: The file, for messages.
        column: The column.
        values: An Arrow array.
        first: Row of the first value, for messages.

    Raises:
        UserError: If one is missing, or a list is of another length; it names the row.
    """
    where = f"{path}: column {column.name!r}"
    if column.hashed:
        return ids_of(column.name, values).astype(column.dtype)
    if values.null_count:
        row = first + int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise _missing(where, row)
    if not column.shape:
        return np.asarray(values.to_numpy(zero_copy_only=False), column.dtype)
    (size,) = column.shape
    if hasattr(values, "value_lengths"):
        lengths = values.value_lengths().to_numpy(zero_copy_only=False)
        if (lengths != size).any():
            at = int(np.argmax(lengths != size))
            got = f"{where}, sample {first + at} has {lengths[at]} values"
            raise UserError(got, f"{size}, as the first", "leave it out")
    flat = values.flatten()
    if flat.null_count:
        at = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
        raise _missing(where, first + at // size)
    return np.asarray(flat.to_numpy(zero_copy_only=False), column.dtype).reshape(-1, size)


def one_by_one(table: Table, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of scattered rows, each read by itself."""
    wanted, places = np.unique(rows, return_inverse=True)
    pairs = [(table.read_x(row, row + 1), table.read_y(row, row + 1)) for row in wanted.tolist()]
    x, y = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return x[places], y[places]


def _missing(where: str, row: int) -> UserError:
    return UserError(f"{where}, sample {row} has no value", "a number", "leave it out, or fill it")
