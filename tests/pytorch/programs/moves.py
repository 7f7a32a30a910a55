"""A half-trained job of plain torch goes on here, and back again: as if it had stayed there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F

import mpips
import mpips.torch as mt

WORLD = MPI.COMM_WORLD
SIZE, STEPS = 8, 50
generator = torch.Generator().manual_seed(0)
X = torch.randn(3 * STEPS * SIZE, 5, generator=generator)
Y = (X.sum(1) > 0).long()
GROUPS = [mpips.Group("*.bias", weight_decay=0, lr=3e-3)]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> nn.Module:
    """Return a net without running means."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def normal() -> nn.Module:
    """Return one with them."""
    torch.manual_seed(1)
    return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with the groups that the run has."""
    named = list(model.named_parameters())
    biases = [p for name, p in named if name.endswith(".bias")]
    groups = [
        {"params": [p for name, p in named if not name.endswith(".bias")]},
        {"params": biases, "weight_decay": 0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, 1e-3, weight_decay=0.1)


CASES: dict[str, tuple[Callable[[], nn.Module], Make, Any, dict[str, Any]]] = {
    "adamw": (normal, grouped, mpips.AdamW(1e-3, weight_decay=0.1), {"groups": GROUPS}),
    "amsgrad": (
        net,
        lambda m: torch.optim.Adam(m.parameters(), 1e-3, (0.8, 0.9), amsgrad=True),
        mpips.AMSGrad(1e-3, beta1=0.8, beta2=0.9),
        {},
    ),
}


def plain(model: nn.Module, opt: torch.optim.Optimizer, begin: int, steps: int) -> None:
    """Train in plain torch, on the batches from `begin` on."""
    for k in range(begin, begin + steps):
        x, y = X[k * SIZE : (k + 1) * SIZE], Y[k * SIZE : (k + 1) * SIZE]
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


def here(comm: MPI.Intracomm, steps: int, size: int, **options: Any) -> mt.Result:
    """Train here, on the batches of the second third."""
    data = torch.utils.data.TensorDataset(*(t[STEPS * SIZE : 2 * STEPS * SIZE] for t in (X, Y)))

    def train(worker: mt.Worker) -> None:
        for x, y in worker.loader(data, batch_size=size):
            F.cross_entropy(worker.model(x), y).backward()
            worker.optimizer.step()

    return mt.run(train, comm=comm, steps=steps, shuffle=False, quiet=True, **options)


def alike(found: Mapping[str, torch.Tensor], stays: nn.Module, remote: float = 1e-5) -> None:
    """Compare, but for the number of batches that a BatchNorm has seen, which each rank counts."""
    for key, expected in stays.state_dict().items():
        if expected.is_floating_point():
            torch.testing.assert_close(found[key], expected, rtol=remote, atol=remote / 10)


def moved(name: str, comm: MPI.Intracomm, out: Path, workers: int = 1) -> None:
    """Go there and back, and compare.

    The run begins on that many ranks of `comm`, each of which owns a part of the state, and goes on
    with all of them, the others of which are servers.
    """
    make, make_optimizer, optimizer, options = CASES[name]
    stays, leaves = make(), make()
    stayed, left = make_optimizer(stays), make_optimizer(leaves)
    plain(stays, stayed, 0, 2 * STEPS)
    plain(leaves, left, 0, STEPS)

    def model() -> nn.Module:
        fresh = make()
        fresh.load_state_dict(leaves.state_dict())
        return fresh

    first = comm.Split(int(comm.rank >= workers))
    halves = [(STEPS, comm, comm.size - workers)]  # the second is resumed with the same call
    if comm.rank < workers:
        halves.insert(0, (STEPS // 2, first, 0))
    for steps, ranks, servers in halves:
        result = here(
            ranks, steps, SIZE // workers, model=model, optimizer=optimizer, mode="sync",
            optimizer_state=left.state_dict(), resume="auto", out=out, servers=servers, **options,
        )  # fmt: skip
    alike(result.state_dict, stays)
    found = mt.optimizer_state(out)
    torch.testing.assert_close(found["state"], stayed.state_dict()["state"], rtol=1e-4, atol=1e-6)
    back = make()
    back.load_state_dict(result.state_dict)
    again = make_optimizer(back)
    again.load_state_dict(found)
    plain(stays, stayed, 2 * STEPS, STEPS)
    plain(back, again, 2 * STEPS, STEPS)
    alike(back.state_dict(), stays, 1e-4)


def standing(comm: MPI.Intracomm, out: Path, **options: Any) -> None:
    """At a rate of nearly nothing, the state of a rule is that of the gradients alone."""
    rate = 1e-30
    stays, begun = net(), net()
    stayed, left = (torch.optim.Adam(m.parameters(), rate) for m in (stays, begun))
    plain(stays, stayed, 0, 2 * STEPS)
    plain(begun, left, 0, STEPS)
    given = {"optimizer": mpips.Adam(rate), "optimizer_state": left.state_dict(), **options}
    here(comm, STEPS // options.get("local_steps", 1), SIZE, model=net, out=out, **given)
    found = mt.optimizer_state(out)["state"]
    torch.testing.assert_close(found, stayed.state_dict()["state"], rtol=1e-4, atol=1e-7)


def refused(out: Path) -> None:
    """What one rank alone has, or no rank should, is refused on every rank."""
    state = torch.optim.Adam(net().parameters()).state_dict()
    cases = {
        "expected not given, as on rank 0; load it on every rank": state if WORLD.rank else None,
        r"without betas": torch.optim.SGD(net().parameters()).state_dict(),
    }
    for expected, given in cases.items():
        with pytest.raises(mpips.UserError, match=expected):
            here(WORLD, 1, SIZE, model=net, optimizer=mpips.Adam(), out=out, optimizer_state=given)
    WORLD.barrier()
    assert not out.exists()


def main(out: Path, which: str) -> None:
    """Do what is quick, or the rest."""
    alone = WORLD.Split(WORLD.rank)
    if which == "quick":
        refused(out / "refused")
        moved("amsgrad", WORLD, out / "amsgrad", 2)
        pair = WORLD.Split(int(WORLD.rank > 1))
        if WORLD.rank < 2:
            standing(pair, out / "async", mode="async")
    else:
        moved("adamw", alone, out / f"adamw-{WORLD.rank}")
        how = {"mode": "local_sgd", "local_steps": 5, "local_slots": "keep"}
        standing(alone, out / f"local-{WORLD.rank}", **how)
    print(f"{which}: as if it had stayed", flush=True)
