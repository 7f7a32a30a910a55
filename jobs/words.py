"""Words of Python's documentation strings get numbers, of which those of related words are alike.

That is word2vec's skip-gram with negative sampling: from the numbers of a word, its neighbours in
the text are told from words drawn at random. A word has a row in each of two tables, which lie with
the servers: `in` as the word in the middle, `out` as a neighbour.

    mpirun -n 4 python jobs/words.py
    mpirun -n 4 python jobs/words.py --mode ssp --show list,client

It ends with the nearest words to some, and with how many of 20 pairs are found, such as `width` and
`height`, `client` and `server`, `read` and `write`: those of which one is among the 20 words
nearest to the other, of 2,500. By chance it would be none; expect 17 to 20.

References: Mikolov et al., "Distributed Representations of Words and Phrases and their
Compositionality", NIPS 2013; A. Walker, ACM TOMS 3 (1977), for the alias table.
"""

import argparse
import functools
import re
from collections import Counter
from typing import NamedTuple

import numpy as np
from documentation import strings
from mpi4py import MPI
from numba import njit

import mpips

DIM, WINDOW, NEGATIVES, LEAST = 64, 5, 5, 10  # LEAST: occurrences of a word
FREQUENT = 1e-3  # share of the text above which words are left out, the more the more frequent
POWER = 0.75  # of the frequency, in what is drawn
RATE, BATCH = 0.1, 512
NEAREST = 20
PAIRS = """
list tuple  int float  minimum maximum  client server  start stop  input output  read write
encode decode  month year  row column  width height  parent child  encoding charset
threads processes  keys values  year day  host port  upper lower  signal handler  left right
"""


class Text(NamedTuple):
    """A text as numbers of words.

    Attributes:
        words: By their number, the most frequent first.
        numbers: Of each word of the text, -1 between two strings, shape (n,), int32.
        kept: Share of a word's occurrences that is read, shape (words,).
        alias: See `alias_table`.
    """

    words: list[str]
    numbers: np.ndarray
    kept: np.ndarray
    alias: tuple[np.ndarray, np.ndarray]


@functools.cache
def text(length: int) -> Text:
    """Return the first `length` characters of documentation."""
    found = [re.findall("[a-z]+", each.lower()) for each in strings(length)]
    counted = Counter(word for each in found for word in each)
    words = [word for word, count in counted.most_common() if count >= LEAST]
    known = {word: k for k, word in enumerate(words)}
    numbers = [[*(known[word] for word in each if word in known), -1] for each in found]
    counts = np.array([counted[word] for word in words], float)
    share = counts / counts.sum()
    kept = np.minimum(1, np.sqrt(FREQUENT / share) + FREQUENT / share)
    return Text(words, np.concatenate(numbers).astype("i4"), kept, alias_table(counts**POWER))


