"""What workers have together: tensors, metrics, saved models, and BatchNorm's running means.

``together.py OUT tensors``, or ``buffers``; or ``means``: these are averaged in each mode, in
checkpoints, and in a resumed run.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt
from mpips.checkpoint import need_whole

WORLD = MPI.COMM_WORLD
points = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)) * 3 + 5
DATA = TensorDataset(points, (points.sum(1) > 15).long())
MEAN, VARIANCE, STEPS = points.mean(0), points.var(0), 40
MODES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async", "clip": 1.0, "delay_compensation": 0.1},
    "evaluated": {"mode": "async", "evaluators": 1},
    "carried": {"mode": "async", "node_size": 1, "node_aggregation": True},
    "ssp": {"mode": "ssp", "servers": 2},
    "sync": {"mode": "sync", "clip": 1e-3, "optimizer": mpips.AdamW(1e-2, weight_decay=0.5)},
    "nodes": {"mode": "sync", "node_size": 2, "clip": 1e-3, "codec": "powersgd"},
    "allreduce": {"mode": "sync", "reduce": "allreduce", "clip": 1e-3},
    "local": {"mode": "local_sgd", "local_steps": 4, "outer_momentum": 0.5},
    "streaming": {
        "mode": "local_sgd", "local_steps": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.8,
    },
    "easgd": {"mode": "easgd", "tau": 2, "elastic_rate": 0.4},
}  # fmt: skip


def net() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("own", torch.zeros(()))
    return model


def learn(worker: mt.Worker, size: int, **given: Any) -> None:
    for x, y in worker.loader(DATA, batch_size=size, **given):
        worker.optimizer.zero_grad()
        F.cross_entropy(worker.model(x), y).backward()
        worker.optimizer.step()


def check_tensors(worker: mt.Worker) -> None:
    n = worker.workers
    found = worker.all_reduce(torch.full((2, 3), worker.id, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.full((2, 3), (n - 1) / 2).bfloat16())
    assert worker.all_reduce(torch.tensor(worker.id), "max").item() == n - 1
    assert worker.all_reduce(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
    means = worker.all_reduce({"loss": torch.tensor(2.0), "n": 3}, "sum")
    assert means == {"loss": 2 * n, "n": 3 * n}, means
    row = worker.model[1].weight[worker.id % 2]  # a view of the replica
    assert [each.tolist() for each, _ in worker.gather((row, "x"))][worker.id] == row.tolist()


def accuracy(worker: mt.Worker) -> float:
    """Return the share of samples that are right, of which each worker has a part."""
    x, y = (tensor[worker.id :: worker.workers] for tensor in DATA.tensors)
    worker.model.eval()
    with torch.no_grad():
        z = worker.model(x)
    found = float(worker.all_reduce((z.argmax(1) == y).sum(), op="sum")) / len(DATA)
    if find_spec("torchmetrics"):
        from torchmetrics.classification import MulticlassAccuracy

        metric = MulticlassAccuracy(
            2, average="micro", dist_sync_fn=lambda value, group: worker.gather(value),
            distributed_available_fn=lambda: True,
        )  # fmt: skip
        metric.update(z, y)
        assert float(metric.compute()) == pytest.approx(found)
    return found


def tensors(out: Path) -> None:
    """Train and save in modes with servers and without."""

    def train(worker: mt.Worker) -> None:
        check_tensors(worker)
        learn(worker, 32, epochs=2)
        check_tensors(worker)
        worker.model.own.fill_(worker.id)
        worker.save(worker.model.state_dict(), "last.pt")
        worker.print(f"accuracy {accuracy(worker):.2f} of all workers")

    for mode in ("async", "sync"):
        given = {"mode": mode, "out": out / mode, "quiet": True, "eval_every": 0}
        result = mt.run(train, net, mpips.Adam(3e-3), **given)
        assert result.state_dict["own"] == (1 if mode == "sync" else 0.5), "the workers' mean"
        saved = torch.load(out / mode / "last.pt", weights_only=True)
        assert all(torch.equal(saved[name], result.state_dict[name]) for name in result.params)
        assert saved["1.weight"].untyped_storage().nbytes() == 4 * saved["1.weight"].numel()


class Caches(nn.Module):
    """A net with buffers of several kinds; a forward pass makes one anew."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("least", torch.full((2,), torch.finfo(torch.float32).min))
        self.register_buffer("graph", torch.eye(3).to_sparse())
        self.register_buffer("small", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("cache", torch.empty(0), persistent=False)
        self.register_buffer("table", torch.empty(0))
        self.register_buffer("first", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.cache, self.table = torch.ones(len(x)), torch.arange(4.0)
        return self.out(torch.sparse.mm(self.graph, x.T).T)

    def get_extra_state(self) -> str:
        return "what is no tensor"

    def set_extra_state(self, state: str) -> None:
        assert state == self.get_extra_state()


def buffers(out: Path) -> None:
    """Train a model whose buffers change their shapes, in the loop and before it."""

    def train(worker: mt.Worker) -> None:
        worker.model(points[: 3 + worker.id])
        worker.model.graph, worker.model.first = 2 * worker.model.graph, None
        learn(worker, 32, epochs=1)

    for mode in ("async", "sync"):
        result = mt.run(train, Caches, mpips.Adam(3e-3), mode=mode, out=out / mode, quiet=True)
        state, new = result.state_dict, Caches()
        new.table = torch.empty(4)
        new.load_state_dict(state)
        assert torch.equal(new.least, Caches().least)
        assert torch.equal(new.graph.to_dense(), 2 * torch.eye(3))
        assert torch.equal(new.small.float(), torch.ones(2))
        assert torch.equal(new.table, torch.arange(4.0))
        assert new.seen > 1
        assert len({*WORLD.allgather(int(new.seen))}) == 1


def metrics(model: nn.Module, batch: Any) -> dict[str, float]:
    return {"loss": float(F.cross_entropy(model(batch[0]), batch[1]))}


def ended(out: Path, steps: int, **options: Any) -> mt.Result:
    """Return the end of a run of `net`, or of a part of it."""
    given = {"optimizer": mpips.SGD(0.01), "evaluate": metrics, "held_out": DATA, **options}
    return mt.run(
        lambda worker: learn(worker, 10), model=net, out=out, steps=steps, quiet=True,
        resume="auto", eval_every=1, **given,
    )  # fmt: skip


def means(out: Path) -> None:
    """Run each mode in two parts, and look at what it left."""
    for name, options in MODES.items():
        ended(out / name, STEPS // 2, **options)
        result = ended(out / name, STEPS, **options)
        mean, variance = (result.state_dict[f"0.running_{k}"] for k in ("mean", "var"))
        assert float((mean - MEAN).abs().max()) < 1.5, (name, mean, MEAN)
        assert float((variance / VARIANCE - 1).abs().max()) < 0.7, (name, variance, VARIANCE)
        found, _ = need_whole(out / name)
        saved = found.layout.views(found.read_params())
        np.testing.assert_array_equal(saved["0.running_mean"], mean.numpy(), name)
        own = net()
        own.load_state_dict(result.state_dict)
        with torch.no_grad():
            loss = metrics(own.eval(), DATA.tensors)["loss"]
        assert abs(loss - result.summary["eval_loss"]) < 1e-5, name
        if name == "sync":
            parts = result.state_dict
    whole = ended(out / "whole", STEPS, **MODES["sync"])
    for key in whole.params:
        assert torch.equal(whole.state_dict[key], parts[key]), key
    assert len(mt.optimizer_state(whole.out)["state"]) == 4


def main(out: Path, which: str) -> None:
    {"tensors": tensors, "buffers": buffers, "means": means}[which](out)
