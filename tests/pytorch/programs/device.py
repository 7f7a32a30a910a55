"""A net on a device ends as one whose parameters are views; on the CPU with copies as there.

Those of the CPU are made by a device that is not there, which is as late as it may be.
"""

import sys
from pathlib import Path

import nets
import torch
from torch.nn import functional as F

import mpips
import mpips.torch as mt
from mpips.torch import copies as copying
from mpips.torch import model as binding

sys.path.append(str(Path(__file__).parents[1]))
from late_device import LateDevice


def main(out: Path, device: str) -> None:
    """Train twice, and compare."""
    train_set, test_set = nets.digits()

    def metrics(model: torch.nn.Module, batch: list[torch.Tensor]) -> dict[str, float]:
        place = next(model.parameters()).device
        return nets.metrics(model, [tensor.to(place) for tensor in batch])

    def train(worker: mt.Worker, device: str = "", early: bool = False, steps: int = 10**6) -> None:
        place = worker.to(device, early) if device else torch.device("cpu")
        parameter = next(p for p in worker.model.parameters() if p.requires_grad)
        assert parameter.device == place
        held, moved = parameter.data_ptr(), False
        for x, y in worker.loader(train_set, batch_size=64, epochs=3):
            moved |= parameter.data_ptr() != held
            worker.optimizer.zero_grad()
            F.cross_entropy(worker.model(x.to(place)), y.to(place)).backward()
            if worker.steps == steps:  # what is under way ends with the run's memory
                worker.stop()
                return
            torch.nn.utils.clip_grad_norm_(worker.model.parameters(), 1.0)
            worker.optimizer.step()
        assert moved == (not device), "views move with the replica, copies stay"

    def on_device(worker: mt.Worker) -> None:
        train(worker, device)

    def on_device_early(worker: mt.Worker) -> None:
        train(worker, device, early=True)

    def left(worker: mt.Worker) -> None:
        train(worker, device, early=True, steps=5)

    found = dict[str, mt.Result]()
    for mode in ("sync", "async"):
        how = {"mode": mode, "quiet": True, "evaluate": metrics, "held_out": test_set}
        how["prefetch"] = mode == "async"  # two replicas
        for loop in (train, on_device, on_device_early, *[left] * (mode == "async")):
            LateDevice.made.clear()
            needs_copy, device_for = binding.needs_copy, copying.device_for
            if device == "cpu" and loop is not train:
                binding.needs_copy, copying.device_for = lambda tensor: True, LateDevice
            folder = out / f"{mode}-{loop.__name__}"
            copies = found[loop.__name__] = mt.run(
                loop, nets.Odd, mpips.SGD(0.05), out=folder, **how
            )
            binding.needs_copy, copying.device_for = needs_copy, device_for
            for late in LateDevice.made:
                assert (late.pinned, late.late) == ({}, [])
            worked = any(late.copies > 50 and late.pins > 1 for late in LateDevice.made)
            assert worked == bool(LateDevice.made), "it has copied to two pinned vectors"
            assert loop is left or copies.summary["accuracy"] > 0.4, copies.summary
            assert {tensor.device.type for tensor in copies.state_dict.values()} == {"cpu"}
            if mode == "sync":
                close = 1e-5 if device == "cpu" else 1e-2
                views = found["train"].state_dict
                torch.testing.assert_close(copies.state_dict, views, rtol=close, atol=close)
        print(f"{mode} on {device} is done", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
