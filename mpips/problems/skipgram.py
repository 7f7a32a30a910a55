"""Skip-gram with negative sampling: rows of words, of which related ones become alike."""

from collections import deque
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mpips.datasets.order import bits_of
from mpips.errors import UserError
from mpips.kernels import skipgram
from mpips.layout import Layout
from mpips.layout.tables import Table, Uniform, Zeros
from mpips.problems.base import Arrays
from mpips.problems.rows import RowReads, Rows, TableProblem

if TYPE_CHECKING:
    from mpips.config import Config
    from mpips.datasets.base import Batch, DataInfo

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]  # see `SkipGram._pairs`

MIDDLE, NEIGHBOUR = "in", "out"  # tables
FREQUENT = 1e-3  # share of the text above which words are left out, the more the more frequent
POWER = 0.75  # of the frequency, in what is drawn
TRAINED, HELD_OUT = 11, 12  # streams of what is drawn


class SkipGram(TableProblem):
    """Word2vec's skip-gram: from a word's row its neighbours are told from words that are drawn.

    Equation, for a word with row v of table `in`, each of its neighbours, u_0 of table `out`, and
    ``config.negatives`` words u_k drawn by their frequency to the power of 3/4, with
    s(x) = 1 / (1 + exp(-x))::

        loss = 1/n sum_words sum_neighbours -log s(v . u_0) - sum_k log s(-v . u_k)

    Of a word's neighbours those within a distance are taken that is drawn from 1 to
    ``config.context``; a word of share f of the text counts, as one or the other, with probability
    ``sqrt(t / f) + t / f`` where that is below 1, t = 0.001. A draw that is the neighbour itself is
    left out. What is drawn for a sample depends on its number, the epoch and the seed.

    No parameters. Tables, a row of ``config.dim`` numbers a word: ``in``, uniformly distributed
    at first, and ``out``, zero at first.

    Raises:
        UserError: If the data is no text.

    References: Mikolov et al., "Distributed Representations of Words and Phrases and their
    Compositionality", NIPS 2013.
    """

    name = "skipgram"

    def __init__(self, data: "DataInfo", config: "Config") -> None:
        super().__init__(data, config)
        if data.vocabulary is None:
            got = f"problem {self.name!r} with dataset {data.name!r}, whose samples are no words"
            raise UserError(got, "a text file", "name one: --dataset corpus.txt")
        self._vocabulary = data.vocabulary
        self._last: deque[tuple[Batch, Pairs]] = deque(maxlen=2)
        words, dim = len(self._vocabulary), config.dim
        self.layout = Layout.of({})
        # A push has a step's neighbours and what is drawn for each, or all words.
        most = config.step_size * 2 * config.context * (1 + config.negatives)
        room = max(1, min(words, most))
        self.tables = {
            MIDDLE: Table(words, dim, Uniform(0.5 / dim), push_rows=min(words, config.step_size)),
            NEIGHBOUR: Table(words, dim, Zeros(), push_rows=room),
        }

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return nothing: all is in tables."""
        return {}

    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: "Batch", out: Arrays) -> float:
        """Return the mean loss over the words of a batch, and push the gradient of its rows."""
        middle, words, ids = self._drawn(batch)
        own = self._own(batch)
        v, u = rows.pull(MIDDLE, own), rows.pull(NEIGHBOUR, ids)
        of_v, of_u = np.zeros_like(v), np.zeros_like(u)
        scale = 1 / len(batch)
        with np.errstate(all="ignore"):
            loss = scale * skipgram.gradients(middle, words, v, u, scale, of_v, of_u)
        if np.isfinite(loss):
            used = np.unique(middle)
            rows.push(MIDDLE, own[used], of_v[used])
            rows.push(NEIGHBOUR, ids, of_u)
        return float(loss)

    def evaluate_rows(self, params: Arrays, rows: RowReads, batch: "Batch") -> dict[str, float]:
        """Return ``{"loss": mean loss}``; what is drawn for a sample is always the same."""
        middle, words, ids = self._pairs(batch, HELD_OUT)
        v, u = rows.pull(MIDDLE, self._own(batch)), rows.pull(NEIGHBOUR, ids)
        none = np.zeros((0, v.shape[1]), v.dtype)
        with np.errstate(all="ignore"):
            loss = skipgram.gradients(middle, words, v, u, 0.0, none, none)
        return {"loss": loss / len(batch)}

    def wanted_rows(self, batch: "Batch") -> Mapping[str, np.ndarray]:
        """Return the words of a batch, and those that are drawn for it."""
        _, _, ids = self._drawn(batch)
        return {MIDDLE: self._own(batch), NEIGHBOUR: ids}

    def _drawn(self, batch: "Batch") -> Pairs:
        """Return the pairs of a batch that is trained on: those of the last two are kept."""
        for kept, pairs in self._last:
            if kept is batch:
                return pairs
        self._last.append((batch, self._pairs(batch, TRAINED)))
        return self._last[-1][1]

    def _own(self, batch: "Batch") -> np.ndarray:
        """Return the number of each sample's word, shape (n,), int64; 0 where it has none."""
        own = np.zeros(len(batch), np.int64)
        here = batch.x.values == 0
        own[batch.x.samples[here]] = batch.x.indices[here]
        return own

    def _pairs(self, batch: "Batch", stream: int) -> Pairs:
        """Draw the pairs of a batch.

        Returns:
            The sample of each, shape (m,); the places of its neighbour and of what was drawn in
            the words, shape (m, 1 + negatives); and these words, each once, shape (k,). All int64.
        """
        x, seed = batch.x, self.config.seed
        draws = bits_of(batch.ids, stream, seed, batch.epoch)
        middle = np.empty(len(x.indices), np.int64)
        words = np.empty((len(x.indices), 1 + self.config.negatives), np.int64)
        reach = self.config.context
        count = skipgram.pairs(
            x.starts, x.indices, x.values, draws, self._chances, reach, middle, words
        )
        middle, words = middle[:count], words[:count]
        ids = np.empty(min(words.size, len(self._vocabulary)), np.int64)
        return middle, words, ids[: skipgram.number_words(words, self._places, ids)]

    @cached_property
    def _chances(self) -> np.ndarray:
        """See `mpips.kernels.skipgram.pairs`."""
        counts = self._vocabulary.counts.astype(float)
        share = counts / counts.sum()
        kept = np.minimum(1, np.sqrt(FREQUENT / share) + FREQUENT / share)
        return np.array([kept, *alias_table(counts**POWER)])

    @cached_property
    def _places(self) -> np.ndarray:
        return np.full(len(self._vocabulary), -1, np.int32)


def alias_table(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what draws by weights in one look: each place keeps itself for a share, else another.

    Args:
        weights: Shape (n,), positive.

    Returns:
        The share and the other of each place, shape (n,) both, float64 and int64.

    References: A. Walker, ACM TOMS 3 (1977).
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
