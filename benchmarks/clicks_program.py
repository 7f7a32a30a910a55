"""Program of the ranks of `hybrid`: ``python -m benchmarks.clicks_program GIVEN``.

The ranks train a click model in PyTorch by one mode after another, in their own world and folder.
The first rank writes the results of each run. Clicks are generated: a view has numbers, and
categories drawn by Zipf's law. Its probability of a click depends on the numbers, on a weight of
each category, and on pairs of categories.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt
from benchmarks.hybrid import OUT

FIELDS, VALUES, NUMBERS, DIM = 6, 200, 4, 8
HELD_OUT = 8000
ROW_RATE = 0.1


class WideDeep(nn.Module):
    """A weight for each category, and a perceptron on the categories' vectors and the numbers.

    References: Cheng et al., DLRS 2016.
    """

    def __init__(self) -> None:
        super().__init__()
        rule = mpips.Adagrad(ROW_RATE)
        zero = mpips.Zeros()
        self.wide = mt.EmbeddingBag(FIELDS * VALUES, 1, mode="sum", init=zero, optimizer=rule)
        small = mpips.Normal(0.1)
        self.vectors = mt.Embedding(FIELDS * VALUES, DIM, init=small, optimizer=rule)
        self.deep = _perceptron(NUMBERS + FIELDS * DIM, 64, 32, 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (n,), of numbers (n, NUMBERS) and categories (n, FIELDS)."""
        found = torch.cat([x, self.vectors(ids).flatten(1)], 1)
        return (self.wide(ids) + self.deep(found))[:, 0]


class Dlrm(nn.Module):
    """A perceptron on the dot products of all pairs of vectors, one of them from the numbers.

    References: Naumov et al., 2019.
    """

    def __init__(self) -> None:
        super().__init__()
        given = {"init": mpips.Normal(0.1), "optimizer": mpips.Adagrad(ROW_RATE)}
        self.vectors = mt.Embedding(FIELDS * VALUES, DIM, **given)
        self.bottom = _perceptron(NUMBERS, 32, DIM)
        self.top = _perceptron(DIM + FIELDS * (FIELDS + 1) // 2, 64, 32, 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, as `WideDeep.forward` does."""
        dense = self.bottom(x)
        found = torch.cat([dense[:, None], self.vectors(ids)], 1)
        i, j = torch.tril_indices(FIELDS + 1, FIELDS + 1, offset=-1)
        pairs = torch.bmm(found, found.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([dense, pairs], 1))[:, 0]


MODELS = {"wide & deep": WideDeep, "DLRM": Dlrm}


def _perceptron(*widths: int) -> nn.Sequential:
    layers = list[nn.Module]()
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def clicks(samples: int, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out views, each as numbers, categories, and labels 0 or 1."""
    rng = np.random.default_rng(seed)
    chance = 1 / np.arange(1, VALUES + 1) ** 1.05
    n = samples + HELD_OUT
    values = rng.choice(VALUES, (n, FIELDS), p=chance / chance.sum())
    x = rng.normal(size=(n, NUMBERS))
    pull, hidden = rng.normal(0, 0.5, (FIELDS, VALUES)), rng.normal(size=(FIELDS, VALUES, 2))
    each = np.arange(FIELDS)
    taste = hidden[each, values]
    logit = pull[each, values].sum(1) + np.sin(2 * x[:, 0]) * 2 + x[:, 1] * x[:, 2]
    logit += (taste[:, 0::2] * taste[:, 1::2]).sum((1, 2))  # of fields 0 and 1, 2 and 3, ...
    y = rng.random(n) < 1 / (1 + np.exp(-logit))
    found = (x.astype("f4"), values + VALUES * each, y.astype("f4"))
    tensors = [torch.from_numpy(array) for array in found]
    train, held_out = slice(0, samples), slice(samples, None)
    return (
        TensorDataset(*(t[train] for t in tensors)),
        TensorDataset(*(t[held_out] for t in tensors)),
    )


def metrics(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return means over a batch."""
    x, ids, y = batch
    found = model(x, ids)
    loss = F.binary_cross_entropy_with_logits(found, y)
    return {"loss": float(loss), "accuracy": float(((found > 0) == (y > 0)).float().mean())}


def train(worker: mt.Worker, data: TensorDataset) -> None:
    """Train a worker's model."""
    model, opt = worker.model, worker.optimizer
    for x, ids, y in worker.loader(data):
        opt.zero_grad()
        F.binary_cross_entropy_with_logits(model(x, ids), y).backward()
        opt.step()


def make_runs(
    folder: Path, model: str, rate: float, samples: int, runs: list[tuple[int, str, dict]]
) -> list[dict[str, Any]]:
    """Run jobs, each of a seed, a name and options, and return the results of each."""
    torch.set_num_threads(1)
    found = []
    for number, (seed, name, given) in enumerate(runs):
        data, held_out = clicks(samples, seed)
        start = time.perf_counter()
        result = mt.run(
            lambda worker, data=data: train(worker, data), MODELS[model], mpips.Adam(rate),
            out=folder / f"run-{number}", seed=seed, quiet=True, eval_every=0, checkpoint_every=0,
            evaluate=metrics, held_out=held_out, **given,
        )  # fmt: skip
        s = result.summary
        kept = {key: s[key] for key in ("eval_loss", "accuracy", "train_s", "samples", "staleness")}
        kept["wall_s"] = time.perf_counter() - start
        found.append({"name": name, "seed": seed, **kept})
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def main(**given: Any) -> None:
    """Run jobs in the current folder, and write the results of each."""
    found = make_runs(Path(), **given)
    if MPI.COMM_WORLD.rank == 0:
        Path(OUT).write_text(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
