"""Datasets: a reader a format, one way to open them all.

`open_dataset` takes a name or a path from the configuration and returns training and held-out
samples. Formats are told by the file's suffix; a file without a known one may be IDX.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpips.datasets.base import (
    Batch,
    DataInfo,
    Dataset,
    Source,
    iterate,
)
from mpips.datasets.order import SPLIT, shuffled
from mpips.datasets.table import Table, check_file
from mpips.errors import UserError, nearest

if TYPE_CHECKING:
    from mpips.config import Config

__all__ = ["Batch", "DataInfo", "Dataset", "Source", "iterate", "open_dataset"]

BUILT_IN = {"digits": "digits.open_digits", "spirals": "spirals.open_spirals"}
READERS = {
    ".h5": "hdf5.open_hdf5",
    ".hdf5": "hdf5.open_hdf5",
    ".npy": "numpy_files.open_npy",
    ".npz": "numpy_files.open_npz",
    ".svm": "libsvm.open_libsvm",
    ".libsvm": "libsvm.open_libsvm",
    ".svmlight": "libsvm.open_libsvm",
    ".txt": "libsvm.open_libsvm",
}
IDX = "idx.open_idx"
FORMATS = f"{', '.join(BUILT_IN)}, or a path to {', '.join(READERS)} or IDX files"


def open_dataset(config: "Config") -> Dataset:
    """Open the configured data, and check it as far as that is quick.

    Data in memory is checked wholly. Of an HDF5 file only integer labels are read, and only
    where the number of classes is to be inferred; the rest is checked as it is read.

    The held-out samples are `config.test_dataset`, or MNIST's own; otherwise a random subset of
    data in memory, always the same one, or the tail of an HDF5 file. Sample numbers count from
    0 in the training samples and in the held-out ones.

    Args:
        config: Its fields dataset, test_dataset, test_fraction, classes, scale, dtype and
            batch_size are used.

    Raises:
        UserError: If a file is missing, damaged or of no known format, if its arrays do not fit
            together, if a label is outside the classes or a number is not finite, or if a batch
            is larger than the training data. It names the file and the array.
    """
    with ExitStack() as opened:
        train, test = _open_tables(config.dataset, opened)
        if config.test_dataset:
            test, _ = _open_tables(config.test_dataset, opened)
        if test is not None:
            train.match(test)
        dataset = _split(config, train, test)
        if config.batch_size > dataset.info.n_train:
            raise UserError(
                f"batch_size={config.batch_size}",
                f"at most {dataset.info.n_train}, the training samples of {config.dataset}",
                "use a smaller --batch-size",
            )
        opened.pop_all()
    return dataset


def _open_tables(name: str, opened: ExitStack) -> tuple[Table, Table | None]:
    """Open a dataset's file or, of a folder with MNIST's files, both of its parts."""
    name = os.path.expanduser(name)
    is_folder = name not in BUILT_IN and os.path.isdir(name)
    paths = _reader("idx.find_mnist")(name) if is_folder else (name,)
    tables: list[Table] = []
    for path in paths:
        tables.append(_open_table(path))
        opened.callback(tables[-1].close)
    return tables[0], tables[1] if len(tables) > 1 else None


def _open_table(name: str) -> Table:
    if name in BUILT_IN:
        return _reader(BUILT_IN[name])()
    path, mark, arrays = name.partition("::")
    suffixes = Path(path.partition(",")[0]).suffixes
    known = [s.lower() for s in suffixes[-2:] if s.lower() in READERS]
    if known:
        return _reader(READERS[known[-1]])(path, arrays)
    first = path.partition(",")[0]
    if not (mark or os.path.exists(first) or os.sep in path or "," in path or "ubyte" in path):
        raise UserError(
            f"unknown dataset {name!r}",
            f"one of {FORMATS}",
            nearest(name, BUILT_IN) or "check the path",
        )
    check_file(first)
    if not _reader("idx.is_idx")(first):
        remedy = "name it so, or store it as np.savez('data.npz', x=..., y=...) does"
        raise UserError(f"{first} is of no known format", f"one of {FORMATS}", remedy)
    return _reader(IDX)(path, arrays)


def _reader(name: str) -> Callable:
    """Import a format's function when it is needed: h5py alone takes a quarter of a second."""
    module, _, function = name.partition(".")
    return getattr(import_module(f"{__name__}.{module}"), function)


