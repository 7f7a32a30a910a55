"""Text as words and their neighbours: counted in bounded memory, read in parts."""

import gzip
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpips.config import Config
from mpips.datasets import Dataset, open_dataset, text, vocabulary
from mpips.datasets.loader import Loader
from mpips.datasets.order import Order
from mpips.errors import UserError

LINES = ["The cat, the dog", "", "a Hund: über_all the cat", "x1 x1 the dog dog", "the"]


def opened(name: object, **options: Any) -> Dataset:
    given: dict[str, Any] = {"min_count": 2, "context": 2, "batch_size": 1, **options}
    return open_dataset(Config(problem="skipgram", dataset=str(name), **given))


def lines_of(n: int) -> list[str]:
    rng = np.random.default_rng(n)
    words = [f"w{k}" for k in rng.zipf(1.3, size=9 * n) % 200]
    cuts = np.sort(rng.integers(len(words), size=n)).tolist()
    return [" ".join(words[a:b]) for a, b in zip([0, *cuts], [*cuts, len(words)], strict=True)]


def expected(lines: list[str], known: dict[str, int], context: int) -> list[dict[int, int]]:
    """Return each word's neighbours by their distance, as one would write it down."""
    found = []
    for line in lines:
        every = re.findall(r"\w+", line.lower())
        kept = [k for k, word in enumerate(every) if word in known]
        numbers = [known[every[k]] for k in kept]
        for k in range(len(every)):
            at = kept.index(k) if k in kept else None
            near = {} if at is None else range(max(0, at - context), at + context + 1)
            found.append({j - (at or 0): numbers[j] for j in near if j < len(numbers)})
    return found


def rows(x: Any) -> list[dict[int, int]]:
    each = (x[k : k + 1] for k in range(len(x)))
    return [dict(zip(one.values.astype(int), one.indices, strict=True)) for one in each]


def test_words_and_their_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("\n".join(LINES))
    with opened(path, test_fraction=0.25) as found:
        info, words = found.info, found.info.vocabulary
        assert words is not None
        assert words.words == ["the", "dog", "cat", "x1"]
        assert words.counts.tolist() == [5, 3, 2, 2]
        assert words.text.startswith("the 5\ndog 3\n")
        assert (info.n_train, info.n_test, info.x_shape, info.classes) == (11, 4, (4,), None)
        assert "4 words occur 2 times or more, and are 80.0% of 15" in info.notes[0]
        x, _ = found.train.load(0, 11, np.dtype("f4"))
        assert found.test is not None
        rest, _ = found.test.load(0, 4, np.dtype("f4"))
        assert rows(x) + rows(rest) == expected(LINES, words.numbers, 2)


@pytest.mark.parametrize("one_line", [False, True])
def test_any_part_is_found(one_line: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two files in many pieces, by a loader that mixes them; a line may be longer than one."""
    monkeypatch.setattr(text, "PIECE", 500)
    lines = lines_of(300)
    parts = [lines[:100], [" ".join(lines[100:])] if one_line else lines[100:]]
    for name, part in zip("ab", parts, strict=True):
        (tmp_path / f"{name}.txt").write_text("\n".join(part))
    counted = Counter(" ".join(lines).split())
    with opened(f"{tmp_path}/*.txt", test_fraction=0.01, min_count=3, context=3) as found:
        words, n = found.info.vocabulary, found.train.n
        assert words is not None
        assert dict(zip(words.words, words.counts.tolist(), strict=True)) == {
            word: count for word, count in counted.items() if count >= 3
        }
        wanted = expected([*parts[0], *parts[1]], words.numbers, 3)
        x, _ = found.train.load(0, n, np.dtype("f4"))
        cut = [k for k, (a, b) in enumerate(zip(rows(x), wanted, strict=False)) if a != b]
        assert len(cut) <= 6 * (sum(map(len, " ".join(lines))) // 400) * one_line
        order = Order(n, 16, found.train.block(16), 1)
        with Loader(found.train, order, "f4") as loader:
            loader.submit(2, 30, 90)
            batch = loader.take()
        assert rows(batch.x) == [rows(x)[k] for k in batch.ids]


def test_a_text_of_its_own_has_the_numbers_of_the_other(tmp_path: Path) -> None:
    for name, words in (("a", "b a a b b"), ("b", "a c c c c a b")):
        (tmp_path / f"{name}.txt").write_text(words)
    with opened(tmp_path / "a.txt", test_dataset=str(tmp_path / "b.txt"), context=1) as found:
        assert found.test is not None
        x, _ = found.test.load(0, 7, np.dtype("f4"))
        assert rows(x) == [{0: 1, 1: 1}, {}, {}, {}, {}, {-1: 1, 0: 1, 1: 0}, {-1: 1, 0: 0}]


def test_memory_of_counts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No word is counted too often, nor by more than is told too seldom."""
    monkeypatch.setattr(vocabulary, "MOST_WORDS", 100)
    words = [f"w{k}" for k in np.random.default_rng(0).zipf(1.2, size=20_000) % 5000]
    counting = vocabulary.Counting()
    for at in range(0, len(words), 50):
        counting.add(words[at : at + 50])
    found, counted = counting.found(), Counter(words)
    assert len(found) <= 100
    assert (found.total, found.lost > 0) == (len(words), True)
    seen = dict(zip(found.words, found.counts.tolist(), strict=True))
    for word, count in counted.items():
        assert count - found.lost <= seen.get(word, 0) <= count
    again = vocabulary.unpack(vocabulary.pack(found))
    assert (again.packed, again.total, again.lost) == (found.packed, found.total, found.lost)
    assert (again.counts == found.counts).all()


def test_what_is_no_text(tmp_path: Path) -> None:
    contents = {
        "zero": (b"a b\0c", "with a zero byte, expected text"),
        "gz": (gzip.compress(b"a b"), "it is compressed"),
        "empty": (b"", "is empty"),
        "blank": (b" ,.\n", "has no words"),
        "few": (b"a a a b c", "with 1 words that occur 2 times, expected at least 2"),
    }
    for name, (data, told) in contents.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=told):
            opened(tmp_path / name)
    with pytest.raises(UserError, match=r"'x' of .*, expected nothing behind ::, or words"):
        opened(f"{tmp_path}/few::x")
