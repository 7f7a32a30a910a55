"""Checks of a dataset's targets before training.

Targets are read once, in blocks; of a very large file only a part is read. Inputs are not read.
With some labels a run would train to no purpose, without an error: labels that are not class
numbers, or held-out samples of classes that training lacks. They are refused, unless ``--classes``
is given. Lesser oddities are only noted.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mpips.datasets.base import DataInfo, bad_label, not_finite, samples_per_block
from mpips.datasets.table import Table
from mpips.errors import UserError, listed

STEP = 1 << 20  # rows that are read at once
MOST_LOOKED, STRETCH = 1 << 26, 1 << 16  # of more targets, only stretches of so many rows are read
SPREAD = 4  # labels are counted by value if their span is at most this multiple of their number
SPARSE = 10  # labels are not class numbers if fewer than one class in so many occurs
LEAST_JUDGED = 10  # samples: fewer may be odd by chance
MOST_COUNTABLE = 1000
SHOWN = 5

Rows = range | np.ndarray


@dataclass(frozen=True)
class Tally:
    """The labels of some samples.

    Attributes:
        values: Labels that occur, increasing, int64.
        counts: Number of samples of each label.
        runs: Number of stretches of equal labels, in the order of the samples.
    """

    values: np.ndarray
    counts: np.ndarray
    runs: int

    @property
    def n(self) -> int:
        """Number of samples."""
        return int(self.counts.sum())

    @property
    def is_sorted(self) -> bool:
        """Whether the samples are sorted by class, which is unlikely to be chance."""
        classes = len(self.values)
        return self.runs == classes > 1 and self.n >= max(LEAST_JUDGED, 2 * classes)


@dataclass(frozen=True)
class Parts:
    """The open files of a dataset, with the rows for training and the held-out rows.

    Attributes:
        train: Table of the training samples.
        rows: Rows of the training samples.
        test: Table of the held-out samples; it may be the same table.
        test_rows: Rows of the held-out samples; empty if there are none.
    """

    train: Table
    rows: Rows
    test: Table
    test_rows: Rows

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables, each once."""
        return (self.train,) if self.train is self.test else (self.train, self.test)

    def close(self) -> None:
        """Close the files. May be called again."""
        for table in self.tables:
            table.close()


class Oddity(NamedTuple):
    """An oddity of labels; with `expected`, an obvious mistake."""

    got: str
    remedy: str = ""
    expected: str = ""


def check_targets(info: DataInfo, parts: Parts, classes: int, strict: bool) -> DataInfo:
    """Check all targets, and return the description of the data with their properties.

    Args:
        info: Description of the data, as of real-valued targets.
        parts: The open files.
        classes: Number of classes; 0 to infer it.
        strict: Whether to refuse obvious mistakes; else they are only noted, as in a resumed run.

    Raises:
        UserError: If a label is outside the classes, a target is not finite, or a mistake is
            refused.
    """
    whole = all(table.y.dtype.kind in "bui" for table in parts.tables)
    if not classes and not whole:
        return _check_real_targets(info, parts)
    for table in parts.tables:
        if table.y.shape[1:] not in ((), (1,)):
            what = f"{table.path}: array {table.y.name!r}"
            got = f"{what} has shape {table.y.shape}, dtype {table.y.dtype}"
            expected = "one class number a sample, or targets of a floating-point type"
            remedy = "store it as (n,) integers, or as floats without --classes"
            raise UserError(got, expected, remedy)
    train, test = tally(parts.train, parts.rows), tally(parts.test, parts.test_rows)
    seen, _ = _count(np.concatenate([train.values, test.values]))
    signs = bool(seen[0] == -1 and np.isin(seen, (-1, 1)).all())
    inferred = 2 if signs else int(seen[-1]) + 1
    if not signs:
        _check_range(parts, seen, classes)
    oddities = [*_check_parts(parts, train, test, max(2, inferred))]
    if not classes:
        oddities = [*_check_numbers(parts.train, seen, signs), *oddities]
        for got, remedy, expected in oddities:
            if expected and strict:
                raise UserError(got, expected, remedy)
    noted = [f"{got}: {remedy}" if remedy else got for got, remedy, _ in oddities]
    classes = classes or inferred
    notes = (_note(seen, train, classes, signs), *_part_notes(parts), *noted, *info.notes)
    return replace(info, y_shape=(), classes=classes, signs=signs, notes=notes)


