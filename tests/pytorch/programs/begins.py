"""A run begins with what another has left, in files that PyTorch reads too, or in the loop."""

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
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt
from mpips.checkpoint.__main__ import main as checkpoint

WORLD = MPI.COMM_WORLD
X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
DATA = TensorDataset(X, Y)
Load = Callable[[mt.Worker], object]


def net() -> nn.Module:
    """Return one with running means, which travel with its parameters."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def frozen() -> nn.Module:
    model = net()
    model[0].weight.requires_grad_(False)
    return model


def unseeded() -> nn.Module:
    model = frozen()
    model[0].weight.data.fill_(np.random.default_rng().random())
    return model


def run(
    out: Path, load: Load = callable, make: Callable[[], nn.Module] = net, **options: Any
) -> tuple[mt.Result, list[dict[str, np.ndarray]]]:
    """Train a little; returns the result, and on workers the state at the first batch."""
    first: list[dict[str, np.ndarray]] = []

    def train(worker: mt.Worker) -> None:
        load(worker)
        for x, y in worker.loader(DATA, batch_size=8):
            if not first:
                state = worker.model.state_dict()
                first.append({name: t.detach().numpy().copy() for name, t in state.items()})
            F.cross_entropy(worker.model(x), y).backward()
            worker.optimizer.step()

    given = {"optimizer": mpips.SGD(0.01), "out": out, "quiet": True, "epochs": 2, **options}
    return mt.run(train, make, **given), first


def check_begins(result: mt.Result, out: Path, load: Load = callable, **options: Any) -> None:
    """Check that a run begins where another has ended, at the batch that is taken first."""
    found = WORLD.allgather(run(out, load, **options)[1])
    alike = [
        all(np.array_equal(params[name], array) for name, array in result.params.items())
        for params in itertools.chain(*found)
    ]
    assert any(alike), (out, alike)
    assert all(alike) or options["mode"] == "async", (out, alike)


WRONG: dict[str, Load] = {
    "'0.bias' that rank . has not changed.*, as rank . has it": (
        lambda worker: worker.model[0].bias.data.add_(int(worker.id == 0))
    ),
    "'0.bias' that rank . has changed.*, as rank . has it": (
        lambda worker: worker.model[0].bias.data.add_(worker.id)
    ),
    "'0.weight' that train has replaced, added": (
        lambda worker: worker.model.load_state_dict(net().state_dict(), assign=True)
    ),
    "'head.weight' that train has replaced, added": (
        lambda worker: worker.model.add_module("head", nn.Linear(2, 2))
    ),
}


def main(out: Path) -> None:
    """Export one run, load it into a module, and begin others with it, or with what it returns."""
    result, _ = run(out / "one", mode="sync")
    exported = [out / name for name in ("model.safetensors", "model.npz")]
    if WORLD.rank == 0:
        for file in exported:
            assert checkpoint(["export", str(out / "one"), "-o", str(file)]) == 0
        missing, unexpected = net().load_state_dict(load_file(exported[0]), strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"1.num_batches_tracked"}
    WORLD.barrier()

    def loads(worker: mt.Worker) -> None:
        worker.model.eval()(X)  # is no change, nor is the next
        worker.model[0].requires_grad_(False).requires_grad_(True)
        worker.model.train().load_state_dict(result.state_dict)

    def changes(worker: mt.Worker) -> None:
        worker.model.load_state_dict({k: v + 1 for k, v in worker.model.state_dict().items()})

    more = {**result.state_dict, "more": torch.zeros(2)}
    for mode in ("async", "sync"):
        for k, start in enumerate((*exported, out / "one", more)):
            check_begins(result, out / f"{k}-{mode}", mode=mode, init_from=start, quiet=k < 3)
        check_begins(result, out / f"loaded-{mode}", loads, mode=mode)
        for told, load in WRONG.items():
            with pytest.raises(mpips.UserError, match=told):
                run(out / "differs", load, mode=mode)
    check_begins(result, out / "one", changes, mode="sync", resume="yes", epochs=3, quiet=False)
    for value, resume in ((0.5, ""), (0.25, "yes")):  # which PyTorch does not count

        def fills(worker: mt.Worker, value: float = value) -> None:
            worker.model[0].weight.data.fill_(value)

        filled, _ = run(out / "frozen", fills, frozen, resume=resume, epochs=3 if resume else 2)
        assert bool((filled.state_dict["0.weight"] == value).all()), "every rank has it"
    state = torch.optim.Adam(net().parameters()).state_dict() if WORLD.rank else None
    with pytest.raises(mpips.UserError, match="expected not given, as on rank 0; load it on every"):
        run(out / "differs", optimizer=mpips.Adam(), optimizer_state=state)
    with pytest.raises(mpips.UserError, match=r"of frozen parameters .*, or seed its random"):
        run(out / "differs", make=unseeded)
    WORLD.barrier()
    assert not (out / "differs").exists()
