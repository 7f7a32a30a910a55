"""Checks of a dataset's targets before training.

They are read once, in blocks, of very many a part; of inputs nothing is. Data that would be trained
on without a word, and to no end, is refused (labels that are not class numbers, a held-out part of
classes that training never sees); ``--classes`` says that it is meant. What is merely odd is told.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpips.datasets.base import bad_label, not_finite, samples_per_block
from mpips.datasets.table import Table
from mpips.errors import UserError, listed

STEP = 1 << 20  # rows that are read at once
MOST_LOOKED, STRETCH = 1 << 26, 1 << 16  # of more targets than that stretches are looked at
SPREAD = 4  # labels are counted by their value where these are at most so many times as many
SPARSE = 10  # of more classes than this for each that occurs, labels are no class numbers
LEAST_JUDGED = 10  # samples: of fewer, anything may come by chance
MOST_COUNTABLE = 1000
SHOWN = 5

Rows = range | np.ndarray


@dataclass(frozen=True)
class Tally:
    """The labels of some samples.

    Attributes:
        values: Those that occur, increasing, int64.
        counts: How often each does.
        runs: Stretches of one label, in the order of the samples.
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
        """Whether all samples of a class stand together, and not by chance."""
        classes = len(self.values)
        return self.runs == classes > 1 and self.n >= max(LEAST_JUDGED, 2 * classes)


@dataclass(frozen=True)
class Labels:
    """What was found in a dataset's targets.

    Attributes:
        classes: Number of classes; None for real-valued targets.
        signs: Whether the labels are -1 and +1, which are taken as 0 and 1.
        countable: Classes that real-valued targets would make; 0 if they are not whole numbers.
        notes: What to tell the user.
    """

    classes: int | None
    signs: bool = False
    countable: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parts:
    """The open files of a dataset: which rows of which tables are trained on and held out.

    Attributes:
        train: The table that is trained on.
        rows: Its rows.
        test: The table that held-out samples are from, which may be the same.
        test_rows: Its rows; none where nothing is held out.
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
        """Close the files; may be called again."""
        for table in self.tables:
            table.close()


class Odd(NamedTuple):
    """What is odd about labels; it cannot be meant where something else is expected."""

    got: str
    remedy: str = ""
    expected: str = ""


def look(parts: Parts, classes: int, strict: bool) -> Labels:
    """Look at all targets.

    Args:
        parts: Where they are.
        classes: Number of classes, 0 if it is to be inferred.
        strict: Whether to refuse what cannot be meant; else it is only told, as in a run that is
            resumed.

    Raises:
        UserError: If a label is outside the classes, a target is not finite, or what cannot be
            meant is to be refused.
    """
    whole = all(table.y.dtype.kind in "bui" for table in parts.tables)
    if not classes and not whole:
        return _look_at_targets(parts)
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
    found = 2 if signs else int(seen[-1]) + 1
    if not signs:
        _check_range(parts, seen, classes)
    odd = [*_judge_parts(parts, train, test, max(2, found))]
    if not classes:
        odd = [*_judge_numbers(parts.train, seen, signs), *odd]
        for got, remedy, expected in odd:
            if expected and strict:
                raise UserError(got, expected, remedy)
    told = [f"{got}: {remedy}" if remedy else got for got, remedy, _ in odd]
    notes = (_note(seen, train, classes or found, signs), *_part_notes(parts), *told)
    return Labels(classes or found, signs, notes=notes)


def tally(table: Table, rows: Rows) -> Tally:
    """Count the labels of some rows of a table.

    Raises:
        UserError: If a label is no whole number.
    """
    values, counts, runs, last = np.zeros(0, "i8"), np.zeros(0, "i8"), 0, None
    for _, raw in _pieces(table, rows):
        labels = as_labels(raw)
        if raw.dtype.kind not in "bi" and (raw != labels).any():
            _refuse(table, lambda y: y != as_labels(y), "whole numbers", "mend the labels")
        here, often = _count(labels)
        values, places = np.unique(np.concatenate([values, here]), return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, often])).astype("i8")
        runs += int(np.count_nonzero(labels[1:] != labels[:-1])) + int(labels[0] != last)
        last = labels[-1]
    return Tally(values, counts, runs)


def as_labels(raw: np.ndarray) -> np.ndarray:
    """Return stored labels as int64; what does not fit in becomes another number."""
    with np.errstate(invalid="ignore"):
        return raw.astype(np.int64, copy=False)


def _pieces(table: Table, rows: Rows) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the targets of some rows in blocks, each of shape (n,), with the first one's row.

    Of more than `MOST_LOOKED` of a file, stretches are taken that lie evenly in it.
    """
    if not isinstance(rows, range):  # in memory
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
    """Return whether of `n` targets of a table only a part is looked at as a run begins."""
    return n > MOST_LOOKED and not table.in_memory


