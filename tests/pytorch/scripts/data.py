"""Data that the scripts make on the spot, in place of what their published forms download."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

from mpips.config import Config
from mpips.datasets import open_dataset


def digits(train: bool) -> TensorDataset:
    """Return handwritten digits of 8 x 8 points, in place of MNIST."""
    with open_dataset(Config()) as data:
        source = data.train if train else data.test
        assert source is not None
        x, y = source.load(0, source.n, np.dtype("f4"))
    return TensorDataset(torch.tensor(x).view(-1, 1, 8, 8), torch.tensor(y))


def text(length: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a text as numbers of letters, to train on and held out, and the number of letters.

    In place of Shakespeare it has six words, each of which is followed by one of two.
    """
    rng, words = np.random.default_rng(0), ["abc", "cade", "ebb", "fad", "gab", "hidge"]
    found, at = "", 0
    while len(found) < length:
        found += words[at] + " "
        at = (at + int(rng.integers(1, 3))) % len(words)
    letters = sorted({*found})
    ids = torch.tensor([letters.index(letter) for letter in found[:length]])
    return ids[: length * 9 // 10], ids[length * 9 // 10 :], len(letters)