def tally(table: Table, rows: Rows) -> Tally:
    """Count the labels of some rows of a table.

    Raises:
        UserError: If a label is not a whole number.
    """
    values, counts, runs, last = np.zeros(0, "i8"), np.zeros(0, "i8"), 0, None
    for _, raw in _pieces(table, rows):
        labels = as_labels(raw)
        if raw.dtype.kind not in "bi" and (raw != labels).any():
            _refuse(table, lambda y: y != as_labels(y), "whole numbers", "mend the labels")
        block_values, block_counts = _count(labels)
        values, indices = np.unique(np.concatenate([values, block_values]), return_inverse=True)
        counts = np.bincount(indices, np.concatenate([counts, block_counts])).astype("i8")
        runs += int(np.count_nonzero(labels[1:] != labels[:-1])) + int(labels[0] != last)
        last = labels[-1]
    return Tally(values, counts, runs)


def as_labels(raw: np.ndarray) -> np.ndarray:
    """Return stored labels as int64; a label that does not fit becomes another number."""
    with np.errstate(invalid="ignore"):
        return raw.astype(np.int64, copy=False)


def _pieces(table: Table, rows: Rows) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the targets of rows in blocks, each of shape (n,), with the row of the first target.

    If there are more than `MOST_LOOKED` in a file, it yields evenly spaced stretches.
    """
    if not isinstance(rows, range):  # only of tables in memory
        whole = table.read_y(0, table.n).reshape(table.n)
        for at in range(0, len(rows), STEP):
            yield int(rows[at]), whole[rows[at : at + STEP]]
        return
    step = STRETCH if is_sampled(table, len(rows)) else STEP
    every = len(rows) * STRETCH // MOST_LOOKED if step == STRETCH else STEP
    for at in range(rows.start, rows.stop, every):
        end = min(at + step, rows.stop)
        yield at, table.read_y(at, end).reshape(end - at)


def is_sampled(table: Table, n: int) -> bool:
    """Return whether a run reads only a part of `n` targets of a table before it begins."""
    return n > MOST_LOOKED and not table.in_memory


def _count(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels that occur and their counts; labels that are close are counted faster."""
    low, high = int(labels.min()), int(labels.max())
    if high - low >= max(MOST_COUNTABLE, SPREAD * labels.size):
        return np.unique(labels, return_counts=True)
    counts = np.bincount(labels - low if low else labels)
    values = np.flatnonzero(counts)
    return values + low, counts[values]


def _refuse(
    table: Table, bad: Callable[[np.ndarray], np.ndarray], expected: str, remedy: str
) -> None:
    """Raise an error for the first label of a table that is `bad`, if there is one."""
    for begin in range(0, table.n, STEP):
        raw = table.read_y(begin, min(begin + STEP, table.n)).reshape(-1)
        marks = bad(raw)
        if marks.any():
            at = int(np.argmax(marks))
            raise bad_label(table, begin + at, raw[at], expected, remedy)


def _check_range(parts: Parts, seen: np.ndarray, classes: int) -> None:
    """Check that labels are not below 0, nor above the given classes.

    Raises:
        UserError: If one is. It names the sample.
    """
    if seen[0] >= 0 and (not classes or seen[-1] < classes):
        return
    expected = f"whole numbers from 0 to {classes - 1}"
    remedy = "give the right number of --classes"
    if not classes:
        expected, remedy = "class numbers from 0, or -1 and +1 alone", "store real values as floats"
    elif seen[0] >= 1 and seen[-1] == classes:
        remedy = "labels count from 0: take 1 off each"

    def bad(raw: np.ndarray) -> np.ndarray:
        labels = as_labels(raw)
        return (labels < 0) | (labels >= (classes or np.inf))

    for table in parts.tables:
        _refuse(table, bad, expected, f"{remedy}, or mend the labels")


def _check_numbers(table: Table, seen: np.ndarray, signs: bool) -> Iterator[Oddity]:
    """Yield oddities of labels as class numbers, if the number of classes is inferred."""
    what = f"{table.path}: array {table.y.name!r} has"
    highest, step = int(seen[-1]), int(np.gcd.reduce(seen))
    meant = f"or give --classes {max(2, highest + 1)} if that is meant"
    number = "number the classes from 0, as np.unique(y, return_inverse=True)[1] does"
    if len(seen) == 1:
        got = f"{what} one label alone, {highest}"
        yield Oddity(got, f"name the right array, {meant}", "at least 2 classes")
    elif signs:
        return
    elif step > 1 and len(seen) > 2:
        got = f"{what} labels that are all multiples of {step}"
        yield Oddity(got, f"{number}, {meant}", "class numbers 0, 1, 2 and so on")
    elif SPARSE * len(seen) <= highest:
        got = f"{what} {len(seen):,} labels up to {highest:,}"
        yield Oddity(got, f"{number}, {meant}", f"at least one class in {SPARSE} to occur")
    elif seen[0] >= 1:
        first = f"if labels count from {seen[0]}, take {seen[0]} off each"
        yield Oddity("no sample has label 0", f"{first}, {meant}")


