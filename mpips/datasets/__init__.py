"""Datasets: a reader for each format, and one function for all.

`open_dataset` takes a name or a path from the configuration, and returns training and held-out
samples. The file's suffix determines its format; a file with an unknown suffix may be IDX.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np

from mpips.config import Config
from mpips.config.names import SPARSE_PROBLEMS
from mpips.datasets.base import Batch, DataInfo, Dataset, Source, iterate
from mpips.datasets.csr import IDS, SparseSource
from mpips.datasets.files import Files, find_files, parts
from mpips.datasets.index import Counted, Entry, FileInfo, stamps_of
from mpips.datasets.labels import Parts, check_targets
from mpips.datasets.order import SPLIT, shuffled
from mpips.datasets.table import HASHED, Table, check_file, reading
from mpips.errors import UserError, listed, nearest

__all__ = [
    "Batch", "Counted", "DataInfo", "Dataset", "Entry", "Files", "Parts", "Source", "count_file",
    "describe", "find_many", "iterate", "make_dataset", "open_dataset", "open_parts",
]  # fmt: skip

BUILT_IN = {"digits": "built_in.open_digits", "spirals": "built_in.open_spirals"}
IDX, NPY, NPZ = "arrays.open_idx", "arrays.open_npy", "arrays.open_npz"
HDF5, IMAGES, TAR = "hdf5.Hdf5Table", "images.ImageTable", "tar.TarTable"
LIBSVM, CSV, PARQUET = "libsvm.open_libsvm", "columns.CsvTable", "columns.ParquetTable"
READERS = {
    ".h5": HDF5,
    ".hdf5": HDF5,
    ".npy": NPY,
    ".npz": NPZ,
    ".svm": LIBSVM,
    ".libsvm": LIBSVM,
    ".svmlight": LIBSVM,
    ".parquet": PARQUET,
    ".csv": CSV,
    ".tar": TAR,
    ".txt": LIBSVM,
}
SPARSE = "libsvm.open_sparse"
# Readers of problems with sparse inputs.
SPARSELY = {LIBSVM: SPARSE, CSV: "columns.HashedCsvTable", PARQUET: "columns.HashedParquetTable"}
READ_IN_PARTS = (HDF5, TAR, CSV, PARQUET, *SPARSELY.values())
NAMES_SHOWN = 10  # names of classes in a note
FORMATS = f"{', '.join(BUILT_IN)}, or a path to {', '.join(READERS)} or IDX files"


def open_dataset(config: Config) -> Dataset:
    """Open the configured data, and check it as far as that is quick.

    All targets are checked (see `mpips.datasets.labels`), and inputs in memory. Inputs of an HDF5
    file are checked when they are read.

    The held-out samples are those of `config.test_dataset`, or MNIST's own. Otherwise they are a
    random subset of data in memory, always the same one, or the end of an HDF5 file. Training and
    held-out samples are numbered separately, each from 0.

    Args:
        config: The fields dataset, test_dataset, test_fraction, problem, classes, scale, dtype and
            batch_size are used.

    Raises:
        UserError: If a file is missing, damaged or of an unknown format; if its arrays do not fit
            together; if a label is outside the classes or an obvious mistake; if a number is not
            finite; if a batch is larger than the training data. It names the file and the array.
    """
    parts = open_parts(config)
    try:
        return make_dataset(config, parts, describe(config, parts))
    except BaseException:
        parts.close()
        raise


def find_many(config: Config) -> dict[str, Files]:
    """Return the files of the configured data by option, for each dataset of many files.

    A single file that is read in parts counts as many, except for HDF5, which need not be counted.

    Raises:
        UserError: As `open_dataset`, if a pattern matches no file.
    """
    found = {}
    for option in ("dataset", "test_dataset"):
        name = getattr(config, option)
        if not name or name in BUILT_IN:
            continue
        path, _, arrays = name.partition("::")
        path = os.path.expanduser(path)
        format_of = partial(_format, sparse=config.problem in SPARSE_PROBLEMS or arrays == "sparse")
        if os.path.isdir(path):
            files = _reader("images.find_classes")(name)
        else:
            files = find_files(name, format_of)
        reader = format_of(path)
        if files is None and reader in READ_IN_PARTS and reader != HDF5:
            files = Files(name, (path,), arrays, reader)
        if files is not None:
            found[option] = files
    return found


def count_file(files: Files, path: str) -> Entry:
    """Return the entry of one file of many: its contents, and the stamps that identify it.

    Raises:
        UserError: If it is missing or damaged, or lacks the named arrays.
    """
    stamps, held = stamps_of(path), None
    if files.reader == IMAGES:
        held = _reader("images.count_images")(path, files.arrays)
    elif files.reader in READ_IN_PARTS:
        with closing(_reader(files.reader)(path, files.arrays)) as table:
            held = FileInfo.of(table)
    return Entry(path, stamps, held)


def open_parts(config: Config, counted: Mapping[str, Counted] | None = None) -> Parts:
    """Open the files of the configured data, without reading a sample: step 1 of `open_dataset`.

    Args:
        config: See `open_dataset`.
        counted: Counted files by option, for datasets of many files; None to find and count them.

    Raises:
        UserError: As `open_dataset`.
    """
    if counted is None:
        counted = {
            option: Counted(files, [count_file(files, path) for path in files.paths])
            for option, files in find_many(config).items()
        }
    with ExitStack() as opened:

        def tables(option: str) -> list[Table]:
            many = counted.get(option)
            opened_tables = [_open_many(many)] if many else _open_tables(getattr(config, option))
            for table in opened_tables:
                opened.callback(table.close)
            return opened_tables

        train, *others = tables("dataset")
        if config.test_dataset:
            others = tables("test_dataset")[-1:]  # the test images of a folder of MNIST
        if others:
            train.match(others[0])
            parts = Parts(train, range(train.n), others[0], range(others[0].n))
        else:
            parts = Parts(train, *_split(train, config.test_fraction))
        opened.pop_all()
    return parts


def describe(config: Config, parts: Parts, strict: bool = True) -> DataInfo:
    """Check the targets and describe the data, on one rank for all: step 2 of `open_dataset`.

    Args:
        config: See `open_dataset`.
        parts: The open files.
        strict: Whether to refuse labels that are an obvious mistake; else they are only noted.

    Raises:
        UserError: As `open_dataset`.
    """
    n_train, train = len(parts.rows), parts.train
    if config.batch_size > n_train:
        expected = f"at most {n_train}, the training samples of {config.dataset}"
        raise UserError(f"batch_size={config.batch_size}", expected, "use a smaller --batch-size")
    names = [f"{k} {name}" for k, name in enumerate(train.class_names)]
    hashed = train.x.name == HASHED
    info = DataInfo(
        name=config.dataset if config.dataset in BUILT_IN else Path(train.path).name,
        n_train=n_train,
        n_test=len(parts.test_rows),
        x_shape=(IDS,) if hashed else train.x_shape,
        y_shape=train.y.shape[1:],
        classes=None,
        source=config.dataset,
        notes=(f"classes: {listed(names, NAMES_SHOWN)}",) if names else (),
        class_names=train.class_names,
        sparse=train.sparse or hashed,
    )
    return check_targets(info, parts, config.classes, strict)


def make_dataset(config: Config, parts: Parts, info: DataInfo) -> Dataset:
    """Check data in memory, and return the samples: step 3 of `open_dataset`.

    Raises:
        UserError: As `open_dataset`.
    """
    for table in parts.tables:
        if table.in_memory:
            whole = Source(table, info, range(table.n), config.scale)
            whole.check(np.dtype(config.dtype))
    make = SparseSource if info.sparse else Source
    train = make(parts.train, info, parts.rows, config.scale)
    test = make(parts.test, info, parts.test_rows, config.scale) if info.n_test else None
    return Dataset(info, train, test)


def _open_tables(name: str) -> list[Table]:
    """Open the file of a dataset, or both parts of a folder with MNIST's files."""
    if name in BUILT_IN:
        return [_reader(BUILT_IN[name])()]
    path = ",".join(map(os.path.expanduser, parts(name)))
    files = _reader("arrays.find_mnist")(path) if os.path.isdir(path) else [path]
    return [_open_table(file) for file in files]


