"""Reader of checkpoints: any range of the parameters, for any shards.

Messages:
    epochs 3 on resume: ``--epochs`` is a total. Leave it out, or give more.
    no whole checkpoint in X: Every one is damaged, or none was saved. ``mpips checkpoint verify X``
        says why. Remove the folder and start again.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mpips.checkpoint.files import PathLike, committed, damaged, folder_step, list_checkpoints
from mpips.checkpoint.index import Contents, file_problems, read_index
from mpips.checkpoint.rows import Ordered, RowsFile, Stream, TableRows, Wanted, counted_rows
from mpips.checkpoint.shards import PARAMS, read_shard, slot_dataset
from mpips.config import Config
from mpips.config.names import EMA
from mpips.errors import UserError, unknown
from mpips.layout import Layout

Tables: TypeAlias = Mapping[str, Mapping[str, Any]]  # properties by table


@dataclass(frozen=True, eq=False)
class Checkpoint(Contents):
    """A committed checkpoint. It keeps no file open.

    Attributes:
        path: Folder of the checkpoint.
    """

    path: Path = field(kw_only=True)

    @classmethod
    def of(cls, folder: Path) -> "Checkpoint":
        """Read and check a folder's index, and return the checkpoint.

        Raises:
            UserError: As `read_index`.
        """
        return cls(**vars(read_index(folder)), path=folder)

    def read_params(
        self, begin: int = 0, end: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read parameters ``[begin, end)`` of the flat vector.

        Args:
            begin: First element.
            end: Last element + 1; None for the end of the vector.
            out: Gets the elements, shape (end - begin,), this checkpoint's dtype, contiguous. None
                for a new array.

        Returns:
            `out`, or the new array.

        Raises:
            ValueError: If the range is not within the vector, or `out` has another shape or dtype.
            UserError: If a shard file is missing or does not match its record. Only `verify` finds
                flipped bits in the elements.
        """
        return self._read(PARAMS, begin, end, out)

    def read_slot(
        self, name: str, begin: int = 0, end: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read ``[begin, end)`` of an optimizer slot, as `read_params` does.

        Raises:
            UserError: As `read_params`, and for an unknown slot.
        """
        if name not in self.slot_names:
            raise unknown("slot", name, self.slot_names)
        return self._read(slot_dataset(name), begin, end, out)

    def read_model(self, average: bool, out: np.ndarray | None = None) -> np.ndarray:
        """Read all parameters, or with `average` their moving average, as `read_params` does.

        Raises:
            UserError: As `read_params`, and if the checkpoint has no average.
        """
        if not average:
            return self.read_params(out=out)
        need_average(self)
        return self.read_slot(EMA, out=out)

    def read_worker(self, name: str, worker: int, out: np.ndarray, begin: int = 0) -> None:
        """Read elements of one worker's vector.

        Args:
            name: Name of the vector.
            worker: Number of the worker. In synchronous modes, the rank.
            out: Gets the elements, with the saved dtype.
            begin: First element.

        Raises:
            UserError: If the worker's file is missing or does not match its record.
        """
        read_shard(self.path, self.workers[worker], self.step, name, begin, out)

    def read_workers_share(
        self, name: str, begin: int, out: np.ndarray, shares: int | None = None
    ) -> None:
        """Read an equal share of the sum of all workers' vectors, as at another number of workers.

        Args:
            name: Name of the vectors.
            begin: First element.
            out: Gets the sum divided by `shares`.
            shares: Number of shares; None for the number of workers, which gives the mean.

        Raises:
            UserError: If a worker's file is missing or does not match its record.
        """
        total, vector = np.zeros(out.shape), np.empty_like(out)
        for record in self.workers:
            read_shard(self.path, record, self.step, name, begin, vector)
            total += vector
        out[:] = total / (shares or len(self.workers))

    def read_table(self, name: str, wanted: Wanted | None = None) -> Iterator[TableRows]:
        """Yield the changed rows of a table, piece by piece, in any order, each row once.

        Args:
            name: Name of the table.
            wanted: Returns a mask of the rows to yield, for some numbers of rows. Default: all.

        Raises:
            UserError: If there is no such table, or a file is missing or does not match its record.
        """
        for file in self._row_files(name):
            yield from file.pieces(wanted)

    def ordered_rows(self, name: str) -> list[Ordered]:
        """Return the changed rows of a table, sorted by number within each file, each row once.

        A row takes 16 bytes of memory. Its values stay in the file until they are read.

        Raises:
            UserError: As `read_table`.
        """
        return [file.ordered() for file in self._row_files(name)]

    def count_rows(self, name: str) -> int:
        """Return the number of changed rows of a table; for a chain this reads all row numbers.

        Raises:
            UserError: As `read_table`.
        """
        return sum(file.count for file in self._row_files(name))

    def columns(self, name: str) -> dict[str, Stream]:
        """Return the datasets of a table's changed rows, with all rows in the same order.

        They are ``rows``, ``params`` and ``slots/<slot>``.

        Raises:
            UserError: As `read_table`.
        """
        first, count = RowsFile(self.path, self.rows[0], self.step, name), self.count_rows(name)
        return {
            column: Stream((count, *shape), dtype, partial(self._column, name, column, count))
            for column, (shape, dtype) in first.columns().items()
        }

    def _column(self, name: str, column: str, count: int) -> Iterator[np.ndarray]:
        length = 0
        for file in self._row_files(name):
            for piece in file.column(column):
                length += len(piece)
                if length <= count:
                    yield piece
        if length != count:
            raise damaged(f"{self.path}: {column} of table {name} of length {length}", str(count))

    def _row_files(self, name: str) -> Iterator[RowsFile]:
        """Return the files with a table's changed rows."""
        if name not in self.tables:
            raise unknown("table", name, tuple(self.tables))
        return counted_rows(self.path, self, name)

    def _read(
        self, dataset: str, begin: int, end: int | None, out: np.ndarray | None
    ) -> np.ndarray:
        size = self.layout.size
        end = size if end is None else end
        if not 0 <= begin <= end <= size:
            raise ValueError(f"range [{begin}, {end}), expected within [0, {size})")
        if out is None:
            out = np.empty(end - begin, self.dtype)
        if out.shape != (end - begin,) or out.dtype != self.dtype or not out.flags.c_contiguous:
            got = f"out of shape {out.shape} and dtype {out.dtype}"
            raise ValueError(f"{got}, expected ({end - begin},), {self.dtype} and contiguous")
        for shard in self.shards:
            first, last = max(begin, shard.begin), min(end, shard.end)
            if first < last:
                part = out[first - begin : last - begin]
                read_shard(self.path, shard, self.step, dataset, first, part)
        return out


def need_average(checkpoint: Checkpoint) -> None:
    """Raise UserError if a checkpoint has no moving average of the parameters."""
    if EMA not in checkpoint.slot_names:
        raise UserError(f"{checkpoint.path} without an average", "a run with --ema")


def open_checkpoint(path: PathLike) -> Checkpoint:
    """Open one checkpoint, and check the checksum of its index and the sizes of its files.

    The earlier checkpoints of its chain are checked likewise.

    Args:
        path: Folder or index file of the checkpoint. To search a run directory, use `newest_whole`.

    Raises:
        UserError: If the checkpoint is incomplete or damaged, or `path` has none or several.
    """
    checkpoint = Checkpoint.of(_only(path))
    for problem in file_problems(checkpoint.path, checkpoint, sums=False):
        raise problem
    return checkpoint


def verify(path: PathLike) -> list[str]:
    """Check every byte of one checkpoint, and of the files that it needs of earlier ones.

    Args:
        path: Folder or index file of the checkpoint.

    Returns:
        One line for each problem, with the path, the dataset, and the actual and expected value.
        Empty for a complete checkpoint.
    """
    return _checked(path)[1]


def _checked(path: PathLike) -> tuple[Checkpoint | None, list[str]]:
    """Return a checkpoint, if its index is sound, and its problems; see `verify`."""
    try:
        folder = _only(path)
        found = Checkpoint.of(folder)
    except UserError as error:
        return None, [str(error)]
    problems = [str(problem) for problem in file_problems(folder, found, sums=True)]
    named = folder_step(folder.resolve())
    if named not in (None, found.step):
        problems.append(f"{folder}: folder of step {named}, expected step {found.step}")
    return found, problems


def _only(path: PathLike) -> Path:
    folders = list_checkpoints(path)
    if len(folders) != 1:
        raise UserError(f"{len(folders)} checkpoints at {path}", "one", "name a step-... folder")
    return folders[0]


def newest_whole(path: PathLike) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest complete checkpoint, and check every byte of it.

    Args:
        path: A run directory, its ``checkpoints`` folder, or one checkpoint.

    Returns:
        The checkpoint, or None if there is none, and the problems of the newer ones.
    """
    complaints, before = list[str](), committed(path)
    for folder in reversed(list_checkpoints(path)):
        found, problems = _checked(folder)
        if not problems:
            return found, complaints
        complaints += problems
    # A running job may have removed them as they were checked, and saved others.
    return (None, complaints) if committed(path) == before else newest_whole(path)


def need_whole(path: PathLike, given: str = "", remedy: str = "") -> tuple[Checkpoint, list[str]]:
    """Find the newest complete checkpoint as :func:`newest_whole`, and raise if there is none.

    Args:
        path: A run directory, its ``checkpoints`` folder, or one checkpoint.
        given: Text for `path` in the error, such as ``--init-from X``. Default: the path.
        remedy: Remedy in the error.

    Returns:
        The checkpoint, and a message for each problem of the newer ones, which are not used.

    Raises:
        UserError: If there is no complete checkpoint.
    """
    found, complaints = newest_whole(path)
    if found is None:
        what = "; ".join(complaints) or "none was saved"
        raise UserError(f"no whole checkpoint in {given or path}: {what}", "one", remedy)
    return found, [f"not used: {text}" for text in complaints]


# Checks that a checkpoint fits a run -------------------------------------------------------------


def check_samples(checkpoint: Checkpoint, n_train: int) -> None:
    """Check that a resumed run has as many training samples as before.

    Raises:
        UserError: If not, since saved positions in the order of samples would name other samples.
    """
    saved = checkpoint.state["n_train"]
    if saved != n_train:
        remedy = "give the data of that run, or begin a new run with --init-from"
        got = f"{n_train} training samples on resume"
        raise UserError(got, f"{saved} as in the saved run", remedy)


def check_length(done: float, config: Config) -> None:
    """Check that a resumed run has not trained for more than `config.epochs` already.

    Args:
        done: Number of finished epochs, with a fraction.
        config: Configuration of the job.

    Raises:
        UserError: If it has.
    """
    if not (config.steps or config.eval_only) and done > config.epochs:
        expected = f"at least {math.ceil(done)}: {done:.2f} are over"
        remedy = "leave out --epochs to go on as the run was begun"
        raise UserError(f"epochs {config.epochs} on resume", expected, remedy)


def check_checkpoint(checkpoint: Checkpoint, layout: Layout, dtype: str) -> None:
    """Check that a checkpoint's arrays fit the model.

    Raises:
        UserError: If a name, a shape or the dtype differs.
    """
    saved = dict(zip(checkpoint.layout.names, checkpoint.layout.shapes, strict=True))
    wanted = dict(zip(layout.names, layout.shapes, strict=True))
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            got = f"checkpoint {checkpoint.path}: params/{name} of shape {saved.get(name)}"
            remedy = "give the options of the run that saved it"
            raise UserError(got, f"{wanted.get(name)}, as in the model", remedy)
    if checkpoint.dtype != np.dtype(dtype):
        got = f"checkpoint {checkpoint.path} of dtype {checkpoint.dtype}"
        raise UserError(got, f"dtype {dtype}", f"use --dtype {checkpoint.dtype}")


def check_tables(path: Path, saved: Tables, wanted: Tables) -> None:
    """Check that a checkpoint's tables fit the run that resumes from it.

    Args:
        path: Folder of the checkpoint.
        saved: Properties of each table in the checkpoint, such as ``rows``.
        wanted: Properties of each table in the run.

    Raises:
        UserError: If a table is missing on either side, has fewer rows than before, or differs in
            another property. More rows are allowed, except if ids are hashed.
    """
    remedy = "give the tables of the run that saved it"
    for name in [*saved, *wanted]:
        if name not in wanted or name not in saved:
            sides = [f"the checkpoint {path}", "the run"]
            has, lacks = sides if name in saved else reversed(sides)
            got = f"table {name!r} of {has}, and not of {lacks}"
            raise UserError(got, "the same tables", remedy)
    for name, now in wanted.items():
        for key, value in now.items():
            before, grows = saved[name].get(key), key == "rows" and not now["hashed"]
            if before != value and not (grows and isinstance(before, int) and before <= value):
                shown = "{:,}".format if key == "rows" else str
                expected = "at least " * grows + shown(before)
                got = f"table {name!r} of {key} {shown(value)} on resume"
                why = ", as its ids are hashed" * (key == "rows" and now["hashed"])
                raise UserError(got, f"{expected}, as in {path}{why}", remedy)