def _split(config: "Config", train: Table, test: Table | None) -> Dataset:
    tables = [train] if test is None else [train, test]
    n_test = _count_test(train, config.test_fraction) if test is None else test.n
    n_train = train.n - n_test if test is None else train.n
    classes = _classes(tables, config.classes)
    info = DataInfo(
        name=config.dataset if config.dataset in BUILT_IN else Path(train.path).name,
        n_train=n_train,
        n_test=n_test,
        x_shape=train.x_shape,
        y_shape=train.y.shape[1:] if classes is None else (),
        classes=classes,
        source=config.dataset,
        remark="" if test is not None or config.classes or not classes else _remark(train, n_train),
    )
    for table in tables:
        if table.in_memory:
            whole = Source(table, info, range(table.n), config.scale)
            whole.check(np.dtype(config.dtype))
    if test is not None:
        sources = [Source(t, info, range(t.n), config.scale) for t in tables]
    else:
        parts = _rows(train, n_test)
        sources = [Source(train, info, rows, config.scale) for rows in parts if len(rows)]
    return Dataset(info, sources[0], sources[1] if n_test else None)


def _count_test(table: Table, fraction: float) -> int:
    if fraction == 0:
        return 0
    if table.n < 2:
        raise UserError(f"{table.path} has 1 sample", "at least 2, to hold one out")
    return min(max(1, round(table.n * fraction)), table.n - 1)


def _rows(table: Table, n_test: int) -> tuple[range | np.ndarray, range | np.ndarray]:
    """Return the rows to train on and those to test on, each in the order of the file."""
    n_train = table.n - n_test
    if not table.in_memory or not n_test:
        return range(n_train), range(n_train, table.n)
    mixed = shuffled(table.n, SPLIT)
    return np.sort(mixed[n_test:]), np.sort(mixed[:n_test])


def _remark(table: Table, n_train: int) -> str:
    """Tell if the tail of a file, which is held out, has a class that the rest has not."""
    if table.in_memory:  # held out at random
        return ""
    tail = {k for _, labels in _labels(table, n_train, table.n) for k in np.unique(labels).tolist()}
    alone, last = set(tail), table.n - 1
    for _, labels in _labels(table, 0, n_train):
        if not alone:  # at once, where the file is mixed
            break
        alone.difference_update(np.unique(labels).tolist())
    if not alone:
        return ""
    return (
        f"samples {n_train:,} to {last:,} are held out, and {len(alone)} of their {len(tail)} "
        "classes are not in the rest: shuffle the file, or give another for testing"
    )


def _labels(table: Table, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the labels of some samples in pieces, each with the number of its first sample."""
    step = 1 << 20
    for at in range(begin, end, step):
        yield at, table.read_y(at, min(at + step, end))


def _classes(tables: list[Table], wanted: int) -> int | None:
    """Return the number of classes, None for real-valued targets."""
    whole = all(table.y.dtype.kind in "bui" for table in tables)
    if not wanted and not whole:
        return None
    for table in tables:
        if table.y.shape[1:] not in ((), (1,)):
            raise UserError(
                f"{table.path}: array {table.y.name!r} has shape {table.y.shape}, "
                f"dtype {table.y.dtype}",
                "one class number a sample, or targets of a floating-point type",
                "store it as (n,) integers, or as floats without --classes",
            )
    return wanted or max(_highest_label(table) for table in tables) + 1


def _highest_label(table: Table) -> int:
    highest = 0
    for begin, labels in _labels(table, 0, table.n):
        if labels.dtype.kind == "i" and labels.min() < 0:
            sample = begin + int(np.argmax(labels.reshape(-1) < 0))
            raise UserError(
                f"{table.path}: array {table.y.name!r}, sample {sample} has label "
                f"{labels.reshape(-1)[sample - begin]}",
                "class numbers from 0",
                "store real-valued targets as floats",
            )
        highest = max(highest, int(labels.max()))
    return highest
