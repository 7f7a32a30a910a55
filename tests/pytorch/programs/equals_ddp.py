"""Mode sync makes the updates that torch's DistributedDataParallel makes of the same batches.

AdamW's rate and weight decay are powers of two: torch multiplies parameters by 1 - rate * decay as
float32 has it, which for most numbers is another decay, by up to a per cent. With 1e-3 and 0.01
that makes 1.7e-6 of the 6.8e-7 seen here.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import nets
import torch
from mpi4py import MPI
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mpips
import mpips.torch as mt

SIZE = 8
RULES = {
    "sgd": (mpips.SGD(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    "momentum": (
        mpips.Momentum(0.02, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.02, momentum=0.9),
    ),
    "adamw": (
        mpips.AdamW(2**-10, weight_decay=2**-8),
        lambda p: torch.optim.AdamW(p, 2**-10, weight_decay=2**-8),
    ),
}
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Case(NamedTuple):
    """A rule, a model, for how many steps, and how near the ends are to each other."""

    rule: str
    model: Callable[[], nn.Module] = nets.Net
    steps: int = 100
    tolerance: float = 1e-6


def double() -> nn.Module:
    """Return the net in float64."""
    return nets.Net().double()


CASES = {
    "quick": (Case("sgd", nets.Odd), Case("adamw")),
    "long": (Case("sgd"), Case("momentum"), Case("adamw", double, tolerance=1e-12)),
}


def ours(case: Case, out: Path) -> tuple[mt.Result, Batches]:
    """Return what a run ends with, and the batches that this rank had in it."""
    train_set, _ = nets.digits()
    batches: Batches = []

    def train(worker: mt.Worker) -> None:
        for x, y in worker.loader(train_set, batch_size=SIZE):
            batches.append((x.to(worker.model.out.weight.dtype), y))
            F.cross_entropy(worker.model(batches[-1][0]), y).backward()
            worker.optimizer.step()

    how = {"mode": "sync", "steps": case.steps, "out": out, "quiet": True, "eval_every": 0}
    return mt.run(train, model=case.model, optimizer=RULES[case.rule][0], **how), batches


def ddp(case: Case, batches: Batches) -> dict[str, torch.Tensor]:
    """Return the state dict that DDP ends with after the same batches."""
    torch.manual_seed(0)
    module = case.model()
    copy = DistributedDataParallel(module, find_unused_parameters=case.model is nets.Odd)
    optimizer = RULES[case.rule][1]([p for p in module.parameters() if p.requires_grad])
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(copy(x), y).backward()
        optimizer.step()
    return module.state_dict()


def vector(state: Mapping[str, torch.Tensor], names: Iterable[str]) -> torch.Tensor:
    """Return the named tensors as one vector."""
    return torch.cat([state[name].double().flatten() for name in names])


def main(folder: Path, which: str) -> None:
    """Compare each."""
    world = MPI.COMM_WORLD
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", meeting, rank=world.rank, world_size=world.size)
    for k, case in enumerate(CASES[which]):
        result, batches = ours(case, folder / str(k))
        assert len(batches) == case.steps
        state, expected = result.state_dict, ddp(case, batches)
        names = [name for name in result.params if "running" not in name]
        a, b = vector(state, names), vector(expected, names)
        distance = float((a - b).norm() / b.norm())
        assert distance < case.tolerance, (case, distance)
        if case.model is nets.Odd:
            assert torch.equal(state["same.weight"], state["out.weight"])
            assert "first.weight" not in result.params
            for key in ("first.weight", "unused.weight", "unused.bias"):
                assert torch.equal(state[key], expected[key]), key
    world.Barrier()  # gloo's thread aborts a rank whose peer has ended before it (1 run of 5)
    distributed.destroy_process_group()
    print(f"rank {world.rank}: equal", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
