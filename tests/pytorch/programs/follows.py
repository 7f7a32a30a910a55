"""Schedulers, groups, and parameters that are frozen for a while, beside plain torch.

Where a run's updates do not depend on who comes first, it ends as plain torch does that makes the
same steps with the same scheduler and groups and freezes the same parameters, and so does the state
of its optimizer. Elsewhere what is frozen, or of a group of rate zero, is the same bit for bit, a
scheduler that makes the rate small keeps the others near, and the update rule counts for a
parameter what it was trained in alone.

The first layer begins frozen: the loop freezes it, or the model comes so, and a group gives it a
rate.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
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
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler]] = {
    "steps": lambda opt, worker: lr_scheduler.StepLR(opt, 6, 0.3),
    "chain": lambda opt, worker: lr_scheduler.SequentialLR(
        opt,
        [
            lr_scheduler.LambdaLR(opt, lambda k: k / 5),
            lr_scheduler.CosineAnnealingLR(opt, 15),
        ],
        [5],
    ),
    "constant": lambda opt, worker: lr_scheduler.LambdaLR(opt, lambda k: 1.0),
    "half on worker 1": lambda opt, worker: lr_scheduler.LambdaLR(
        opt, lambda k: 0.5 if worker == 1 else 1.0
    ),
    "tiny": lambda opt, worker: lr_scheduler.LambdaLR(opt, lambda k: 1e-9),
}


class Case(NamedTuple):
    """A run, and what its updates are made of."""

    rule: str
    schedule: str
    options: dict[str, Any]
    groups: tuple[mpips.Group, ...] = ()
    parts: int = 1  # runs that it is made of
    local: int = 1  # steps of an update
    factors: tuple[float, ...] = ()  # of the workers' rates, of which an update takes the mean


SPLIT = mpips.Group("*.bias", weight_decay=0), mpips.Group("2.*", 0.02, 0.3)
LATER = (mpips.Group("0.*", lr=RATE / 2),)  # the model comes with that frozen
SSP: dict[str, Any] = {"mode": "ssp", "servers": 2, "staleness_bound": 0}
EQUAL = {
    "sync": Case("adamw", "chain", {"mode": "sync"}, parts=2),
    "nodes": Case("adamw", "chain", {"mode": "sync", "node_size": 1}, LATER, 3),
    "remote": Case("adamw", "steps", {**SSP, "node_size": 1}, LATER, 2),
    "a server": Case("adamw", "steps", {"mode": "sync", "servers": 1, "clip": 1e9}, SPLIT),
    "nodes and a server": Case(
        "momentum", "chain", {"mode": "sync", "node_size": 2, "servers": 1}, LATER, 3
    ),
    "allreduce": Case("adamw", "steps", {"mode": "sync", "reduce": "allreduce"}, SPLIT, 2),
    "one worker": Case("adamw", "chain", SSP, SPLIT, 3),
    "local": Case("sgd", "chain", {"mode": "local_sgd", "local_steps": 1}, LATER),
    "differ": Case("sgd", "half on worker 1", {"mode": "sync"}, SPLIT, factors=(1, 0.5, 1)),
    "differ on nodes": Case(
        "adamw", "half on worker 1", {"mode": "sync", "node_size": 1}, SPLIT, factors=(1, 0.5, 1)
    ),
}  # fmt: skip
LOCAL = {"mode": "local_sgd", "local_steps": 4}
ALONE = {
    "local": Case("adamw", "constant", LOCAL, parts=3, local=4),
    "kept": Case("adamw", "constant", {**LOCAL, "local_slots": "keep"}, parts=2, local=4),
}
ZERO = mpips.Group("2.bias", lr=0)
STILL: dict[str, tuple[dict[str, Any], tuple[mpips.Group, ...]]] = {
    "async": ({"mode": "async"}, LATER),
    "easgd": ({"mode": "easgd", "tau": 2}, LATER),
    "carried": (
        {"mode": "async", "node_size": 2, "node_aggregation": True, "server_ranks": (2,)}, ()
    ),
    "compensated": ({"mode": "async", "delay_compensation": 0.1}, ()),
    "low rank": ({"mode": "sync", "node_size": 1, "codec": "powersgd"}, LATER),
    "backup": ({"mode": "sync", "servers": 1, "backup_workers": 1}, ()),
}  # fmt: skip
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


def ours(
    case: Case, out: Path, part: int, comm: MPI.Intracomm, mine: list[Any], freeze: Any = freeze
) -> mt.Result:
    """Return what a part of a run ends with; the batches of this rank by step go to `mine`."""
    comes_frozen = LATER[0] in case.groups
    rates: list[float] = []

    def train(worker: mt.Worker) -> None:
        model, opt = worker.model, worker.optimizer
        assert model[0].weight.requires_grad != comes_frozen
        model[0].requires_grad_(False)
        scheduler, before = SCHEDULES[case.schedule](opt, worker.id), len(mine)
        opt.register_step_post_hook(lambda *_: rates.append(opt.param_groups[0]["lr"]))
        for x, y in worker.loader(DATA, batch_size=SIZE):
            while scheduler.last_epoch < worker.steps:
                scheduler.step()
            freeze(model, worker.steps)
            mine.append((x, y))
            F.cross_entropy(model(x), y).backward()
            opt.step()
        assert len(rates) == len(mine) - before

    return mt.run(
        train, model=frozen_net if comes_frozen else net, optimizer=RULES[case.rule][0],
        steps=STEPS * part // case.parts // case.local, out=out, resume="auto", comm=comm,
        quiet=True, eval_every=0, groups=list(case.groups), **case.options,
    )  # fmt: skip


def grouped(model: nn.Module, groups: tuple[mpips.Group, ...]) -> list[dict[str, Any]]:
    """Return groups for an optimizer of torch: what is of none, and then each."""
    found: list[dict[str, Any]] = [{"params": []} for _ in range(1 + len(groups))]
    for k, group in enumerate(groups, 1):
        numbers = {"lr": group.lr, "weight_decay": group.weight_decay}
        found[k] |= {key: number for key, number in numbers.items() if number is not None}
    for name, parameter in model.named_parameters():
        of = [k for k, group in enumerate(groups, 1) if fnmatchcase(name, group.pattern)]
        found[[*of, 0][0]]["params"].append(parameter)
    return [group for group in found if group["params"]]


def plain(case: Case, batches: list[list[Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer of plain torch after the same batches, of all workers."""
    torch.manual_seed(0)
    model = frozen_net()
    opt = RULES[case.rule][1](grouped(model, case.groups))
    scheduler = SCHEDULES[case.schedule](opt, 0)
    for step, of_step in enumerate(zip(*batches, strict=True)):
        opt.zero_grad()
        freeze(model, step)
        x, y = (torch.cat(part) for part in zip(*of_step, strict=True))
        F.cross_entropy(model(x), y).backward()
        if case.factors:
            pairs = zip(case.factors, (len(x) for x, _ in of_step), strict=True)
            mean = sum(factor * n for factor, n in pairs) / len(x)
            for group in opt.param_groups:
                group["lr"] = group["initial_lr"] * mean
        opt.step()
        scheduler.step()
    return model, opt


