"""BatchNorm's running means: averaged in each mode, in checkpoints, and there in a resumed run."""

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
from mpips.checkpoint import newest_whole

WORLD = MPI.COMM_WORLD
SIZE, STEPS = 10, 40
points = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)) * 3 + 5
DATA = TensorDataset(points, (points.sum(1) > 15).long())
MEAN, VARIANCE = points.mean(0), points.var(0)
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
        "mode": "local_sgd",
        "local_steps": 4,
        "fragments": 2,
        "overlap_steps": 1,
        "mixing": 0.8,
    },
    "easgd": {"mode": "easgd", "tau": 2, "elastic_rate": 0.4},
}


def net() -> nn.Module:
    """Return a net that normalizes its inputs."""
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))


def metrics(model: nn.Module, batch: Any) -> dict[str, float]:
    """Return the mean loss, and how far the running mean in use is from the data's."""
    remote = float((model[0].running_mean - MEAN).abs().max())
    return {"loss": float(F.cross_entropy(model(batch[0]), batch[1])), "remote": remote}


def train(worker: mt.Worker) -> None:
    """Train as ever."""
    for x, y in worker.loader(DATA, batch_size=SIZE):
        F.cross_entropy(worker.model(x), y).backward()
        worker.optimizer.step()


def ended(out: Path, steps: int, **options: Any) -> mt.Result:
    """Return the end of a run, or of a part of it."""
    given = {"optimizer": mpips.SGD(0.01), **options}
    return mt.run(
        train, model=net, out=out, steps=steps, quiet=True, resume="auto", eval_every=1,
        evaluate=metrics, held_out=DATA, **given,
    )  # fmt: skip


def main(out: Path) -> None:
    """Run each in two parts, and look at what it left."""
    for name, options in MODES.items():
        ended(out / name, STEPS // 2, **options)
        result = ended(out / name, STEPS, **options)
        mean, variance = (result.state_dict[f"0.running_{k}"] for k in ("mean", "var"))
        assert float((mean - MEAN).abs().max()) < 1.5, (name, mean, MEAN)
        assert float((variance / VARIANCE - 1).abs().max()) < 0.7, (name, variance, VARIANCE)
        found, _ = newest_whole(out / name)
        saved = found.layout.views(found.read_params())
        np.testing.assert_array_equal(saved["0.running_mean"], mean.numpy(), name)
        own = net()
        own.load_state_dict(result.state_dict)
        with torch.no_grad():
            mine = metrics(own.eval(), DATA.tensors)
        assert abs(mine["loss"] - result.summary["eval_loss"]) < 1e-5, name
    whole = ended(out / "whole", STEPS, **MODES["sync"])
    parts = ended(out / "sync", STEPS, **MODES["sync"])
    for key, tensor in whole.state_dict.items():
        if "num_batches" not in key:  # which counts this rank's alone
            assert torch.equal(tensor, parts.state_dict[key]), key
    assert len(mt.optimizer_state(whole.out)["state"]) == 4
    print(f"rank {WORLD.rank}: {len(MODES)} modes", flush=True)