def _check_parts(parts: Parts, train: Tally, test: Tally, classes: int) -> Iterator[Oddity]:
    """Yield oddities of the parts: classes that training lacks, and files sorted by class."""
    table = parts.train
    is_tail = parts.test is table and not table.in_memory
    remedy = "shuffle the samples, give others as --test-dataset" if is_tail else "give others"
    remedy += f", or give --classes {classes} if that is meant"
    if is_tail and train.is_sorted and test.n and not np.isin(train.values, test.values).all():
        got = f"{table.path} is sorted by class, and its last {test.n:,} samples are held out"
        yield Oddity(got, remedy, "samples of all classes in both parts")
        return
    alone = ~np.isin(test.values, train.values)
    if alone.any():
        lost, names = int(test.counts[alone].sum()), listed(test.values[alone].tolist(), SHOWN)
        got = f"{lost:,} of {test.n:,} held-out samples have labels that training has not: {names}"
        if 2 * lost < test.n or test.n < LEAST_JUDGED or (parts.test is table and not is_tail):
            yield Oddity(got)
        else:
            yield Oddity(f"{parts.test.path}: {got}", remedy, "labels that training has")
    if train.is_sorted and not table.in_memory and train.n > samples_per_block(table):
        got = f"{table.path} is sorted by class and read in blocks, so that steps see few classes"
        yield Oddity(got, "shuffle its samples")


def _note(seen: np.ndarray, train: Tally, classes: int, signs: bool) -> str:
    """Return the note about class labels."""
    span = "-1 and +1 (taken as 0 and 1)" if signs else f"{seen[0]:,} to {seen[-1]:,}"
    some = f"{len(train.values):,} of " if len(train.values) < classes else ""
    least, most = int(train.counts.min()), int(train.counts.max())
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"labels {span}: {some}{classes:,} classes, {each} training samples each"


def _part_notes(parts: Parts) -> list[str]:
    """Return the note about targets that are read only in part; empty if all are."""
    sampled = ((parts.train, parts.rows), (parts.test, parts.test_rows))
    if not any(is_sampled(table, len(rows)) for table, rows in sampled):
        return []
    return [
        f"about {MOST_LOOKED:,} of {len(parts.rows):,} targets were looked at, all are checked as "
        "they are read: give --classes if a class is rare"
    ]


def _check_real_targets(info: DataInfo, parts: Parts) -> DataInfo:
    """Check real-valued targets, and describe them; only if there is one a sample.

    Raises:
        UserError: If one is not finite.
    """
    if parts.train.y.shape[1:] not in ((), (1,)):
        return info
    low, high, total, n, whole = math.inf, -math.inf, 0.0, 0, True
    for table in parts.tables:
        for begin, raw in _pieces(table, range(table.n)):
            if not (finite := np.isfinite(raw)).all():
                at = int(np.argmin(finite))
                raise not_finite(table, table.y, begin + at, (), raw[at])
            low, high = min(low, float(raw.min())), max(high, float(raw.max()))
            total, n = total + float(raw.sum(dtype="f8")), n + len(raw)
            whole = whole and bool((raw == np.rint(raw)).all())
    notes = [f"targets {low:.4g} to {high:.4g}, mean {total / n:.4g}", *_part_notes(parts)]
    countable = _countable(parts, low, high) if whole else 0
    if countable:
        hint = f"they are whole numbers: if they are class labels, give --classes {countable}"
        notes.append(hint)
    return replace(info, countable=countable, notes=(*notes, *info.notes))


def _countable(parts: Parts, low: float, high: float) -> int:
    """Return the number of classes that whole-number targets would make; 0 if they would not."""
    if high > MOST_COUNTABLE or low < -1 or low == high:
        return 0
    seen = tally(parts.train, range(parts.train.n)).values  # of the same targets as the check
    if low < 0:
        return 2 if np.isin(seen, (-1, 1)).all() else 0
    return int(high) + 1 if SPARSE * len(seen) > high else 0
