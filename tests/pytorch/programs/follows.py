"""Schedulers, groups, and parameters that are frozen for a while, beside plain torch.

Where a run's updates do not depend on who comes first, it ends as plain torch does that makes the
same steps, and so does its optimizer's state. Elsewhere what is frozen, or of rate zero, stays bit
for bit, and the update rule counts for a parameter the steps in which it was trained alone.

The first layer begins frozen: the loop freezes it, or the model comes so, and a group gives it a
rate.
"""

import itertools
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
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
    "amsgrad": (
        mpips.AMSGrad(RATE, beta1=0.8, beta2=0.9),
        lambda p: torch.optim.Adam(p, RATE, (0.8, 0.9), amsgrad=True),
    ),
}
SCHEDULES: dict[str, Callable[[int, int], float]] = {  # by step and worker
    "steps": lambda k, worker: 0.3 ** (k // 6),
    "warm": lambda k, worker: k / 5 if k < 5 else 0.9 ** (k - 5),
    "constant": lambda k, worker: 1.0,
    "half on worker 1": lambda k, worker: 0.5 if worker == 1 else 1.0,
    "tiny": lambda k, worker: 1e-9,
}


class Case(NamedTuple):
    """A run, and what its updates are made of."""

    rule: str
    schedule: str
    options: dict[str, Any]
    groups: tuple[mpips.Group, ...] = ()
    parts: int = 1  # runs that it is made of
    begun: bool = False  # by plain torch, which has made steps before


SPLIT = mpips.Group("*.bias", weight_decay=0), mpips.Group("2.*", 0.02, 0.3)
LATER = (mpips.Group("0.*", lr=RATE / 2),)  # the model comes with that frozen
ZERO = mpips.Group("2.bias", lr=0)
SYNC: dict[str, Any] = {"mode": "sync"}
SSP: dict[str, Any] = {"mode": "ssp", "servers": 2, "staleness_bound": 0}
LOCAL: dict[str, Any] = {"mode": "local_sgd", "local_steps": 4}
KEPT = {**LOCAL, "local_slots": "keep"}
EQUAL = {
    "sync": Case("adamw", "warm", SYNC, parts=2),
    "nodes": Case("adamw", "warm", {**SYNC, "node_size": 1}, LATER, 3),
    "remote": Case("adamw", "steps", {**SSP, "node_size": 1}, LATER, 2),
    "a server": Case("adamw", "steps", {**SYNC, "servers": 1, "clip": 1e9}, SPLIT),
    "both": Case("momentum", "warm", {**SYNC, "node_size": 2, "servers": 1}, LATER, 3),
    "allreduce": Case("adamw", "steps", {**SYNC, "reduce": "allreduce"}, SPLIT, 2),
    "one worker": Case("adamw", "warm", SSP, SPLIT, 3),
    "local": Case("sgd", "warm", {**LOCAL, "local_steps": 1}, LATER),
    "begun": Case("amsgrad", "warm", {**SYNC, "node_size": 2, "servers": 1}, SPLIT, 2, begun=True),
    "begun, a worker": Case("adamw", "steps", SSP, parts=2, begun=True),
    "differ": Case("sgd", "half on worker 1", SYNC, SPLIT),
    "differ on nodes": Case("adamw", "half on worker 1", {**SYNC, "node_size": 1}, SPLIT),
}
ALONE = {
    "local": Case("adamw", "constant", LOCAL, parts=3),
    "kept": Case("adamw", "constant", KEPT, parts=2, begun=True),
}
CARRIED = {"mode": "async", "node_size": 2, "node_aggregation": True, "server_ranks": (2,)}
STILL: dict[str, tuple[dict[str, Any], tuple[mpips.Group, ...]]] = {
    "async": ({"mode": "async"}, LATER),
    "easgd": ({"mode": "easgd", "tau": 2}, LATER),
    "carried": (CARRIED, ()),
    "compensated": ({"mode": "async", "delay_compensation": 0.1}, ()),
    "low rank": ({**SYNC, "node_size": 1, "codec": "powersgd"}, LATER),
    "backup": ({**SYNC, "servers": 1, "backup_workers": 1}, ()),
}
QUICK = ("nodes", "async")


def net() -> nn.Module:
    """Return a net in float64; a shard ends within its first weight."""
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def freeze(model: nn.Module, step: int) -> None:
    """Train the first layer too after a while, and freeze the weight of the last one for one."""
    if step >= 7:
        model[0].requires_grad_(True)
    model[2].weight.requires_grad_(not 10 <= step < 17)


def ours(
    case: Case, out: Path, part: int, comm: MPI.Intracomm, mine: list[Any], freeze: Any = freeze
) -> mt.Result:
    """Return what a part of a run ends with; the batches of this rank by step go to `mine`."""
    comes_frozen, rates = LATER[0] in case.groups, list[float]()
    state = plain(case)[1].state_dict() if case.begun else None

    def model() -> nn.Module:
        start, _ = plain(case)
        return start if comes_frozen else start.requires_grad_(True)

    def train(worker: mt.Worker) -> None:
        model, opt, before = worker.model, worker.optimizer, len(mine)
        assert model[0].weight.requires_grad != comes_frozen
        model[0].requires_grad_(False)
        scheduler = LambdaLR(opt, lambda k: SCHEDULES[case.schedule](k, worker.id))
        opt.register_step_post_hook(lambda *_: rates.append(opt.param_groups[0]["lr"]))
        for x, y in worker.loader(DATA, batch_size=SIZE):
            while scheduler.last_epoch < worker.steps:
                scheduler.step()
            freeze(model, worker.steps)
            mine.append((x, y))
            F.cross_entropy(model(x), y).backward()
            opt.step()
        assert len(rates) == len(mine) - before

    steps = STEPS * part // case.parts // case.options.get("local_steps", 1)
    return mt.run(
        train, model, RULES[case.rule][0], optimizer_state=state, steps=steps, out=out,
        resume="auto", comm=comm, quiet=True, eval_every=0, groups=list(case.groups),
        **case.options,
    )  # fmt: skip


def grouped(model: nn.Module, groups: tuple[mpips.Group, ...]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"params": []} for _ in range(1 + len(groups))]
    for k, group in enumerate(groups, 1):
        numbers = {"lr": group.lr, "weight_decay": group.weight_decay}
        found[k] |= {key: number for key, number in numbers.items() if number is not None}
    for name, parameter in model.named_parameters():
        of = [k for k, group in enumerate(groups, 1) if fnmatchcase(name, group.pattern)]
        found[[*of, 0][0]]["params"].append(parameter)
    return [group for group in found if group["params"]]