def _open_many(counted: Counted) -> Table:
    files, paths = counted.files, counted.files.paths
    if files.reader == LIBSVM:
        return _reader("libsvm.LibsvmTable")(files.title, paths)
    if files.reader == SPARSE:
        known = [counted.places_of(number) for number in range(len(paths))]
        with reading(files.title, "text"):  # the file of positions may be damaged or outdated
            return _reader("libsvm.SparseTable")(files.title, paths, known)
    held = [entry.held for entry in counted.entries if entry.held is not None]
    if files.reader == IMAGES:
        return _reader(IMAGES)(files, held)
    many = _reader("many.ManyTable")
    if held:
        open_file = _reader("hdf5.Hdf5OfMany" if files.reader == HDF5 else files.reader)
        places = counted.places_of
        return many(files, held, lambda k: open_file(paths[k], files.arrays, places(k)), False)
    tables = [_reader(files.reader)(path, files.arrays) for path in paths]
    return many(files, [FileInfo.of(table) for table in tables], tables.__getitem__, True)


def _format(path: str, sparse: bool = False) -> str:
    """Return the name of a file's reader, by its suffix and by whether inputs are sparse."""
    reader = READERS.get(_suffix(path), IDX)
    return SPARSELY.get(reader, reader) if sparse else reader


def _suffix(path: str) -> str:
    """Return the suffix that determines the format of a path, or of its first file; "" if none."""
    suffixes = Path(parts(path)[0]).suffixes
    known = [s.lower() for s in suffixes[-2:] if s.lower() in READERS]
    return known[-1] if known else ""


def _open_table(name: str) -> Table:
    path, mark, arrays = name.partition("::")
    if _suffix(path):
        return _reader(_format(path))(path, arrays)
    first = parts(path)[0]
    if not (mark or os.path.exists(first) or os.sep in path or "," in path or "ubyte" in path):
        remedy = nearest(name, BUILT_IN) or "check the path"
        raise UserError(f"unknown dataset {name!r}", f"one of {FORMATS}", remedy)
    check_file(first)
    if not _reader("arrays.is_idx")(first):
        remedy = "name it so, or store it as np.savez('data.npz', x=..., y=...) does"
        raise UserError(f"{first} is of no known format", f"one of {FORMATS}", remedy)
    return _reader(IDX)(path, arrays)


def _reader(name: str) -> Callable:
    """Import the function of a format when needed: h5py alone takes a quarter of a second."""
    module, _, function = name.partition(".")
    return getattr(import_module(f"{__name__}.{module}"), function)


def _split(table: Table, fraction: float) -> tuple[range | np.ndarray, Table, range | np.ndarray]:
    """Return the rows of training, the table and rows of testing; rows in the file's order."""
    if fraction and table.n < 2:
        raise UserError(f"{table.path} has 1 sample", "at least 2, to hold one out")
    n_test = min(max(1, round(table.n * fraction)), table.n - 1) if fraction else 0
    n_train = table.n - n_test
    if not table.in_memory or not n_test:
        return range(n_train), table, range(n_train, table.n)
    mixed = shuffled(table.n, SPLIT)
    return np.sort(mixed[n_test:]), table, np.sort(mixed[:n_test])
