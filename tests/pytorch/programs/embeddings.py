"""Embeddings whose rows are tables: ``embeddings.py OUT``; three ranks.

With one worker, and rows that are read when its push before has been applied, N steps of a model
are those of plain torch with its sparse gradients, whatever the bags are; over a stop, a resume on
other servers, and where steps are clipped and accumulated. Then a rank evaluates beside the others.
"""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt
from mpips.checkpoint import open_checkpoint
from mpips.checkpoint.files import step_folder
from mpips.tables.saved_rows import find_rows
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
    """An embedding that is used twice, bags, and parameters; of `library`, torch.nn or mpips.torch.

    What bags of other options do is in test_embeddings.py.
    """

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


class Case(NamedTuple):
    """A run: its rule, its options, and the servers of its parts."""

    rule: str
    options: dict[str, Any]
    servers: tuple[int, ...] = (1,)
    decay: float = 1.0  # of the rate, each step


SSP = {"mode": "ssp", "staleness_bound": 0}
CASES = {
    "sgd": Case("sgd", SSP, (1, 2)),
    "adagrad": Case("adagrad", SSP, (2, 1)),
    "scheduled": Case("sgd", SSP, decay=0.9),
    "clipped": Case("sgd", {**SSP, "clip": 0.3}),
    "accumulated": Case("sgd", {**SSP, "accumulate": 4}),
    "rounds": Case("adagrad", {"mode": "sync", "accumulate": 2}, (1, 2)),
    "clipped rounds": Case("sgd", {"mode": "sync", "clip": 0.3, "node_size": 1}, decay=0.9),
}
RULES = {
    "sgd": (mpips.SGD(RATE), lambda p: torch.optim.SGD(p, RATE)),
    "adagrad": (mpips.Adagrad(RATE, eps=1e-8), lambda p: torch.optim.Adagrad(p, RATE, eps=1e-8)),
}


def plain(sparse: bool = True) -> Net:
    return Net(nn, sparse=sparse, dtype=torch.float64)


def rows_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all rows of a model's embeddings as weights, as they are now."""
    found = dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if isinstance(module, (mt.Embedding, mt.EmbeddingBag)):
            ids = torch.arange(module.num_embeddings)
            given = (ids,) if isinstance(module, mt.Embedding) else (ids, ids)
            found[f"{name}.weight"] = module(*given).detach()
    return found


def trained(case: Case, out: Path) -> tuple[mt.Result, dict[str, Any], list[Any]] | None:
    """Return what a run ends with, what its model began with, and its batches; on its ranks."""
    first: dict[str, Any] = {}
    batches: list[Any] = []
    after: list[float] = []

    def train(worker: mt.Worker) -> None:
        model, opt = worker.model, worker.optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, case.decay)
        for batch in worker.loader(DATA, batch_size=SIZE):
            if not first:
                first.update({n: t.clone() for n, t in model.state_dict().items()})
                first.update(rows_of(model))
            loss_of(model, batch)  # nobody goes back from it
            gradient(model, batch)
            opt.zero_grad()
            batches.append(batch)
            with torch.no_grad():
                assert not model(*batch[:2]).requires_grad
            opt.step(partial(gradient, model, batch))
            schedule.step()
        after.append(worker.evaluate(metrics, DATA)["loss"])

    result = None
    for part, servers in enumerate(case.servers, 1):
        comm = WORLD.Split(0 if WORLD.rank < servers + 1 else MPI.UNDEFINED, WORLD.rank)
        if comm != MPI.COMM_NULL:
            result = mt.run(
                train, Net, RULES[case.rule][0], out=out, comm=comm,
                steps=STEPS * part // len(case.servers), resume="auto", servers=servers,
                server_ranks=tuple(range(1, servers + 1)),
                quiet=True, evaluate=metrics, held_out=DATA, eval_every=0, **case.options,
            )  # fmt: skip
            comm.Free()
        wait_for_all(WORLD)
    if result is None or not batches:
        return None
    found = result.summary["eval_loss"]
    assert abs(after[-1] - found) < 1e-12, (after, found)
    return result, first, batches


def equal(name: str, case: Case, out: Path) -> None:
    """Compare a run with plain torch, which begins with the same rows."""
    found = trained(case, out)
    assert WORLD.allgather(found is not None).count(True) == 1, "there is one worker"
    if found is None:
        return
    result, first, batches = found
    clip, of_step = case.options.get("clip", 0), case.options.get("accumulate", 1)
    model = plain(sparse=not clip)  # torch clips no sparse gradients
    model.load_state_dict(first)
    opt = RULES[case.rule][1](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, case.decay)
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
    for key, expected in model.state_dict().items():
        table, _, last = key.rpartition(".")
        if last == "weight" and table != "out":
            ids = [k for k in range(len(expected)) if k != PADDING or table != "single"]
            rows = torch.from_numpy(result.rows(table, ids))
            torch.testing.assert_close(rows, expected[ids], rtol=0, atol=1e-12, msg=f"{name} {key}")
            assert (first[key][ids] != rows).any() == (table != "unused"), (name, key)
    Net().load_state_dict(result.state_dict)  # strictly
    assert abs(metrics(model)["loss"] - result.summary["eval_loss"]) < 1e-12, name


def evaluated(out: Path) -> None:
    """A rank that evaluates beside the others reads rows as they were saved, those of one step."""

    def train(worker: mt.Worker) -> None:
        for batch in worker.loader(DATA, batch_size=SIZE):
            worker.optimizer.step(partial(gradient, worker.model, batch))
            time.sleep(0.01)

    result = mt.run(
        train, Net, mpips.SGD(RATE), out=out, epochs=6, mode="async", evaluators=1, quiet=True,
        evaluate=metrics, held_out=DATA, eval_every=0.5, keep=1000, checkpoint_rows="changed",
    )  # fmt: skip
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    curve = [line for line in lines if line["kind"] == "eval"]
    assert len(curve) > 1, curve
    for line in curve if WORLD.rank == 2 else ():
        saved, model = open_checkpoint(step_folder(out / "checkpoints", line["step"])), plain()
        arrays = saved.layout.views(saved.read_params())
        state = {name: torch.from_numpy(array) for name, array in arrays.items()}
        for name in saved.tables:
            rows = find_rows(saved, name, np.arange(saved.tables[name]["rows"]))
            if name == "single":
                rows[PADDING] = 0
            state[f"{name}.weight"] = torch.from_numpy(rows)
        model.load_state_dict(state)
        assert abs(metrics(model)["loss"] - line["loss"]) < 1e-9, line
    assert result.summary["evaluators"] == 1


def main(out: Path) -> None:
    for name, case in CASES.items():
        equal(name, case, out / name)
    evaluated(out / "evaluated")
