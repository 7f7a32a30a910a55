"""A run begins with what another has left, in files that PyTorch reads too."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
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


def run(out: Path, **options: Any) -> tuple[mt.Result, list[dict[str, np.ndarray]]]:
    """Train a little; returns the result, and on workers the state at the first batch."""
    first: list[dict[str, np.ndarray]] = []

    def train(worker: mt.Worker) -> None:
        for x, y in worker.loader(DATA, batch_size=8, epochs=2):
            if not first:
                state = worker.model.state_dict()
                first.append({name: t.detach().numpy().copy() for name, t in state.items()})
            F.cross_entropy(worker.model(x), y).backward()
            worker.optimizer.step()

    return mt.run(train, net, mpips.SGD(0.01), out=out, quiet=True, **options), first


def main(folder: Path) -> None:
    """Export one run, load it into a module, and begin others with it."""
    result, _ = run(folder / "one", mode="sync")
    files = [folder / name for name in ("model.safetensors", "model.npz")]
    if WORLD.rank == 0:
        for file in (*files, folder / "model.pt"):
            assert checkpoint(["export", str(folder / "one"), "-o", str(file)]) == 0
        own = net()
        for state in (load_file(files[0]), torch.load(folder / "model.pt", weights_only=True)):
            missing, unexpected = own.load_state_dict(state, strict=False)
            assert not unexpected, unexpected
            assert set(missing) <= {"1.num_batches_tracked"}
            for name in state:
                assert torch.equal(own.state_dict()[name], result.state_dict[name]), name
    WORLD.barrier()
    for k, start in enumerate((*files, folder / "one")):
        for mode in ("async", "sync"):
            _, first = run(folder / f"{k}-{mode}", mode=mode, init_from=start)
            for name, array in result.params.items():
                assert all(np.array_equal(params[name], array) for params in first), (mode, name)
    if WORLD.rank == 0:
        print("begins where the other ended", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
