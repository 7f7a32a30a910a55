"""PyTorch models: `run` trains a `torch.nn.Module` by a loop that reads like any other.

    import mpips
    import mpips.torch as mt
    from torch.nn import functional as F

    def train(worker: mt.Worker) -> None:
        model, opt = worker.model, worker.optimizer
        for x, y in worker.loader(dataset, batch_size=64, epochs=5):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()

    result = mt.run(train, model=Net, optimizer=mpips.AdamW(1e-3), mode="async")

The model's parameters are views of the worker's replica, its gradients views of what is pushed.
"""

from mpips.errors import UserError

try:
    import torch  # noqa: F401
except ImportError as problem:
    got, expected = f"no PyTorch ({problem})", "torch >= 2.4"
    raise UserError(got, expected, "pip install 'mpips[torch]'") from problem

from mpips.torch.optimizer import Optimizer
from mpips.torch.run import Result, run
from mpips.torch.state import optimizer_state
from mpips.torch.worker import Worker

__all__ = ["Optimizer", "Result", "Worker", "optimizer_state", "run"]
