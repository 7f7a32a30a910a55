"""A run begins with what another has left, in files that PyTorch reads too."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import mpips
import mpips.torch as mt
from mpips.checkpoint.__main__ import main as checkpoint

WORLD = MPI.COMM_WORLD
X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
DATA = torch.utils.data.TensorDataset(X, Y)


def net() -> nn.Module:
    """Return one with running means, which travel with its parameters."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


Load = Callable[[mt.Worker], object]


def run(
    out: Path, load: Load = callable, **options: Any
) -> tuple[mt.Result, list[dict[str, np.ndarray]]]:
    """Train a little; returns the result, and on workers the state at the first batch."""
    first: list[dict[str, np.ndarray]] = []

    def train(worker: mt.Worker) -> None:
        load(worker)
        for x, y in worker.loader(DATA, batch_size=8, epochs=2):
            if not first:
                state = worker.model.state_dict()
                first.append({name: t.detach().numpy().copy() for name, t in state.items()})
            F.cross_entropy(worker.model(x), y).backward()
            worker.optimizer.step()

    return mt.run(train, net, mpips.SGD(0.01), out=out, quiet=True, **options), first


def check_begins(result: mt.Result, out: Path, load: Load = callable, **options: Any) -> None:
    """Check that a run begins where another has ended, at the batch that is taken first."""
    found = WORLD.allgather(run(out, load, **options)[1])
    alike = [
        all(np.array_equal(params[name], array) for name, array in result.params.items())
        for params in itertools.chain(*found)
    ]
    assert any(alike), (out, alike)
    assert all(alike) or options["mode"] == "async", (out, alike)


def begins_with_what_is_loaded(folder: Path, result: mt.Result) -> None:
    """Load weights in the loop's function on all workers, or others on one of them."""

    def loads(worker: mt.Worker) -> None:
        worker.model.load_state_dict(result.state_dict)

    def loads_alone(worker: mt.Worker) -> None:
        if worker.id == 0:
            loads(worker)

    def adds(worker: mt.Worker) -> None:
        worker.model[0].bias.data += worker.id

    for mode in ("async", "sync"):
        check_begins(result, folder / f"given-{mode}", mode=mode, init_from=result.state_dict)
        check_begins(result, folder / f"loaded-{mode}", loads, mode=mode)
        for load, told in (
            (loads_alone, "has not changed"),
            (adds, "'0.bias' that rank . has changed"),
        ):
            with pytest.raises(mpips.UserError, match=f"{told}.*, as rank . has it"):
                run(folder / "differs", load, mode=mode)


def every_rank_has_what_is_not_trained(folder: Path) -> None:
    """Change a frozen array by way of its ``data``, which PyTorch does not count."""

    def frozen() -> nn.Module:
        model = net()
        model[0].weight.requires_grad_(False)  # type: ignore[union-attr]
        return model

    def train(worker: mt.Worker) -> None:
        worker.model[0].weight.data.fill_(0.5)
        for x, y in worker.loader(DATA, batch_size=8, epochs=1):
            F.cross_entropy(worker.model(x), y).backward()
            worker.optimizer.step()

    found = mt.run(train, frozen, mpips.SGD(0.01), out=folder / "frozen", quiet=True)
    assert bool((found.state_dict["0.weight"] == 0.5).all()), found.state_dict["0.weight"]


def main(folder: Path) -> None:
    """Export one run, load it into a module, and begin others with it."""
    result, _ = run(folder / "one", mode="sync")
    files = [folder / name for name in ("model.safetensors", "model.npz")]
    if WORLD.rank == 0:
        for file in files:
            assert checkpoint(["export", str(folder / "one"), "-o", str(file)]) == 0
        missing, unexpected = net().load_state_dict(load_file(files[0]), strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"1.num_batches_tracked"}
    WORLD.barrier()
    for k, start in enumerate((*files, folder / "one")):
        for mode in ("async", "sync"):
            check_begins(result, folder / f"{k}-{mode}", mode=mode, init_from=start)
    begins_with_what_is_loaded(folder, result)
    every_rank_has_what_is_not_trained(folder)
    if WORLD.rank == 0:
        print("begins where the other ended", flush=True)
