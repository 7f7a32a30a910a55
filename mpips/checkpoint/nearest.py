"""Which rows of a table are most like some: the nearest words, where rows are those of words."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mpips.checkpoint.place import WORDS
from mpips.checkpoint.reader import Checkpoint
from mpips.checkpoint.rows import ROWS
from mpips.checkpoint.shards import PARAMS
from mpips.errors import UserError, nearest, unknown

BLOCK = 1 << 16  # rows at a time
OF_WORDS = "in"  # the table of problem skipgram whose rows are compared
Near = list[tuple[str, float]]


def find_nearest(
    checkpoint: Checkpoint, asked: Sequence[str], table: str, count: int
) -> Iterator[tuple[str, Near]]:
    """Yield each of some rows with those whose cosine to it is the largest, itself left out.

    Rows that nobody has changed are not among them.

    Args:
        checkpoint: Where the rows are.
        asked: Words of the run's `WORDS`, or numbers of rows where it has none.
        table: The table's name; empty for the only one, or that of words.
        count: How many.

    Raises:
        UserError: If there is no such table or word, or no such row was changed.
    """
    if count < 1:
        raise UserError(f"{count} nearest rows", "at least 1", "give another --count")
    name = _table(checkpoint, table)
    words = words_of(checkpoint.path)
    rows = checkpoint.read_column(name, ROWS)
    params = checkpoint.read_column(name, PARAMS)
    norms = np.maximum(np.linalg.norm(params, axis=1), np.finfo(params.dtype).tiny)
    places = dict(zip(rows.tolist(), range(len(rows)), strict=True))
    for word in asked:
        number = _number(word, words)
        if number not in places:
            got = f"{word}, whose row of table {name!r} nobody has changed"
            raise UserError(got, "one that was trained on")
        cosines = _cosines(params, norms, places[number])
        cosines[places[number]] = -2
        best = np.argsort(-cosines, kind="stable")[: min(count, len(rows) - 1)]
        shown = (int(rows[k]) for k in best)
        labels = [words[k] if words else str(k) for k in shown]
        yield word, list(zip(labels, cosines[best].tolist(), strict=True))


def _cosines(params: np.ndarray, norms: np.ndarray, place: int) -> np.ndarray:
    """Return the cosine of each row to one, shape (rows,)."""
    out, own = np.empty(len(params), params.dtype), params[place] / norms[place]
    for at in range(0, len(params), BLOCK):
        out[at : at + BLOCK] = params[at : at + BLOCK] @ own / norms[at : at + BLOCK]
    return out


def _table(checkpoint: Checkpoint, name: str) -> str:
    known = tuple(checkpoint.tables)
    if not known:
        raise UserError(f"{checkpoint.path} without tables", "a run with tables of rows")
    if not name:
        name = OF_WORDS if OF_WORDS in known else known[0]
        if len(known) > 1 and name != OF_WORDS:
            raise UserError(f"{len(known)} tables", "the name of one", f"--table {known[0]}, say")
    if name not in known:
        raise unknown("table", name, known)
    return name


def words_of(folder: Path) -> list[str]:
    """Return the words of a checkpoint's run, by number; none where its rows are no words."""
    path = folder.resolve().parent.parent / WORDS
    if not path.is_file():
        return []
    return [line.partition(" ")[0] for line in path.read_text().splitlines()]


def _number(word: str, words: list[str]) -> int:
    """Return the row of a word, or of a number."""
    if not words:
        if not word.isdecimal():
            raise UserError(f"{word!r} in a run without {WORDS}", "the number of a row")
        return int(word)
    try:
        return words.index(word.lower())
    except ValueError:
        remedy = nearest(word, words) or f"{WORDS} in the run's folder has them"
        raise UserError(f"unknown word {word!r}", f"one of {len(words):,} words", remedy) from None
