"""A run of PyTorch with dropout, running means, a rate of its own, and an array that it freezes."""

import sys

import torch
from torch.nn import functional as F

import mpips
import mpips.torch as mt

N, FEATURES, KINDS = 300, 12, 4
generator = torch.Generator().manual_seed(1)
x = torch.randn(N, FEATURES, generator=generator)
samples = torch.utils.data.TensorDataset(x, (x[:, :KINDS]).argmax(1))


class Net(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(FEATURES, 16), torch.nn.BatchNorm1d(16)
        self.last = torch.nn.Linear(16, KINDS)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return what the kinds are given."""
        hidden = F.dropout(F.relu(self.norm(self.first(given))), 0.2, self.training)
        found: torch.Tensor = self.last(hidden)
        return found


def metrics(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Return the mean loss."""
    return {"loss": float(F.cross_entropy(model(batch[0]), batch[1]))}


def train(worker: mt.Worker) -> None:
    """Train, from some batch on without the first layer's bias."""
    torch.manual_seed(worker.id)
    model, optimizer = worker.model, worker.optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    for number, (given, kinds) in enumerate(worker.loader(samples, batch_size=15, epochs=5)):
        model.first.bias.requires_grad_(number < 8)
        optimizer.zero_grad()
        F.cross_entropy(model(given), kinds).backward()
        optimizer.step()
        schedule.step()


def main(out: str, servers: int) -> int:
    """Run; returns the exit code."""
    options = {"servers": servers, "read": "consistent", "record": True, "quiet": True, "keep": 100}
    result = mt.run(
        train, Net, mpips.AdamW(0.01), evaluate=metrics, held_out=samples, out=out, mode="ssp",
        resume="auto", checkpoint_every="30steps", node_size=2, **options,
    )  # fmt: skip
    return int(result.code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
