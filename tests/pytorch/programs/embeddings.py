"""Embeddings whose rows are tables: ``embeddings.py OUT``; three ranks.

With one worker, and rows that are read when its push before has been applied, N steps of a model
are those of plain torch with its sparse gradients, whatever the bags are; over a stop, a resume on
other servers, and where steps are clipped and accumulated, or a rank evaluates beside the others.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt
from tests.jobs.several import wait_for_all

WORLD = MPI.COMM_WORLD
STEPS, SIZE, ROWS, DIM, RATE = 30, 10, 40, 4, 0.2
made = torch.Generator().manual_seed(1)
SAMPLES = 196  # an epoch's last batch is smaller
IDS = torch.randint(ROWS, (SAMPLES, 6), generator=made)
WEIGHTS = torch.rand(SAMPLES, 6, generator=made, dtype=torch.float64)
TARGETS = torch.randn(SAMPLES, DIM, generator=made, dtype=torch.float64)
DATA = TensorDataset(IDS, WEIGHTS, TARGETS)
PADDING = 3


class Net(nn.Module):
    """An embedding that is used twice, bags, and parameters; of torch.nn or mpips.torch."""

    def __init__(self, library: Any = mt, **more: Any) -> None:
        super().__init__()
        single, bag = (partial(getattr(library, k), **more) for k in ("Embedding", "EmbeddingBag"))
        self.single, self.unused = single(ROWS, DIM, padding_idx=PADDING), single(7, 2)
        self.bags = nn.ModuleDict({"sum": bag(ROWS, DIM, mode="sum"), "mean": bag(ROWS, DIM)})
        self.importance = nn.Parameter(torch.ones(ROWS, dtype=torch.float64))
        self.out = nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = self.single(ids[:, 0]) * self.single(ids[:, 1:]).mean(1) + self.bags["mean"](ids)
        found = found + self.bags["sum"](ids, per_sample_weights=weights * self.importance[ids])
        return self.out(torch.tanh(found))


def falling(step: int) -> float:
    """Return the factor of the rate."""
    return 0.95**step


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    ids, weights, targets = batch
    return F.mse_loss(model(ids, weights), targets)


def gradient(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    return loss


def metrics(model: nn.Module, batch: Any = DATA.tensors) -> dict[str, float]:
    with torch.no_grad():
        return {"loss": float(loss_of(model, batch))}


SSP: dict[str, Any] = {"mode": "ssp", "staleness_bound": 0}
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {  # rule, servers by part, options
    "sgd": ("sgd", (1, 2), SSP),
    "adagrad": ("adagrad", (2, 1), SSP),
    "accumulated": ("sgd", (1,), {**SSP, "clip": 0.1, "accumulate": 4}),
    "evaluated": ("sgd", (1,), {**SSP, "evaluators": 1, "eval_every": 0.5}),
    "rounds": ("adagrad", (1, 2), {"mode": "sync", "accumulate": 2}),
    "clipped rounds": ("sgd", (1,), {"mode": "sync", "clip": 0.3, "node_size": 1}),
}
RULES = {
    "sgd": (mpips.SGD(RATE), lambda p: torch.optim.SGD(p, RATE)),
    "adagrad": (mpips.Adagrad(RATE, eps=1e-8), lambda p: torch.optim.Adagrad(p, RATE, eps=1e-8)),
}


def rows_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all rows of a model's embeddings as weights, as they are now."""
    found = dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if isinstance(module, (mt.Embedding, mt.EmbeddingBag)):
            ids = torch.arange(module.num_embeddings)
            given = (ids,) if isinstance(module, mt.Embedding) else (ids, ids)
            found[f"{name}.weight"] = module(*given).detach()
    return found


