"""Parameters that are frozen for a part of a run stay as they are, and are trained in the rest.

Where a run's updates do not depend on who comes first, it ends as plain torch does that freezes the
same parameters at the same steps, and so does the state of its optimizer; elsewhere what is frozen
is the same bit for bit, and the update rule counts for it what it was trained in alone.

The first layer begins frozen: the loop freezes it, or the model comes so, and a group gives it a
rate.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from schedules import assert_same_state, distance
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt

WORLD = MPI.COMM_WORLD
STEPS, SIZE, RATE = 24, 8, 0.05
points = torch.randn(200, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = TensorDataset(points, (points[:, :3].sum(1) > 0).long())
RULES = {
    "sgd": (mpips.SGD(RATE), lambda p: torch.optim.SGD(p, RATE)),
    "momentum": (mpips.Momentum(RATE), lambda p: torch.optim.SGD(p, RATE, momentum=0.9)),
    "adamw": (
        mpips.AdamW(RATE, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.1),
    ),
}


class Case(NamedTuple):
    """A run: its rule, its options, the runs that it is made of, and the steps of an update."""

    rule: str
    options: dict[str, Any]
    parts: int = 1
    local: int = 1


LATER = {"groups": [mpips.Group("0.*", lr=RATE / 2)]}  # the model comes with that frozen
EQUAL = {
    "sync": Case("adamw", {"mode": "sync"}),
    "nodes": Case("adamw", {"mode": "sync", "node_size": 1, **LATER}, 3),
    "remote": Case(
        "adamw", {"mode": "ssp", "servers": 2, "staleness_bound": 0, "node_size": 1, **LATER}, 2
    ),
    "a server": Case("momentum", {"mode": "sync", "servers": 1, "clip": 1e9, **LATER}),
    "nodes and a server": Case("adamw", {"mode": "sync", "node_size": 2, "servers": 1}, 3),
    "allreduce": Case("adamw", {"mode": "sync", "reduce": "allreduce"}, 2),
    "one worker": Case("momentum", {"mode": "ssp", "servers": 2, "staleness_bound": 0}, 3),
    "local": Case("sgd", {"mode": "local_sgd", "local_steps": 1, **LATER}),
}  # fmt: skip
ALONE = {
    "local": Case("adamw", {"mode": "local_sgd", "local_steps": 4}, 3, 4),
    "kept": Case("adamw", {"mode": "local_sgd", "local_steps": 4, "local_slots": "keep"}, 2, 4),
}
STILL: dict[str, dict[str, Any]] = {
    "async": {"mode": "async", **LATER},
    "easgd": {"mode": "easgd", "tau": 2, **LATER},
    "carried": {"mode": "async", "node_size": 2, "node_aggregation": True, "server_ranks": (2,)},
    "compensated": {"mode": "async", "delay_compensation": 0.1},
    "low rank": {"mode": "sync", "node_size": 1, "codec": "powersgd", **LATER},
    "backup": {"mode": "sync", "servers": 1, "backup_workers": 1},
}
QUICK = ("nodes", "async")


def net() -> nn.Module:
    """Return a net in float64; a shard ends within its first weight."""
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def frozen_net() -> nn.Module:
    """Return the same with its first layer frozen."""
    found = net()
    found[0].requires_grad_(False)
    return found


def freeze(model: nn.Module, step: int) -> None:
    """Train the first layer too after a while, and freeze the weight of the last one for one."""
    if step >= 7:
        model[0].requires_grad_(True)
    model[2].weight.requires_grad_(not 10 <= step < 17)


def ours(case: Case, out: Path, comm: MPI.Intracomm) -> tuple[mt.Result, list[Any]]:
    """Return what a run ends with, and the batches of this rank by step."""
    mine: list[Any] = []
    comes_frozen = "groups" in case.options

    def train(worker: mt.Worker) -> None:
        assert worker.model[0].weight.requires_grad != comes_frozen
        worker.model[0].requires_grad_(False)
        for x, y in worker.loader(DATA, batch_size=SIZE):
            freeze(worker.model, worker.steps)
            mine.append((x, y))
            F.cross_entropy(worker.model(x), y).backward()
            worker.optimizer.step()

    for part in range(1, case.parts + 1):
        result = mt.run(
            train, model=frozen_net if comes_frozen else net, optimizer=RULES[case.rule][0],
            steps=STEPS * part // case.parts // case.local, out=out, resume="auto", comm=comm,
            quiet=True, **case.options,
        )  # fmt: skip
    return result, mine


def plain(case: Case, batches: list[list[Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer of plain torch after the same batches, of all workers."""
    torch.manual_seed(0)
    model = frozen_net()
    groups = [{"params": model.parameters()}]
    if "groups" in case.options:
        groups = [{"params": model[2].parameters()}]
        groups += [{"params": model[0].parameters(), "lr": LATER["groups"][0].lr}]
    opt = RULES[case.rule][1](groups)
    for step, of_step in enumerate(zip(*batches, strict=True)):
        opt.zero_grad()
        freeze(model, step)
        x, y = (torch.cat(part) for part in zip(*of_step, strict=True))
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return model, opt


