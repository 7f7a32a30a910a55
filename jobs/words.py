"""Word2vec's skip-gram with negative sampling: rows of words that occur alike become alike.

    python jobs/documentation.py documentation.txt
    mpirun -n 4 python jobs/words.py documentation.txt list client width

A word has a row in each of two tables: `in` as the word in the middle, `out` as a neighbour. Any
text will do, a sentence or a paragraph a line. Nodes of a graph are words too: write random walks,
a walk a line. At the end the program prints the words nearest to those that are named.

References: Mikolov et al., "Distributed Representations of Words and Phrases and their
Compositionality", NIPS 2013.
"""

import argparse
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpips

DIM, REACH, NEGATIVES = 64, 5, 5  # numbers of a row; distance of neighbours; drawn beside each
LEAST, FREQUENT = 10, 1e-3  # occurrences of a word; share of the text above which it is thinned out
BATCH, RATE = 512, 0.1


class Text:
    """A text as numbers of its words, the most frequent word first.

    Args:
        path: The file, UTF-8.

    Attributes:
        words: The words that occur often enough, by number.
        counts: How often each occurs, shape (words,).
        numbers: The text, shape (size,): -1 for other words, and `REACH` times behind each line.
        places: Where words are in `numbers`, shape (n,): the samples.
    """

    def __init__(self, path: str) -> None:
        text = Path(path).read_text("utf-8").lower()
        lines = [re.findall(r"\w+", line) for line in text.splitlines()]
        counted = Counter(word for line in lines for word in line).most_common()
        found = [(word, n) for word, n in counted if n >= LEAST]
        self.words = [word for word, _ in found]
        self.counts = np.array([n for _, n in found])
        known = {word: number for number, word in enumerate(self.words)}
        numbers = [-1] * REACH
        for line in lines:
            numbers += [known[word] for word in line if word in known] + [-1] * REACH
        self.numbers = np.array(numbers)
        self.places = np.flatnonzero(self.numbers >= 0)
        share = self.counts / self.counts.sum()
        self.kept = np.minimum(1, np.sqrt(FREQUENT / share) + FREQUENT / share)
        self.drawn = np.cumsum(self.counts**0.75) / (self.counts**0.75).sum()

    def pairs(self, samples: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw the pairs of some samples.

        Returns:
            The sample of each pair, shape (m,), and its neighbour and the words that are drawn
            beside it, shape (m, 1 + NEGATIVES).
        """
        steps = np.array([*range(-REACH, 0), *range(1, REACH + 1)])
        near = self.numbers[self.places[samples][:, None] + steps]
        used = (near >= 0) & (np.abs(steps) <= rng.integers(1, REACH + 1, (len(samples), 1)))
        used &= rng.random(near.shape) < self.kept[near]
        used &= rng.random((len(samples), 1)) < self.kept[self.numbers[self.places[samples]], None]
        middle, at = np.nonzero(used)
        negatives = np.searchsorted(self.drawn, rng.random((len(middle), NEGATIVES)))
        return middle, np.column_stack([near[middle, at], negatives])


def gradients(
    v: np.ndarray, u: np.ndarray, middle: np.ndarray, words: np.ndarray, n: int
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the mean loss over samples, and its gradients.

    The loss of a pair is ``-log s(v . u_0) - sum_k log s(-v . u_k)`` with ``s(x) = 1 / (1 +
    exp(-x))``; a word that is drawn and is the neighbour itself is left out.

    Args:
        v: Rows of the samples' words, shape (n, DIM).
        u: Rows of `words`, shape (m, 1 + NEGATIVES, DIM).
        middle: The sample of each pair, shape (m,).
        words: Of each pair, the neighbour first, shape (m, 1 + NEGATIVES).
        n: Samples.
    """
    scores = np.einsum("md,mkd->mk", v[middle], u)
    signs = np.where(np.arange(words.shape[1]) == 0, -1.0, 1.0)
    counted = (words != words[:, :1]) | (signs < 0)
    loss = (np.logaddexp(0, signs * scores) * counted).sum() / n
    slopes = (signs / (1 + np.exp(-signs * scores)) * counted / n).astype(v.dtype)
    of_v = np.zeros_like(v)
    np.add.at(of_v, middle, np.einsum("mk,mkd->md", slopes, u))
    return float(loss), of_v, slopes[:, :, None] * v[middle][:, None]


def train(worker: mpips.Worker, text: Text, epochs: int) -> None:
    """Train on batches of words; what is drawn depends on the batch alone."""
    for batch in worker.batches(len(text.places), batch_size=BATCH, epochs=epochs):
        rng = np.random.default_rng([batch.epoch, int(batch.ids[0])])
        middle, words = text.pairs(batch.ids, rng)
        own = text.numbers[text.places[batch.ids]]
        v, u = worker.pull_rows("in", own), worker.pull_rows("out", words)
        loss, of_v, of_u = gradients(v, u, middle, words, len(batch))
        worker.push_rows("in", own, of_v)
        worker.push_rows("out", words, of_u)
        worker.push(loss=loss)


def nearest(rows: np.ndarray, number: int, count: int) -> list[int]:
    """Return the numbers of the words whose rows have the largest cosines to that of a word."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return [k for k in np.argsort(-unit @ unit[number])[: count + 1].tolist() if k != number]


def main(argv: list[str] | None = None) -> int:
    """Train, and print the nearest words on rank 0; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text", metavar="TEXT", help="a text file")
    parser.add_argument("words", nargs="*", metavar="WORD", help="whose nearest words are printed")
    parser.add_argument("--mode", default="async", choices=("async", "ssp", "sync"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--count", type=int, default=8, help="of nearest words [default: 8]")
    parser.add_argument("--out", default="words", metavar="DIR", help="folder of the run")
    args = parser.parse_args(argv)
    text = Text(args.text)
    asked = [word.lower() for word in args.words]
    if not text.words:
        parser.error(f"{args.text}: no word occurs {LEAST} times, expected a longer text")
    if unknown := [word for word in asked if word not in text.words]:
        parser.error(f"{', '.join(unknown)}: expected words that occur {LEAST} times in the text")
    result = mpips.run(
        partial(train, text=text, epochs=args.epochs),
        params={},
        tables={
            "in": mpips.Table(
                len(text.words), DIM, mpips.Uniform(0.5 / DIM), optimizer=mpips.Adagrad(RATE)
            ),
            "out": mpips.Table(
                len(text.words), DIM, mpips.Zeros(), optimizer=mpips.Adagrad(RATE)
            ),
        },
        mode=args.mode, out=args.out, resume="auto",
    )  # fmt: skip
    if MPI.COMM_WORLD.rank == 0 and result.code == 0:
        rows = result.rows("in", np.arange(len(text.words)))
        for word in asked:
            near = nearest(rows, text.words.index(word), args.count)
            print(f"{word}: {', '.join(text.words[k] for k in near)}", flush=True)
    return result.code


if __name__ == "__main__":
    sys.exit(main())
