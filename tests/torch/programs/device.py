"""A net on a device ends as one whose parameters are views; on the CPU with copies as there."""

import sys
from pathlib import Path

import nets
import torch
from torch.nn import functional as F

import mpips
import mpips.torch as mt
from mpips.torch import model as binding


def main(out: Path, device: str) -> None:
    """Train twice, and compare."""
    train_set, test_set = nets.digits()

    def metrics(model: torch.nn.Module, batch: list[torch.Tensor]) -> dict[str, float]:
        place = next(model.parameters()).device
        return nets.metrics(model, [tensor.to(place) for tensor in batch])

    def train(worker: mt.Worker, device: str = "") -> None:
        place = worker.to(device) if device else torch.device("cpu")
        parameter = next(p for p in worker.model.parameters() if p.requires_grad)
        assert parameter.device == place
        held, moved = parameter.data_ptr(), False
        for x, y in worker.loader(train_set, batch_size=64, epochs=3):
            moved |= parameter.data_ptr() != held
            worker.optimizer.zero_grad()
            F.cross_entropy(worker.model(x.to(place)), y.to(place)).backward()
            torch.nn.utils.clip_grad_norm_(worker.model.parameters(), 1.0)
            worker.optimizer.step()
        assert moved == (not device), "views move with the replica, copies stay"

    def on_device(worker: mt.Worker) -> None:
        train(worker, device)

    for mode in ("sync", "async"):
        how = {"mode": mode, "quiet": True, "evaluate": metrics, "held_out": test_set}
        rule, apart = mpips.SGD(0.05), binding.is_apart
        views = mt.run(train, nets.Odd, rule, out=out / f"{mode}-views", **how)
        if device == "cpu":  # no other device is needed to see that copies do as well
            binding.is_apart = lambda tensor: True
        copies = mt.run(on_device, nets.Odd, rule, out=out / f"{mode}-copies", **how)
        binding.is_apart = apart
        assert copies.summary["accuracy"] > 0.4, copies.summary
        assert {tensor.device.type for tensor in copies.state_dict.values()} == {"cpu"}
        if mode == "sync":
            close = 1e-5 if device == "cpu" else 1e-2
            torch.testing.assert_close(copies.state_dict, views.state_dict, rtol=close, atol=close)
        print(f"{mode} on {device} is done", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
