"""The words of a text: which there are, how often each occurs, and their numbers."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpips.errors import UserError

WORD = re.compile(r"\w+")
MOST_WORDS = 1 << 20  # different ones that are counted at a time: some 100 MB
WORD_BYTES = 8


@dataclass(frozen=True)
class Vocabulary:
    """The words of a text that have numbers: the most frequent first.

    Attributes:
        packed: The words, one a line, UTF-8.
        counts: How often each occurs, shape (words,), int64, decreasing.
        total: Words of the text, of any kind.
        lost: By how much a word may occur more often than it was counted; 0 where all were.
    """

    packed: bytes
    counts: np.ndarray
    total: int
    lost: int = 0

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def words(self) -> list[str]:
        """The words, by their number."""
        return self.packed.decode().splitlines()

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words)}

    def cut(self, least: int) -> "Vocabulary":
        """Return the words alone that occur so often."""
        kept = int(np.count_nonzero(self.counts >= least))
        words = self.packed.split(b"\n", kept)[:kept]
        return Vocabulary(b"\n".join(words), self.counts[:kept], self.total, self.lost)

    @property
    def text(self) -> str:
        """A line a word: the word and how often it occurs."""
        pairs = zip(self.words, self.counts.tolist(), strict=True)
        return "".join(f"{word} {count}\n" for word, count in pairs)


class Counting:
    """Counts words in bounded memory.

    Where there are too many different ones, all are counted less by so much that half of them are
    forgotten: so no word is counted too often, nor too seldom by more than `lost`.

    References: J. Misra, D. Gries, Science of Computer Programming 2 (1982).
    """

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()
        self._total = self.lost = 0

    def add(self, words: Sequence[str]) -> None:
        """Count some words."""
        self._counted.update(words)
        self._total += len(words)
        self._forget()

    def _forget(self) -> None:
        if len(self._counted) > MOST_WORDS:
            taken = sorted(self._counted.values(), reverse=True)[MOST_WORDS // 2]
            kept = {word: n - taken for word, n in self._counted.items() if n > taken}
            self._counted, self.lost = Counter(kept), self.lost + taken

    def merge(self, other: Vocabulary) -> None:
        """Count the words of another text, which are counted already."""
        pairs = zip(other.words, other.counts.tolist(), strict=True)
        self._counted.update(dict(pairs))
        self._total, self.lost = self._total + other.total, self.lost + other.lost
        self._forget()

    def found(self) -> Vocabulary:
        """Return what was counted."""
        pairs = sorted(self._counted.items(), key=lambda pair: (-pair[1], pair[0]))
        packed = "\n".join(word for word, _ in pairs).encode()
        counts = np.array([count for _, count in pairs], np.int64)
        return Vocabulary(packed, counts, self._total, self.lost)


def words_of(text: bytes) -> list[list[str]]:
    """Return the words of each line: runs of letters, digits and underscores, in lower case."""
    lines = text.decode("utf-8", "replace").lower().split("\n")
    return [WORD.findall(line) for line in lines]


def merged(parts: Iterable[Vocabulary], least: int, path: str) -> Vocabulary:
    """Return the words of several texts that occur often enough.

    Raises:
        UserError: If there are not two.
    """
    counting = Counting()
    for part in parts:
        counting.merge(part)
    found = counting.found().cut(least)
    if len(found) < 2:
        got = f"{path} with {len(found)} words that occur {least} times"
        raise UserError(got, "at least 2", "use a longer text, or a smaller --min-count")
    return found


def pack(vocabulary: Vocabulary) -> np.ndarray:
    """Return a vocabulary as numbers, shape (size,), int64; `unpack` undoes it."""
    packed = vocabulary.packed
    padded = packed + bytes(-len(packed) % WORD_BYTES)
    facts = [len(vocabulary), len(packed), vocabulary.total, vocabulary.lost]
    return np.concatenate([facts, vocabulary.counts, np.frombuffer(padded, np.int64)])


def unpack(numbers: np.ndarray) -> Vocabulary:
    """Return the vocabulary that `pack` made numbers of."""
    words, size, total, lost = numbers[:4].tolist()
    packed = numbers[4 + words :].tobytes()[:size]
    return Vocabulary(packed, numbers[4 : 4 + words], total, lost)