def equal(name: str, case: Case, out: Path, comm: MPI.Intracomm) -> None:
    """Compare a run with plain torch."""
    result, mine = ours(case, out, comm)
    batches = [of_rank for of_rank in comm.allgather(mine) if of_rank]
    assert {len(of_rank) for of_rank in batches} == {STEPS}, name
    model, opt = plain(case, batches)
    found = distance(result.state_dict, model)
    assert found < 1e-12, (name, found)
    for group in opt.param_groups:
        group["initial_lr"] = group["lr"]
    assert_same_state(mt.optimizer_state(result.out), opt)


def still(name: str, out: Path) -> None:
    """Freeze the first layer in the first half of a run, and nothing in the second."""

    trains, comes_frozen = False, "groups" in STILL[name]

    def train(worker: mt.Worker) -> None:
        model = worker.model
        assert model[0].weight.requires_grad != comes_frozen
        model[0].requires_grad_(trains)
        for x, y in worker.loader(DATA, batch_size=SIZE):
            F.cross_entropy(model(x), y).backward()
            worker.optimizer.step()

    how = {
        "model": frozen_net if comes_frozen else net,
        "optimizer": RULES["adamw"][0],
        "out": out,
        "resume": "auto",
    }
    how |= {"quiet": True, "eval_every": 0, **STILL[name]}
    half = mt.run(train, steps=STEPS // 2, **how)
    torch.manual_seed(0)
    for key, start in net().state_dict().items():
        alike = torch.equal(half.state_dict[key], start)
        assert alike == key.startswith("0."), (name, key)
    trains = True
    whole = mt.run(train, steps=STEPS, **how)
    assert not torch.equal(whole.state_dict["0.bias"], half.state_dict["0.bias"]), name
    if name == "easgd":
        return  # its state is each worker's own
    state = mt.optimizer_state(out)["state"]
    first = 2 if comes_frozen else 0  # what is of a group is behind the rest
    steps = [int(state[k]["step"]) for k in (first, first + 1, 2 - first, 3 - first)]
    before, now = (result.summary["global_step"] for result in (half, whole))
    assert steps == [now - before] * 2 + [now] * 2, (name, steps, before, now)


def main(out: Path, which: str) -> None:
    """Run and compare what is quick, or the rest."""
    names = [name for name in (*EQUAL, *STILL) if (name in QUICK) == (which == "quick")]
    for k, name in enumerate(names):
        if name in EQUAL:
            equal(name, EQUAL[name], out / f"equal-{k}", WORLD)
        else:
            still(name, out / f"still-{k}")
    alone = WORLD.Split(WORLD.rank)
    for k, (name, case) in enumerate(ALONE.items() if which == "long" else ()):
        equal(name, case, out / f"alone-{WORLD.rank}-{k}", alone)
    print(f"rank {WORLD.rank}: {len(names)} alike", flush=True)
