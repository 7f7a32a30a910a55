"""Text as words and their neighbours, read in parts: ``corpus.txt::words``.

A sample is a word of the text. Its inputs are sparse (`mpips.datasets.csr.Csr`): an index is the
number of a word, its value how far that word stands from the sample's, which itself has distance 0.
Words that occur seldom have no number: they are left out before distances are counted, and the
inputs of a sample of such a word are empty. Neighbours are of the same line.

The files are gone through once, for how often each word occurs and how many there are up to each
eighth of a megabyte; then any sample is found. What is in memory does not grow with the files, but
with different words, of which about a million are counted at a time.

References: Mikolov et al., "Distributed Representations of Words and Phrases and their
Compositionality", NIPS 2013.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mpips.datasets.base import Source
from mpips.datasets.csr import Csr, join
from mpips.datasets.libsvm import is_compressed
from mpips.datasets.table import ArrayInfo, Table, check_file, cuts, damaged, reading
from mpips.datasets.vocabulary import Counting, Vocabulary, merged, pack, unpack, words_of
from mpips.errors import UserError

FORMAT = "text"
NAMES = "words"  # behind ``::``
PIECE = 1 << 17  # bytes between words that are known
KEPT = 4  # pieces


class Piece(NamedTuple):
    """A part of a file: how many words it has, where it begins, its bytes."""

    words: int
    begin: int
    size: int


class TextTable(Table):
    """The words of text files, with their neighbours, made when they are asked for.

    Args:
        path: What messages call the files.
        paths: The files.
        places: What is known of each, as `places` of a table of it alone; None to find that out.
        least: How often a word occurs that gets a number.
        context: The largest distance of a neighbour, in words.

    Raises:
        UserError: If a file is missing, empty, compressed or no text, or there are too few words.
    """

    in_memory, checks_inputs, sparse = False, True, True

    def __init__(
        self, path: str, paths: Sequence[str], places: Sequence[np.ndarray | None],
        least: int = 1, context: int = 5,
    ) -> None:  # fmt: skip
        known = [scan(p) if at is None else at for p, at in zip(paths, places, strict=True)]
        self._known, self._paths, self._context = np.concatenate(known), paths, context
        ends = [1 + 3 * int(each[0]) for each in known]
        self._pieces = np.concatenate(
            [each[1:end].reshape(-1, 3) for each, end in zip(known, ends, strict=True)]
        )
        self._files = np.repeat(np.arange(len(paths)), [int(each[0]) for each in known])
        self._rows = np.cumsum([0, *self._pieces[:, 0]])
        parts = (unpack(each[end:]) for each, end in zip(known, ends, strict=True))
        self.vocabulary: Vocabulary = merged(parts, least, path)
        self._least = least
        self._piece = lru_cache(KEPT)(self._parse)
        n = int(self._rows[-1])
        x = ArrayInfo("words", (n, len(self.vocabulary)), np.dtype("f4"))
        super().__init__(path, x, ArrayInfo("targets", (n,), np.dtype("f4")))

    @property
    def places(self) -> np.ndarray:
        """What is known of the files, shape (size,), int64."""
        return self._known

    @property
    def sample_bytes(self) -> float:
        """Bytes of one sample's inputs as they are read, at most."""
        return (2 * self._context + 1) * 16 + 8

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the words."""
        found = self.vocabulary
        share = found.counts.sum() / max(1, found.total)
        told = f"{len(found):,} words occur {self._least} times or more, and are {share:.1%} of "
        lost = f"; of more different ones than are counted at a time, by {found.lost:,} too few"
        return (f"{told}{found.total:,}{lost if found.lost else ''}",)

    def match(self, other: Table) -> None:
        """Have another text's words numbered as these are."""
        if not isinstance(other, TextTable):
            raise UserError(f"{other.path} beside {self.path}", "text, as it is")
        other.vocabulary = self.vocabulary
        other.x = ArrayInfo(other.x.name, (other.n, len(self.vocabulary)), other.x.dtype)

    def read_x(self, begin: int, end: int) -> Any:
        """Return the words ``[begin, end)`` with their neighbours, a `Csr`."""
        parts = cuts(self._rows, begin, end)
        return join([self._around(*self._piece(number), *span) for number, *span in parts])

    def read_y(self, begin: int, end: int) -> np.ndarray:
        """Return zeros: text has no targets."""
        return np.zeros(end - begin, self.y.dtype)

    def gather(self, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return scattered words with their neighbours, and zeros."""
        return join([self.read_x(row, row + 1) for row in rows.tolist()]), self.read_y(0, len(rows))

    def _parse(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number and the line of each word of a piece, -1 for those without a number."""
        path, piece = self._paths[self._files[number]], Piece(*self._pieces[number].tolist())
        with reading(path, FORMAT):
            with open(path, "rb") as file:
                text = os.pread(file.fileno(), piece.size, piece.begin)
            lines, known = words_of(text), self.vocabulary.numbers
            if len(text) < piece.size or sum(map(len, lines)) != piece.words:
                raise EOFError("it was changed while it is read")
            numbers = [known.get(word, -1) for word in chain.from_iterable(lines)]
        return np.array(numbers, np.int64), np.repeat(np.arange(len(lines)), [*map(len, lines)])

    def _around(self, numbers: np.ndarray, lines: np.ndarray, begin: int, end: int) -> Csr:
        """Return words ``[begin, end)`` of a piece with their neighbours."""
        known = np.flatnonzero(numbers >= 0)
        words, lines = numbers[known], lines[known]
        first, last = np.searchsorted(known, (begin, end)).tolist()
        steps = np.arange(-self._context, self._context + 1)
        at = np.arange(first, last)[:, None] + steps
        inside = (at >= 0) & (at < len(known))
        at[~inside] = 0
        inside &= lines[at] == lines[first:last, None]
        counts = np.zeros(end - begin, np.int64)
        counts[known[first:last] - begin] = inside.sum(axis=1)
        starts = np.concatenate(([0], np.cumsum(counts)))
        values = np.broadcast_to(steps, inside.shape)[inside].astype(np.float32)
        return Csr(starts, words[at[inside]], values, self.x.shape[1])


class TextSource(Source):
    """Words with their neighbours, as a `Csr`; distances are not scaled."""

    def _inputs(self, x: Any, dtype: np.dtype) -> Any:
        return x

    def _check(self, values: Any, array: ArrayInfo, begin: int) -> None:
        """Pass all: nothing in it is of the file."""


def open_text(path: str, names: str = "", places: np.ndarray | None = None) -> TextTable:
    """Open one file, to find out what is known of it.

    Args:
        path: The file.
        names: What stands behind ``::``.
        places: What is known of it; None to go through it.

    Raises:
        UserError: As `TextTable`, but for too few words.
    """
    if names not in ("", NAMES):
        raise UserError(f"{names!r} of {path}", f"nothing behind ::, or {NAMES}")
    return TextTable(path, [path], [places])


def scan(path: str) -> np.ndarray:
    """Go through a file for its words.

    Returns:
        The number of pieces, the pieces, and the words (`pack`), shape (size,), int64.

    Raises:
        UserError: As `TextTable`.
    """
    check_file(path)
    if is_compressed(path):
        raise damaged(path, "plain text", ValueError("it is compressed, and no word can be found"))
    found, counting = list[Piece](), Counting()
    with reading(path, FORMAT), open(path, "rb") as file:
        for begin, text in _pieces(file):
            if b"\0" in text:
                remedy = "name a text file, or use another --problem"
                raise UserError(f"{path} with a zero byte", "text", remedy)
            words = [*chain.from_iterable(words_of(text))]
            counting.add(words)
            found.append(Piece(len(words), begin, len(text)))
    if not sum(piece.words for piece in found):
        raise UserError(f"{path} has no words", "text")
    return np.concatenate([[len(found)], np.ravel(found), pack(counting.found())])


def _pieces(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield parts of a file with where they begin; cut behind a line, or in a long one, a space."""
    at = 0
    while text := file.read(PIECE):
        if len(text) == PIECE:
            cut = text.rfind(b"\n")
            cut = text.rfind(b" ") if cut < 0 else cut
            text = text[: cut + 1] if cut >= 0 else text
        yield at, text
        at += len(text)
        file.seek(at)
