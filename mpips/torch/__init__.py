"""PyTorch models: `run` trains a `torch.nn.Module` in your own loop.

    import mpips.torch as mt
    import torch
    from torch.nn import functional as F

    def train(worker: mt.Worker) -> None:
        model, opt = worker.model, worker.optimizer
        loader = worker.loader(dataset, batch_size=64)
        for epoch in worker.epochs(5):
            for x, y in loader:
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                opt.step()

    def optimizer(params):
        return torch.optim.AdamW(params, 1e-3)

    result = mt.run(train, model=Net, optimizer=optimizer, mode="async")
    sys.exit(result.code)

The model's parameters are views of the worker's replica. Its gradients are views of the buffer that
`step` pushes.
"""

from typing import TYPE_CHECKING

from mpips.errors import UserError
from mpips.library import import_name

try:
    import torch  # noqa: F401
except ImportError as problem:
    got, expected = f"no PyTorch ({problem})", "torch >= 2.4"
    raise UserError(got, expected, "pip install 'mpips[torch]'") from problem

if TYPE_CHECKING:
    from mpips.torch.embedding import Embedding as Embedding
    from mpips.torch.embedding import EmbeddingBag as EmbeddingBag
    from mpips.torch.optimizer import Optimizer as Optimizer
    from mpips.torch.run import Result as Result
    from mpips.torch.run import run as run
    from mpips.torch.state import optimizer_state as optimizer_state
    from mpips.torch.streamed import Streamed as Streamed
    from mpips.torch.worker import Worker as Worker

_MODULES = {
    "Embedding": "embedding", "EmbeddingBag": "embedding", "Optimizer": "optimizer",
    "Result": "run", "Streamed": "streamed", "Worker": "worker", "optimizer_state": "state",
    "run": "run",
}  # fmt: skip
__all__ = [
    "Embedding", "EmbeddingBag", "Optimizer", "Result", "Streamed", "Worker", "optimizer_state",
    "run",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a public name at its first use: `mpips.torch.problem` also works without MPI."""
    return import_name(__name__, _MODULES, name, globals())


def __dir__() -> list[str]:
    return [*globals(), *__all__]