def plain(case: Case, *batches: list[Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer of plain torch after the same batches, of all workers."""
    torch.manual_seed(0)
    model = net()
    model[0].requires_grad_(False)
    opt = RULES[case.rule][1](grouped(model, case.groups))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()

    for _ in range(3 * case.begun):
        step(*DATA.tensors)
    for k, of_step in enumerate(zip(*batches, strict=True)):
        freeze(model, k)
        sizes = [len(x) for x, _ in of_step]
        rates = [SCHEDULES[case.schedule](k, worker) for worker in range(len(sizes))]
        rate = float(np.average(rates, weights=sizes))
        for group in opt.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * rate
        step(*(torch.cat(part) for part in zip(*of_step, strict=True)))
    return model, opt


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def equal(name: str, case: Case, out: Path, comm: MPI.Intracomm) -> None:
    """Compare a run and its optimizer's state with plain torch, but for rates of a schedule."""
    mine: list[Any] = []
    for part in range(1, case.parts + 1):
        result = ours(case, out, part, comm, mine)
    batches = [of_rank for of_rank in comm.allgather(mine) if of_rank]
    assert {len(of_rank) for of_rank in batches} == {STEPS}, name
    model, opt = plain(case, *batches)
    end = net()
    end.load_state_dict(result.state_dict)
    distance = float((vector(end) - vector(model)).norm() / vector(model).norm())
    assert distance < 1e-12, (name, distance)
    found, expected = mt.optimizer_state(result.out), opt.state_dict()
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-9, atol=1e-12)
    for group, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert group == {key: theirs["initial_lr" if key == "lr" else key] for key in group}
    opt.load_state_dict(found)


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


def counts(mode: str, by: str, out: Path) -> None:
    """Make steps of two batches in two parts, at rates by one of the two counts."""
    data = TensorDataset(points[:180])  # 18 updates an epoch, or 6 rounds
    made = list[tuple[int, float]]()  # count and rate of each step of this rank

    def train(worker: mt.Worker) -> None:
        scheduler = LambdaLR(worker.optimizer, lambda k: 1 / (1 + k))
        for k, _ in enumerate(worker.loader(data, batch_size=5)):
            while scheduler.last_epoch < getattr(worker, by):
                scheduler.step()
            sum(p.sum() for p in worker.model.parameters()).backward()
            if k % 2 == 0:
                made.append((getattr(worker, by), scheduler.get_last_lr()[0]))
            worker.optimizer.step()

    sgd, of_round = (lambda p: torch.optim.SGD(p, RATE)), WORLD.size if mode == "sync" else 1
    for epochs in (3, 6):
        given = {"mode": mode, "accumulate": 2, "epochs": epochs, "resume": "auto", "out": out}
        result = mt.run(train, net, sgd, quiet=True, **given)
    total, every = 6 * 18 // of_round, sorted(itertools.chain(*WORLD.allgather(made)))
    assert result.summary["global_step"] == total, (mode, by)
    assert all(rate == pytest.approx(RATE / (1 + count), abs=1e-12) for count, rate in every)
    torch.manual_seed(0)
    moved = vector(net()) - nn.utils.parameters_to_vector(map(torch.tensor, result.params.values()))
    pushed = sum(rate for _, rate in every) / of_round
    torch.testing.assert_close(moved, torch.full_like(moved, pushed), rtol=0, atol=1e-12)
    if mode == "sync":
        assert [count for count, _ in made] == [*range(total)], by
    elif by == "updates":
        late = max(count - k for k, (count, _) in enumerate(every))
        assert late <= 0, "no step is of a later update than there was"
        assert every[-1][0] >= total - 2 * WORLD.size, (every[-1], total)


def main(out: Path, which: str) -> None:
    if which == "counts":
        for mode, by in itertools.product(("async", "sync"), ("steps", "updates")):
            counts(mode, by, out / f"{mode}-{by}")
        return
    names = [name for name in (*EQUAL, *STILL) if (name in QUICK) == (which == "quick")]
    for k, name in enumerate(names):
        if name in EQUAL:
            equal(name, EQUAL[name], out / f"equal-{k}", WORLD)
        else:
            still(name, out / f"still-{k}")
    alone = WORLD.Split(WORLD.rank)
    for k, (name, case) in enumerate(ALONE.items() if which == "long" else ()):
        equal(name, case, out / f"alone-{WORLD.rank}-{k}", alone)
