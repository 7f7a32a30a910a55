"""Schedulers of torch and groups of parameters set the rates of a run, in every mode.

Where a run's updates do not depend on who comes first, it ends as plain torch does that makes the
same steps with the same scheduler and groups; elsewhere a group of rate zero stays as it was, and a
scheduler that makes the rate small keeps the others near.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import mpips
import mpips.torch as mt

WORLD = MPI.COMM_WORLD
STEPS, SIZE, RATE = 20, 8, 0.05
points = torch.randn(200, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = TensorDataset(points, (points[:, :3].sum(1) > 0).long())
Schedule = Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler]


def net() -> nn.Module:
    """Return a net in float64, its layers of sizes that no snapshot falls between."""
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def steps(opt: torch.optim.Optimizer, worker: int) -> lr_scheduler.LRScheduler:
    """Return one that falls at times."""
    return lr_scheduler.StepLR(opt, 6, 0.3)


def chain(opt: torch.optim.Optimizer, worker: int) -> lr_scheduler.LRScheduler:
    """Return a warm-up from zero, and a cosine behind it."""
    warm = lr_scheduler.LambdaLR(opt, lambda k: k / 5)
    return lr_scheduler.SequentialLR(opt, [warm, lr_scheduler.CosineAnnealingLR(opt, 15)], [5])


def each_its_own(opt: torch.optim.Optimizer, worker: int) -> lr_scheduler.LRScheduler:
    """Return one that makes the rate of worker 1 half of the others'."""
    return lr_scheduler.LambdaLR(opt, lambda k: 0.5 if worker == 1 else 1.0)


def tiny(opt: torch.optim.Optimizer, worker: int) -> lr_scheduler.LRScheduler:
    """Return a rate that changes next to nothing."""
    return lr_scheduler.LambdaLR(opt, lambda k: 1e-9)


class Case(NamedTuple):
    """A run, and what its updates are made of.

    Attributes:
        rule: What servers apply, and what torch does.
        schedule: Makes the scheduler.
        options: Of the run.
        factors: Of the rates of the workers, where they differ: an update takes their mean.
        parts: Runs that it is made of.
        grouped: Whether the parameters are in `GROUPS`.
    """

    rule: str
    schedule: Schedule
    options: dict[str, Any]
    factors: tuple[float, ...] = ()
    parts: int = 1
    grouped: bool = True


RULES = {
    "sgd": (mpips.SGD(RATE), lambda p: torch.optim.SGD(p, RATE)),
    "momentum": (mpips.Momentum(RATE), lambda p: torch.optim.SGD(p, RATE, momentum=0.9)),
    "adamw": (
        mpips.AdamW(RATE, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.1),
    ),
}
GROUPS = [mpips.Group("*.bias", weight_decay=0), mpips.Group("2.*", 0.02, 0.3)]
EQUAL = {
    "sync": Case("adamw", chain, {"mode": "sync"}, grouped=False),
    "a server": Case("adamw", steps, {"mode": "sync", "servers": 1, "clip": 1e9}),
    "nodes": Case("adamw", chain, {"mode": "sync", "node_size": 1}),
    "nodes and a server": Case("momentum", chain, {"mode": "sync", "node_size": 2, "servers": 1}),
    "allreduce": Case("adamw", steps, {"mode": "sync", "reduce": "allreduce"}),
    "differ": Case("sgd", each_its_own, {"mode": "sync"}, (1, 0.5, 1)),
    "differ on nodes": Case("adamw", each_its_own, {"mode": "sync", "node_size": 1}, (1, 0.5, 1)),
    "resumed": Case("adamw", chain, {"mode": "sync"}, parts=2),
    "one worker": Case("adamw", chain, {"mode": "ssp", "servers": 2, "staleness_bound": 0}),
    "remote": Case(
        "momentum", steps, {"mode": "ssp", "servers": 2, "staleness_bound": 0, "node_size": 1}
    ),
    "local": Case("sgd", chain, {"mode": "local_sgd", "local_steps": 1}),
}
STILL: dict[str, dict[str, Any]] = {
    "async": {"mode": "async"},
    "easgd": {"mode": "easgd", "tau": 2},
    "compensated": {"mode": "async", "delay_compensation": 0.1},
    "carried": {"mode": "async", "node_size": 1, "node_aggregation": True},
    "low rank": {"mode": "sync", "node_size": 1, "codec": "powersgd"},
    "backup": {"mode": "sync", "servers": 1, "backup_workers": 1},
}


