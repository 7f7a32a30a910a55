"""Rows of words and of integers of 64 bits."""

import hashlib

import numpy as np
import pytest

from mpips.errors import UserError
from mpips.layout.tables import digests_of, rows_of

MASK = (1 << 64) - 1


def mixed(word: int) -> int:
    """Return what the finaliser of SplitMix64 makes of a word."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def test_integers_are_the_same_id_in_all_types() -> None:
    values = np.array([0, 1, 5, 127])
    expected = [mixed(value) for value in values.tolist()]
    for dtype in ("i1", "u1", "i4", ">i8", "u8"):
        assert digests_of("item", values.astype(dtype)).tolist() == expected
    wide = np.array([2**63, 2**64 - 1], "u8")
    assert digests_of("item", wide).tolist() == [mixed(2**63), mixed(2**64 - 1)]
    assert (digests_of("item", wide.astype("i8")) == digests_of("item", wide)).all()


def test_words_are_hashed_by_their_text() -> None:
    words = ["a", "été", "", "a"]
    expected = [
        int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        for word in words
    ]
    for given in (np.array(words), np.array(words, object), np.array(words).reshape(2, 2)):
        found = digests_of("item", given)
        assert found.shape == given.shape
        assert found.reshape(-1).tolist() == expected
    assert digests_of("item", np.array(["\ud800"])).shape == (1,)


def test_rows_stay_as_they_are() -> None:
    """A run that is resumed, by another version as well, finds its rows."""
    assert rows_of(digests_of("item", np.array([3, -1])), 1000).tolist() == [856, 67]
    assert rows_of(digests_of("item", np.array(["cat", "dog"])), 1000).tolist() == [939, 465]


def test_rows_are_even() -> None:
    rows = rows_of(digests_of("item", np.arange(100_000) * 64), 100)
    assert np.abs(np.bincount(rows, minlength=100) - 1000).max() < 150


@pytest.mark.parametrize("ids", [[1.5], [True], [b"a"], [None, "a"]])
def test_what_is_no_id_is_refused(ids: list[object]) -> None:
    with pytest.raises(UserError, match=r"table 'item' of dtype .*, expected integers, or str"):
        digests_of("item", np.asarray(ids))
