"""A net on a device ends as one whose parameters are views; on the CPU with copies as there.

Those of the CPU are made by a device that is not there, which is as late as it may be.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mpips
import mpips.torch as mt
from mpips.torch import copies as copying
from mpips.torch import model as binding
from tests.pytorch.scripts.data import digits

sys.path.append(str(Path(__file__).parents[1]))
from late_device import LateDevice

TRAIN, TEST = digits(train=True), digits(train=False)


def net() -> nn.Module:
    layers = nn.Linear(64, 80), nn.BatchNorm1d(80), nn.ReLU(), nn.Linear(80, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def metrics(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x, y = (tensor.to(next(model.parameters()).device) for tensor in batch)
    z = model(x)
    return {"loss": F.cross_entropy(z, y), "accuracy": (z.argmax(1) == y).double().mean()}


def train(worker: mt.Worker, device: str = "", early: bool = False, steps: int = 10**6) -> None:
    """Train, up to a step in which what is under way ends with the run's memory."""
    place = worker.to(device, early) if device else torch.device("cpu")
    parameter = worker.model[1].weight
    assert parameter.device == place
    held, moved = parameter.data_ptr(), False
    for x, y in worker.loader(TRAIN, batch_size=64, epochs=3):
        moved |= parameter.data_ptr() != held
        worker.optimizer.zero_grad()
        F.cross_entropy(worker.model(x.to(place)), y.to(place)).backward()
        if worker.steps == steps:
            worker.stop()
            return
        torch.nn.utils.clip_grad_norm_(worker.model.parameters(), 1.0)
        worker.optimizer.step()
    assert moved == (not device), "views move with the replica, copies stay"


def run(given: dict[str, object], mode: str, out: Path, late: bool) -> mt.Result:
    LateDevice.made.clear()
    was = binding.needs_copy, copying.device_for
    if late:
        binding.needs_copy, copying.device_for = lambda tensor: True, LateDevice
    result = mt.run(
        lambda worker: train(worker, **given), net, mpips.SGD(0.05), out=out, mode=mode,
        quiet=True, evaluate=metrics, held_out=TEST, prefetch=mode == "async",  # two replicas
    )  # fmt: skip
    binding.needs_copy, copying.device_for = was
    assert all((one.pinned, one.late) == ({}, []) for one in LateDevice.made)
    worked = any(one.copies > 50 and one.pins > 1 for one in LateDevice.made)
    assert worked == bool(LateDevice.made), "it has copied to two pinned vectors"
    return result


def main(out: Path, device: str) -> None:
    ways = {"views": {}, "late": {"device": device}, "early": {"device": device, "early": True}}
    states, close = list[Any](), 1e-5 if device == "cpu" else 1e-2
    for mode in ("sync", "async"):
        if mode == "async":
            ways["left"] = {**ways["early"], "steps": 5}
        for name, given in ways.items():
            result = run(given, mode, out / f"{mode}-{name}", bool(given) and device == "cpu")
            assert name == "left" or result.summary["accuracy"] > 0.4, result.summary
            assert {tensor.device.type for tensor in result.state_dict.values()} == {"cpu"}
            states.append(result.state_dict)
            if mode == "sync":
                torch.testing.assert_close(states[-1], states[0], rtol=close, atol=close)
        print(f"{mode} on {device} is done", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