def alias_table(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what draws by weights in one look: each place keeps itself for a share, else another.

    Args:
        weights: Shape (n,), positive.

    Returns:
        The share and the other of each place, shape (n,) both.
    """
    share = weights * (len(weights) / weights.sum())
    other = np.arange(len(weights))
    small, large = ([*np.flatnonzero(found)] for found in (share < 1, share >= 1))
    while small and large:
        low, high = small.pop(), large.pop()
        other[low] = high
        share[high] -= 1 - share[low]
        (small if share[high] < 1 else large).append(high)
    share[[*small, *large]] = 1  # but for rounding
    return share, other


@njit
def pairs(
    numbers: np.ndarray, at: np.ndarray, kept: np.ndarray, share: np.ndarray, other: np.ndarray,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the neighbours of words, and what they are to be told from.

    Args:
        numbers: The text.
        at: Where the words in the middle are, shape (n,).
        kept: See `Text`.
        share: See `alias_table`.
        other: Likewise.
        seed: Of all that is drawn.

    Returns:
        The index in `at` of each pair, shape (m,), and its words, the neighbour first and then
        those that were drawn, shape (m, 1 + NEGATIVES).
    """
    np.random.seed(seed)
    most = 2 * WINDOW * at.size
    middle, words = np.empty(most, np.int64), np.empty((most, 1 + NEGATIVES), np.int64)
    m = 0
    for i in range(at.size):
        word = numbers[at[i]]
        if word < 0 or np.random.random() > kept[word]:
            continue
        reach = np.random.randint(1, WINDOW + 1)
        for step in (-1, 1):
            place = at[i] + step
            while 0 <= place < numbers.size and abs(place - at[i]) <= reach and numbers[place] >= 0:
                near = numbers[place]
                place += step
                if np.random.random() > kept[near]:
                    continue
                middle[m], words[m, 0] = i, near
                for k in range(1, 1 + NEGATIVES):
                    drawn = np.random.randint(share.size)
                    words[m, k] = drawn if np.random.random() < share[drawn] else other[drawn]
                m += 1
    return middle[:m], words[:m]


@njit(error_model="numpy")
def gradients(
    middle: np.ndarray, words: np.ndarray, v: np.ndarray, u: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the mean loss of pairs, and the gradients of their sum.

    That of a pair is ``-log s(v . u_0) - sum_k log s(-v . u_k)`` with s(x) = 1 / (1 + exp(-x)),
    but that a word that was drawn and is the neighbour itself does not count.

    Args:
        middle: The row in `v` of each pair, shape (m,).
        words: The words of its rows in `u`, shape (m, 1 + NEGATIVES).
        v: Rows of words in the middle, shape (n, DIM).
        u: Rows of neighbours and of what was drawn, shape (m, 1 + NEGATIVES, DIM).
    """
    loss, of_v, of_u = 0.0, np.zeros_like(v), np.zeros_like(u)
    for p in range(middle.size):
        i = middle[p]
        for k in range(words.shape[1]):
            if k and words[p, k] == words[p, 0]:
                continue
            score = 0.0
            for j in range(v.shape[1]):
                score += v[i, j] * u[p, k, j]
            signed = -score if k == 0 else score
            loss += max(signed, 0) + np.log1p(np.exp(-abs(signed)))
            slope = v.dtype.type(1 / (1 + np.exp(-score)) - (k == 0))
            for j in range(v.shape[1]):
                of_v[i, j] += slope * u[p, k, j]
                of_u[p, k, j] = slope * v[i, j]
    return loss / max(1, middle.size), of_v, of_u


def neighbours(rows: np.ndarray) -> np.ndarray:
    """Return the words by their cosine to each, the nearest first, itself left out."""
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -2)
    return np.argsort(-cosines, axis=1)[:, :-1]


def found_pairs(words: list[str], nearest: np.ndarray) -> tuple[list[str], int]:
    """Return the pairs that are near each other, and how many were looked for."""
    known = {word: k for k, word in enumerate(words)}
    asked = [pair.split() for pair in re.split(r"  |\n", PAIRS.strip())]
    asked = [(a, b) for a, b in asked if a in known and b in known]
    near = nearest[:, :NEAREST]

    def found(a: str, b: str) -> bool:
        return known[b] in near[known[a]] or known[a] in near[known[b]]

    return [f"{a} {b}" for a, b in asked if found(a, b)], len(asked)


def run(args: argparse.Namespace) -> mpips.Result:
    """Train on all ranks."""

    def train(worker: mpips.Worker) -> None:
        found = text(args.text)
        for batch in worker.batches(len(found.numbers), batch_size=BATCH, epochs=args.epochs):
            at, seed = batch.ids, 1000 * batch.epoch + int(batch.ids[0])
            middle, words = pairs(found.numbers, at, found.kept, *found.alias, seed)
            v = worker.pull_rows("in", found.numbers[at].clip(0))
            u = worker.pull_rows("out", words)
            loss, of_v, of_u = gradients(middle, words, v, u)
            worker.push_rows("in", found.numbers[at].clip(0), of_v)
            worker.push_rows("out", words, of_u)
            worker.push(loss=loss)

    rows = len(text(args.text).words)
    rule = mpips.Adagrad(RATE)
    return mpips.run(
        train, params={}, mode=args.mode, out=args.out, tables={
            "in": mpips.Table(rows, DIM, mpips.Uniform(0.5 / DIM), rule),
            "out": mpips.Table(rows, DIM, mpips.Zeros(), rule),
        },
    )  # fmt: skip


def main(argv: list[str] | None = None) -> float:
    """Train, and print the nearest words to some; returns the share of pairs that are found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="async", choices=("async", "ssp"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--text", type=int, default=2_000_000, metavar="CHARACTERS", help="of documentation"
    )
    parser.add_argument("--out", default="", metavar="DIR", help="by default a new one in runs")
    parser.add_argument("--show", default="list,client,width,month,encode", metavar="WORD,..")
    args = parser.parse_args(argv)
    result, words = run(args), text(args.text).words
    nearest = neighbours(result.rows("in", np.arange(len(words))))
    found, asked = found_pairs(words, nearest)
    if MPI.COMM_WORLD.rank == 0:
        for word in set(args.show.split(",")) & set(words):
            print(f"{word}: {' '.join(words[k] for k in nearest[words.index(word), :8])}")
        print(f"{len(found)} of {asked} pairs: {', '.join(found)}", flush=True)
    return len(found) / asked


if __name__ == "__main__":
    main()
