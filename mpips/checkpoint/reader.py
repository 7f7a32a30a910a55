"""Reader of checkpoints: any range of the parameters, whatever the shards.

Messages:
    epochs 3 on resume: ``--epochs`` is a total. Leave it out, or give more.
    no whole checkpoint in X: Every one is damaged, or none was saved. ``mpips checkpoint verify X``
        says why. Remove the folder and start again.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mpips.checkpoint.files import INDEX, PathLike, damaged, folder_step, list_checkpoints, pieces
from mpips.checkpoint.index import Contents, file_problems, read_index
from mpips.checkpoint.rows import Ordered, RowsFile, Stream, TableRows, counted_rows
from mpips.checkpoint.shards import PARAMS, read_shard, slot_dataset
from mpips.config import Config
from mpips.config.names import EMA
from mpips.errors import UserError, unknown
from mpips.layout import Layout

Tables: TypeAlias = Mapping[str, Mapping[str, Any]]  # what is told of each


@dataclass(frozen=True, eq=False)
class Checkpoint(Contents):
    """A committed checkpoint: what its index holds, and its files. Holds no open file.

    Attributes:
        path: Its folder.
    """

    path: Path = field(kw_only=True)

    @classmethod
    def of(cls, folder: Path) -> "Checkpoint":
        """Return the checkpoint of a folder, of which the index is read and checked.

        Raises:
            UserError: As `read_index`.
        """
        return cls(**vars(read_index(folder)), path=folder)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(s.bytes for s in self.files) + (self.path / INDEX).stat().st_size

    def read_params(
        self, begin: int = 0, end: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read parameters ``[begin, end)`` of the flat vector; `end` None is the whole.

        Args:
            begin: First element.
            end: Last element + 1.
            out: Where to, shape (end - begin,), this checkpoint's dtype, contiguous.

        Returns:
            `out`, or a new array.

        Raises:
            ValueError: If the range is not in the vector, or `out` does not fit it.
            UserError: If a shard file is missing or is not the one that was committed. Flipped
                bits in the numbers are found by `verify` only.
        """
        return self._read(PARAMS, begin, end, out)

    def read_slot(
        self, name: str, begin: int = 0, end: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read ``[begin, end)`` of an optimizer slot, as `read_params` does.

        Raises:
            UserError: Also for an unknown slot.
        """
        if name not in self.slot_names:
            raise unknown("slot", name, self.slot_names)
        return self._read(slot_dataset(name), begin, end, out)

    def read_model(self, average: bool, out: np.ndarray | None = None) -> np.ndarray:
        """Read all parameters, as `read_params` does, or their average.

        Raises:
            UserError: Also if there is no average.
        """
        if not average:
            return self.read_params(out=out)
        if EMA not in self.slot_names:
            raise UserError(f"{self.path} without an average", "a run with --ema")
        return self.read_slot(EMA, out=out)

    def read_worker(self, name: str, worker: int, out: np.ndarray, begin: int = 0) -> None:
        """Read one worker's own, its elements from `begin` on, into `out`, dtype as saved.

        In rounds it is a rank's own, and `worker` the rank.

        Raises:
            UserError: If a worker's file is missing or is not the one that was committed.
        """
        read_shard(self.path, self.workers[worker], self.step, name, begin, out)

    def read_workers_share(
        self, name: str, begin: int, out: np.ndarray, shares: int | None = None
    ) -> None:
        """Read one of equal shares of the sum of the workers' vectors, from `begin` on.

        Args:
            name: Of the vectors.
            begin: First element.
            out: Where to.
            shares: How many there are; None for one a worker, so that a share is the mean.

        Raises:
            UserError: If a worker's file is missing or is not the one that was committed.
        """
        total, one = np.zeros(out.shape), np.empty_like(out)
        for record in self.workers:
            read_shard(self.path, record, self.step, name, begin, one)
            total += one
        out[:] = total / (shares or len(self.workers))

    def read_table(self, name: str) -> Iterator[TableRows]:
        """Yield the rows of a table that have been changed, a piece after another.

        They come in any order, each once.

        Raises:
            UserError: If there is no such table, or a file is missing or is not the one that was
                committed.
        """
        for some in self._row_files(name):
            yield from some.pieces()

    def ordered_rows(self, name: str) -> list[Ordered]:
        """Return the rows of a table that have been changed by their numbers, each once.

        They take 16 bytes of memory each: values are read from the files when they are wanted.

        Raises:
            UserError: As `read_table`.
        """
        return [some.ordered() for some in self._row_files(name)]

    def count_rows(self, name: str) -> int:
        """Return how many rows of a table have been changed; of a chain their numbers are read.

        Raises:
            UserError: As `read_table`.
        """
        return sum(some.count for some in self._row_files(name))

    def columns(self, name: str) -> dict[str, Stream]:
        """Return what there is of all rows of a table that have been changed.

        That is ``rows``, ``params`` and ``slots/<slot>``, in one order.

        Raises:
            UserError: As `read_table`.
        """
        first, count = RowsFile(self.path, self.rows[0], self.step, name), self.count_rows(name)
        return {
            column: Stream((count, *shape), dtype, partial(self._column, name, column, count))
            for column, (shape, dtype) in first.columns().items()
        }

    def _column(self, name: str, column: str, count: int) -> Iterator[np.ndarray]:
        found = 0
        for some in self._row_files(name):
            for piece in some.column(column):
                found += len(piece)
                if found <= count:
                    yield piece
        if found != count:
            raise damaged(f"{self.path}: {column} of table {name} of length {found}", str(count))

    def _row_files(self, name: str) -> Iterator[RowsFile]:
        """Return the files with a table's changed rows."""
        if name not in self.tables:
            raise unknown("table", name, tuple(self.tables))
        return counted_rows(self.path, self, name)

    def stream(self, begin: int, end: int, shape: tuple[int, ...], slot: str = "") -> Stream:
        """Return a range of the parameters, or of a slot, as an array that is read in pieces.

        Args:
            begin: First element.
            end: Last element + 1.
            shape: Of the array.
            slot: Of the optimizer; empty for parameters.
        """
        dataset = slot_dataset(slot) if slot else PARAMS

        def read() -> Iterator[np.ndarray]:
            for first, last in pieces(begin, end, self.dtype.itemsize):
                yield self._read(dataset, first, last, None)

        return Stream(shape, self.dtype, read)

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
            found = f"out of shape {out.shape} and dtype {out.dtype}"
            raise ValueError(f"{found}, expected ({end - begin},), {self.dtype} and contiguous")
        for shard in self.shards:
            first, last = max(begin, shard.begin), min(end, shard.end)
            if first < last:
                part = out[first - begin : last - begin]
                read_shard(self.path, shard, self.step, dataset, first, part)
        return out


def open_checkpoint(path: PathLike) -> Checkpoint:
    """Open one checkpoint; its index is checked to the last bit, its files by their size.

    Those of checkpoints to whose rows its own add are checked likewise.

    Args:
        path: Its folder or its index file. `newest_whole` finds the folder in a run directory.

    Raises:
        UserError: If it is not whole, or there is no one checkpoint at `path`.
    """
    checkpoint = Checkpoint.of(_only(path))
    for problem in file_problems(checkpoint.path, checkpoint, sums=False):
        raise problem
    return checkpoint


def verify(path: PathLike) -> list[str]:
    """Check every byte of one checkpoint, and of what it needs of others.

    Args:
        path: Its folder or its index file.

    Returns:
        One line a problem, each with path, dataset, what was found and what was expected; empty
        for a whole one.
    """
    try:
        folder = _only(path)
        contents = read_index(folder)
    except UserError as error:
        return [str(error)]
    problems = [str(problem) for problem in file_problems(folder, contents, sums=True)]
    named = folder_step(folder.resolve())
    if named not in (None, contents.step):
        problems.append(f"{folder}: folder of step {named}, expected step {contents.step}")
    return problems


def _only(path: PathLike) -> Path:
    found = list_checkpoints(path)
    if len(found) != 1:
        raise UserError(f"{len(found)} checkpoints at {path}", "one", "name a step-... folder")
    return found[0]


def newest_whole(path: PathLike) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest whole checkpoint; every byte of it is checked.

    Args:
        path: A run directory, its ``checkpoints`` folder, or one checkpoint.

    Returns:
        The checkpoint, or None if there is none, and what is wrong with each newer one.
    """
    complaints: list[str] = []
    for folder in reversed(list_checkpoints(path)):
        problems = verify(folder)
        if not problems:
            return Checkpoint.of(folder), complaints
        complaints += problems
    return None, complaints


def need_whole(path: PathLike, given: str = "", remedy: str = "") -> tuple[Checkpoint, list[str]]:
    """Find the newest whole checkpoint as :func:`newest_whole`, refused if there is none.

    Args:
        path: A run directory, its ``checkpoints`` folder, or one checkpoint.
        given: What names it to the person who gave it, as ``--init-from X``. Default: the path.
        remedy: What to do if there is none.

    Returns:
        The checkpoint, and what is to be told of each newer one, which is not used.

    Raises:
        UserError: If there is none.
    """
    found, complaints = newest_whole(path)
    if found is None:
        what = "; ".join(complaints) or "none was saved"
        raise UserError(f"no whole checkpoint in {given or path}: {what}", "one", remedy)
    return found, [f"not used: {text}" for text in complaints]


# Whether it fits the run that reads it -----------------------------------------------------------


def check_samples(checkpoint: Checkpoint, n_train: int) -> None:
    """Check that a run that is resumed finds as many samples as it had.

    Raises:
        UserError: If not: positions in the order of the samples would name others.
    """
    saved = checkpoint.state["n_train"]
    if saved != n_train:
        remedy = "give the data of that run, or begin a new run with --init-from"
        got = f"{n_train} training samples on resume"
        raise UserError(got, f"{saved} as in the saved run", remedy)


def check_length(done: float, config: Config) -> None:
    """Check that a run that is resumed is not asked to be shorter than it is.

    Args:
        done: Epochs that are over.
        config: The job.

    Raises:
        UserError: If it is: what was assigned would be trained on, and the run called done.
    """
    if not (config.steps or config.eval_only) and done > config.epochs:
        expected = f"at least {math.ceil(done)}: {done:.2f} are over"
        remedy = "leave out --epochs to go on as the run was begun"
        raise UserError(f"epochs {config.epochs} on resume", expected, remedy)


def check_checkpoint(checkpoint: Checkpoint, layout: Layout, dtype: str) -> None:
    """Check that a checkpoint's arrays are those of the model.

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
    """Check that a checkpoint's tables are those of a run that goes on from it.

    Args:
        path: Of the checkpoint.
        saved: What it says of each table: ``rows``, and more.
        wanted: What the run says.

    Raises:
        UserError: If one is missing on either side, has fewer rows than it had, or differs in
            anything else; more rows are no difference, but where ids are hashed.
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