def check(name: str, out: Path) -> None:
    """Compare a run of one worker with plain torch, which begins with the same rows."""
    rule, parts, options = CASES[name]
    first, batches, losses = dict[str, Any](), list[Any](), list[float]()

    def train(worker: mt.Worker) -> None:
        model, opt = worker.model, worker.optimizer
        schedule = LambdaLR(opt, falling)
        for batch in worker.loader(DATA, batch_size=SIZE):
            while schedule.last_epoch < worker.steps:
                schedule.step()
            if not first:
                first.update({n: t.clone() for n, t in model.state_dict().items()})
                first.update(rows_of(model))
            loss_of(model, batch)  # nobody goes back from it
            gradient(model, batch)
            opt.zero_grad()
            batches.append(batch)
            opt.step(partial(gradient, model, batch))
        losses.append(worker.evaluate(metrics, DATA)["loss"])

    for part, servers in enumerate(parts, 1):
        takes_part = WORLD.rank < servers + 1 + options.get("evaluators", 0)
        comm = WORLD.Split(0 if takes_part else MPI.UNDEFINED, WORLD.rank)
        if takes_part:
            how = {
                "servers": servers,
                "server_ranks": tuple(range(1, servers + 1)),
                "eval_every": 0,
            }
            result = mt.run(
                train, Net, RULES[rule][0], out=out, comm=comm, steps=STEPS * part // len(parts),
                resume="auto", quiet=True, evaluate=metrics, held_out=DATA, **how | options,
            )  # fmt: skip
            comm.Free()
        wait_for_all(WORLD)
    assert WORLD.allgather(bool(batches)).count(True) == 1, "there is one worker"
    if batches:
        model = plain(rule, first, batches, options)
        assert_equal(name, result, model, first)
        evaluated = [metrics(model)["loss"], result.summary["eval_loss"]]
        assert evaluated == pytest.approx([losses[-1]] * 2, abs=1e-12), name


def plain(rule: str, first: dict[str, Any], batches: list[Any], options: dict[str, Any]) -> Net:
    """Return the model of plain torch after the same steps."""
    clip, of_step = options.get("clip", 0), options.get("accumulate", 1)
    model = Net(nn, sparse=not clip, dtype=torch.float64)  # torch clips no sparse gradients
    model.load_state_dict(first)
    opt = RULES[rule][1](model.parameters())
    schedule = LambdaLR(opt, falling)
    assert len(batches) == STEPS * of_step, len(batches)
    for begin in range(0, len(batches), of_step):
        opt.zero_grad()
        parts = zip(*batches[begin : begin + of_step], strict=True)
        loss_of(model, [torch.cat(part) for part in parts]).backward()
        if clip:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = float(torch.stack([g.norm() for g in grads]).norm())
            assert norm > clip, "it is clipped"
            torch._foreach_mul_(grads, clip / norm)  # torch's own adds 1e-6 to the norm
        opt.step()
        schedule.step()
    return model


def assert_equal(name: str, result: mt.Result, model: Net, first: dict[str, Any]) -> None:
    for key, expected in model.state_dict().items():
        table, _, last = key.rpartition(".")
        if last == "weight" and table != "out":
            ids = [k for k in range(len(expected)) if k != PADDING or table != "single"]
            rows = torch.from_numpy(result.rows(table, ids))
            torch.testing.assert_close(rows, expected[ids], rtol=0, atol=1e-12, msg=f"{name} {key}")
            assert (first[key][ids] != rows).any() == (table != "unused"), (name, key)
    Net().load_state_dict(result.state_dict)  # strictly


def check_left(out: Path) -> None:
    """A step of two batches that every worker leaves after the first one changes no row."""
    first = dict[str, torch.Tensor]()

    def train(worker: mt.Worker) -> None:
        for batch in worker.loader(DATA, batch_size=SIZE):
            first.update(rows_of(worker.model))
            gradient(worker.model, batch)
            worker.optimizer.step()
            worker.stop()
            break

    how: dict[str, Any] = {"mode": "sync", "servers": 1, "accumulate": 2, "quiet": True}
    result = mt.run(train, Net, mpips.SGD(RATE), out=out, eval_every=0, **how)
    for name, rows in first.items():
        ids = [k for k in range(len(rows)) if k != PADDING]
        found = result.rows(name.removesuffix(".weight"), ids)
        assert np.array_equal(found, rows[ids].numpy()), name


def main(out: Path) -> None:
    for name in CASES:
        check(name, out / name)
    check_left(out / "left")
