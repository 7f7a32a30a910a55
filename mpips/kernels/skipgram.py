"""The loops of skip-gram with negative sampling: pairs of words, their loss and its gradients."""

import numpy as np

from mpips.kernels.compiled import Vector, kernel
from mpips.kernels.row_keys import mixed

Matrix = np.ndarray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(11)
_UNIT = 2.0**-53


@kernel(quick=True)
def drawn(state: Vector) -> float:
    """Return the next number in [0, 1) of a stream of SplitMix64, whose state goes on."""
    state[0] += _GOLDEN
    return (mixed(state[0]) >> _SHIFT) * _UNIT


@kernel()
def pairs(
    starts: Vector, indices: Vector, distances: Vector, draws: Vector, chances: Matrix,
    reach: int, middle: Vector, words: Matrix,
) -> int:  # fmt: skip
    """Draw the neighbours of words that are trained on, and what they are to be told from.

    What is drawn for a word depends on its own random start alone.

    Args:
        starts: Where each word's neighbours begin, and the end, shape (n + 1,), int64.
        indices: Their numbers, the word itself among them, shape (stored,), int64.
        distances: How far each stands from it, 0 for itself, shape (stored,).
        draws: A random start a word, shape (n,), uint64; overwritten.
        chances: For each word the share of its occurrences that is trained on, and share and other
            of `mpips.problems.skipgram.alias_table`, shape (3, words), float64.
        reach: The largest distance.
        middle: Where the index of each pair's word goes, as long as `indices`, int64.
        words: Where its neighbour and then those drawn go, shape (len(indices), 1 + negatives).

    Returns:
        How many pairs there are.
    """
    m, kept, share, other = 0, chances[0], chances[1], chances[2]
    for i in range(starts.size - 1):
        state = draws[i : i + 1]
        begin, end = starts[i], starts[i + 1]
        own = begin
        while own < end and distances[own] != 0:
            own += 1
        if own == end or drawn(state) >= kept[indices[own]]:
            continue
        most = 1 + int(drawn(state) * reach)
        for at in range(begin, end):
            near = indices[at]
            if at == own or abs(distances[at]) > most or drawn(state) >= kept[near]:
                continue
            middle[m], words[m, 0] = i, near
            for k in range(1, words.shape[1]):
                place = int(drawn(state) * share.size)
                words[m, k] = place if drawn(state) < share[place] else int(other[place])
            m += 1
    return m


@kernel()
def number_words(words: Matrix, place: Vector, ids: Vector) -> int:
    """Number the words of pairs in the order in which they come, each once.

    Args:
        words: Shape (pairs, k), int64; becomes the numbers.
        place: -1 for each word of the vocabulary, int32; it is so afterwards.
        ids: Where the words go, by number, as long as there may be, int64.

    Returns:
        How many there are.
    """
    count = 0
    for p in range(words.shape[0]):
        for k in range(words.shape[1]):
            word = words[p, k]
            if place[word] < 0:
                place[word], ids[count] = count, word
                count += 1
            words[p, k] = place[word]
    for k in range(count):
        place[ids[k]] = -1
    return count


@kernel("contract", "reassoc")
def gradients(
    middle: Vector, words: Matrix, v: Matrix, u: Matrix, scale: float, of_v: Matrix, of_u: Matrix
) -> float:
    """Add up the loss of pairs, and its gradients.

    That of a pair is ``-log s(v . u_0) - sum_k log s(-v . u_k)`` with s(x) = 1 / (1 + exp(-x)),
    but that a word that was drawn and is the neighbour itself does not count.

    Args:
        middle: The row in `v` of each pair, shape (m,), int64.
        words: Its rows in `u`, the neighbour's first, shape (m, 1 + negatives), int64.
        v: Rows of words in the middle, shape (n, dim).
        u: Rows of neighbours and of what was drawn, shape (words, dim).
        scale: What the gradients are multiplied by.
        of_v: What gradients by `v` are added to, its shape and dtype; empty for the loss alone.
        of_u: Likewise by `u`.

    Returns:
        The sum of the losses, not scaled.
    """
    loss, dim, real = 0.0, v.shape[1], v.dtype.type
    for p in range(middle.size):
        a = v[middle[p]]
        for k in range(words.shape[1]):
            if k and words[p, k] == words[p, 0]:
                continue
            b, score = u[words[p, k]], real(0)
            for j in range(dim):
                score += a[j] * b[j]
            signed = float(score) if k else -float(score)
            loss += max(signed, 0.0) + np.log1p(np.exp(-abs(signed)))
            if of_v.size == 0:
                continue
            slope = real(scale * (1 / (1 + np.exp(-float(score))) - (k == 0)))
            c, d = of_v[middle[p]], of_u[words[p, k]]
            for j in range(dim):
                c[j] += slope * b[j]
                d[j] += slope * a[j]
    return loss