def vector(model: nn.Module) -> torch.Tensor:
    """Return the parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


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


def equal(name: str, case: Case, out: Path, comm: MPI.Intracomm) -> None:
    """Compare a run with plain torch."""
    mine: list[Any] = []
    for part in range(1, case.parts + 1):
        result = ours(case, out, part, comm, mine)
    batches = [of_rank for of_rank in comm.allgather(mine) if of_rank]
    assert {len(of_rank) for of_rank in batches} == {STEPS}, name
    model, opt = plain(case, batches)
    end = net()
    end.load_state_dict(result.state_dict)
    distance = float((vector(end) - vector(model)).norm() / vector(model).norm())
    assert distance < 1e-12, (name, distance)
    assert_same_state(mt.optimizer_state(result.out), opt)


def still(name: str, out: Path) -> None:
    """Freeze the first layer in the first half of a run, and nothing in the second."""
    options, groups = STILL[name]
    case = Case("adamw", "tiny", options, (*groups, ZERO), parts=2)
    half = ours(case, out, 1, WORLD, [], lambda model, step: None)
    torch.manual_seed(0)
    start = net().state_dict()
    for key, tensor in start.items():
        change = float((half.state_dict[key] - tensor).abs().max())
        same = key.startswith("0.") or key == ZERO.pattern
        assert change == 0 if same else 0 < change < 1e-7, (name, key, change)
    whole = ours(case, out, 2, WORLD, [], lambda model, step: model[0].requires_grad_(True))
    for key in ("0.weight", "0.bias"):
        assert not torch.equal(whole.state_dict[key], start[key]), (name, key)
    assert torch.equal(whole.state_dict[ZERO.pattern], start[ZERO.pattern]), name
    if name == "easgd":
        return  # its state is each worker's own
    state = mt.optimizer_state(out)["state"]
    before, now = (result.summary["global_step"] for result in (half, whole))
    later = [now - before] * 2  # of the first layer; what is of a group is behind the rest
    expected = [now, *later, now] if groups else [*later, now, now]
    assert [int(state[k]["step"]) for k in range(4)] == expected, (name, before, now)


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