def ours(case: Case, out: Path) -> tuple[mt.Result, list[Any]]:
    """Return what a run ends with, and the batches of this rank by step."""
    mine: list[Any] = []
    rates: list[float] = []

    def train(worker: mt.Worker) -> None:
        opt = worker.optimizer
        scheduler = case.schedule(opt, worker.id)
        opt.register_step_post_hook(lambda *_: rates.append(opt.param_groups[0]["lr"]))
        for x, y in worker.loader(DATA, batch_size=SIZE):
            while scheduler.last_epoch < worker.steps:
                scheduler.step()
            mine.append((x, y))
            F.cross_entropy(worker.model(x), y).backward()
            opt.step()
        assert len(rates) == len(mine)

    for part in range(1, case.parts + 1):
        end = STEPS * part // case.parts
        result = mt.run(
            train, model=net, optimizer=RULES[case.rule][0], out=out, resume="auto", steps=end,
            quiet=True, eval_every=0, **{"groups": GROUPS * case.grouped, **case.options},
        )  # fmt: skip
    return result, mine


def plain(case: Case, batches: list[list[Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer of plain torch after the same batches, of all workers."""
    torch.manual_seed(0)
    model = net()
    weight, bias, *last = model.parameters()
    groups = [{"params": [weight]}, {"params": [bias, last[1]], "weight_decay": 0}]
    groups.append({"params": [last[0]], "lr": 0.02, "weight_decay": 0.3})
    opt = RULES[case.rule][1](groups if case.grouped else model.parameters())
    scheduler = case.schedule(opt, 0)
    for of_step in zip(*batches, strict=True):
        opt.zero_grad()
        x, y = (torch.cat(part) for part in zip(*of_step, strict=True))
        F.cross_entropy(model(x), y).backward()
        if case.factors:
            sizes = [len(x) for x, _ in of_step]
            pairs = zip(case.factors, sizes, strict=True)
            mean = sum(f * n for f, n in pairs) / sum(sizes)
            for group in opt.param_groups:
                group["lr"] = group["initial_lr"] * mean
        opt.step()
        scheduler.step()
    return model, opt


def vector(model: nn.Module) -> torch.Tensor:
    """Return the parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def distance(state: dict[str, torch.Tensor], model: nn.Module) -> float:
    """Return how far a state dict is from a model, relatively."""
    end = net()
    end.load_state_dict(state)
    return float((vector(end) - vector(model)).norm() / vector(model).norm())


def assert_same_state(found: dict[str, Any], opt: torch.optim.Optimizer) -> None:
    """Assert that a state dict is that of an optimizer, but for what a scheduler has changed."""
    expected = opt.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for k, of_parameter in expected["state"].items():
        assert found["state"][k].keys() == of_parameter.keys()
        for key, tensor in of_parameter.items():
            torch.testing.assert_close(found["state"][k][key], tensor, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert mine == {key: theirs["initial_lr" if key == "lr" else key] for key in mine}
    opt.load_state_dict(found)


def main(out: Path) -> None:
    """Run and compare each."""
    for k, (name, case) in enumerate(EQUAL.items()):
        result, mine = ours(case, out / f"equal-{k}")
        batches = [of_rank for of_rank in WORLD.allgather(mine) if of_rank]
        assert {len(of_rank) for of_rank in batches} == {STEPS}, name
        model, opt = plain(case, batches)
        found = distance(result.state_dict, model)
        assert found < 1e-12, (name, found)
        assert_same_state(mt.optimizer_state(result.out), opt)
    for k, (name, options) in enumerate(STILL.items()):
        small = {**options, "groups": [mpips.Group("0.*", lr=0)]}
        result, _ = ours(Case("sgd", tiny, small), out / f"still-{k}")
        torch.manual_seed(0)
        for key, start in net().state_dict().items():
            change = float((result.state_dict[key] - start).abs().max())
            assert change == 0 if key.startswith("0.") else 0 < change < 1e-7, (name, key, change)
    print(f"rank {WORLD.rank}: {len(EQUAL)} equal, {len(STILL)} still", flush=True)