def _count(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return those that occur and how often each does; quick where they lie close together."""
    low, high = int(labels.min()), int(labels.max())
    if high - low >= max(MOST_COUNTABLE, SPREAD * labels.size):
        return np.unique(labels, return_counts=True)
    often = np.bincount(labels - low if low else labels)
    there = np.flatnonzero(often)
    return there + low, often[there]


def _refuse(
    table: Table, bad: Callable[[np.ndarray], np.ndarray], expected: str, remedy: str
) -> None:
    """Raise an error for the first label of a table that is `bad`, if there is one."""
    for begin in range(0, table.n, STEP):
        raw = table.read_y(begin, min(begin + STEP, table.n)).reshape(-1)
        found = bad(raw)
        if found.any():
            at = int(np.argmax(found))
            raise bad_label(table, begin + at, raw[at], expected, remedy)


def _check_range(parts: Parts, seen: np.ndarray, classes: int) -> None:
    """Refuse labels below 0, and those above the classes that are given."""
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


def _judge_numbers(table: Table, seen: np.ndarray, signs: bool) -> Iterator[Odd]:
    """Find labels that are no class numbers, where the number of classes follows from them."""
    what = f"{table.path}: array {table.y.name!r} has"
    highest, step = int(seen[-1]), int(np.gcd.reduce(seen))
    meant = f"or give --classes {max(2, highest + 1)} if that is meant"
    number = "number the classes from 0, as np.unique(y, return_inverse=True)[1] does"
    if len(seen) == 1:
        got = f"{what} one label alone, {highest}"
        yield Odd(got, f"name the right array, {meant}", "at least 2 classes")
    elif signs:
        return
    elif step > 1 and len(seen) > 2:
        got = f"{what} labels that are all multiples of {step}"
        yield Odd(got, f"{number}, {meant}", "class numbers 0, 1, 2 and so on")
    elif SPARSE * len(seen) <= highest:
        got = f"{what} {len(seen):,} labels up to {highest:,}"
        yield Odd(got, f"{number}, {meant}", f"at least one class in {SPARSE} to occur")
    elif seen[0] >= 1:
        first = f"if labels count from {seen[0]}, take {seen[0]} off each"
        yield Odd("no sample has label 0", f"{first}, {meant}")


def _judge_parts(parts: Parts, train: Tally, test: Tally, classes: int) -> Iterator[Odd]:
    """Find held-out samples of classes that training has not, and files sorted by class."""
    table = parts.train
    is_tail = parts.test is table and not table.in_memory
    remedy = "shuffle the samples, give others as --test-dataset" if is_tail else "give others"
    remedy += f", or give --classes {classes} if that is meant"
    if is_tail and train.is_sorted and test.n and not np.isin(train.values, test.values).all():
        got = f"{table.path} is sorted by class, and its last {test.n:,} samples are held out"
        yield Odd(got, remedy, "samples of all classes in both parts")
        return
    alone = ~np.isin(test.values, train.values)
    if alone.any():
        lost, names = int(test.counts[alone].sum()), listed(test.values[alone].tolist(), SHOWN)
        got = f"{lost:,} of {test.n:,} held-out samples have labels that training has not: {names}"
        if 2 * lost < test.n or test.n < LEAST_JUDGED or (parts.test is table and not is_tail):
            yield Odd(got)
        else:
            yield Odd(f"{parts.test.path}: {got}", remedy, "labels that training has")
    if train.is_sorted and not table.in_memory and train.n > samples_per_block(table):
        got = f"{table.path} is sorted by class and read in blocks, so that steps see few classes"
        yield Odd(got, "shuffle its samples")


def _note(seen: np.ndarray, train: Tally, classes: int, signs: bool) -> str:
    """Return the line about class labels."""
    span = "-1 and +1 (taken as 0 and 1)" if signs else f"{seen[0]:,} to {seen[-1]:,}"
    some = f"{len(train.values):,} of " if len(train.values) < classes else ""
    least, most = int(train.counts.min()), int(train.counts.max())
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"labels {span}: {some}{classes:,} classes, {each} training samples each"


def _part_notes(parts: Parts) -> list[str]:
    """Return a line about targets of which a part was looked at."""
    sampled = ((parts.train, parts.rows), (parts.test, parts.test_rows))
    if not any(is_sampled(table, len(rows)) for table, rows in sampled):
        return []
    return [
        f"about {MOST_LOOKED:,} of {len(parts.rows):,} targets were looked at, all are checked as "
        "they are read: give --classes if a class is rare"
    ]


def _look_at_targets(parts: Parts) -> Labels:
    """Look at real-valued targets, where there is one a sample.

    Raises:
        UserError: If one is not finite.
    """
    if parts.train.y.shape[1:] not in ((), (1,)):
        return Labels(None)
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
    if not countable:
        return Labels(None, notes=tuple(notes))
    hint = f"they are whole numbers: if they are class labels, give --classes {countable}"
    return Labels(None, countable=countable, notes=(*notes, hint))


def _countable(parts: Parts, low: float, high: float) -> int:
    """Return how many classes targets that are whole numbers could be; 0 if they cannot."""
    if high > MOST_COUNTABLE or low < -1 or low == high:
        return 0
    seen = tally(parts.train, parts.rows).values
    if low < 0:
        return 2 if np.isin(seen, (-1, 1)).all() else 0
    return int(high) + 1 if SPARSE * len(seen) > high else 0
