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

    adamw = mpips.AdamW(1e-3, weight_decay=0.01)
    result = mt.run(train, model=Net, optimizer=adamw, mode="async")
    sys.exit(result.code)

The model's parameters are views of the worker's replica, its gradients views of what is pushed.
"""

from typing import TYPE_CHECKING

from mpips.errors import UserError

try:
    import torch  # noqa: F401
except ImportError as problem:
    got, expected = f"no PyTorch ({problem})", "torch >= 2.4"
    raise UserError(got, expected, "pip install 'mpips[torch]'") from problem

if TYPE_CHECKING:
    from mpips.torch.embedding import Embedding, EmbeddingBag
    from mpips.torch.optimizer import Optimizer
    from mpips.torch.run import Result, run
    from mpips.torch.state import optimizer_state
    from mpips.torch.worker import Worker

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "Optimizer",
    "Result",
    "Worker",
    "optimizer_state",
    "run",
]
_MODULES = {
    "Embedding": "embedding",
    "EmbeddingBag": "embedding",
    "Optimizer": "optimizer",
    "Result": "run",
    "Worker": "worker",
    "optimizer_state": "state",
    "run": "run",
}


def __getattr__(name: str) -> object:
    """Import a name when it is used: `mpips.torch.problem` is for places without MPI too."""
    if name not in __all__:
        raise AttributeError(f"module 'mpips.torch' has no attribute {name!r}")
    from importlib import import_module

    found = {n: getattr(import_module(f"mpips.torch.{m}"), n) for n, m in _MODULES.items()}
    globals().update(found)  # `run` is the function, where its import has left the module
    return found[name]


def __dir__() -> list[str]:
    return [*globals(), *__all__]
