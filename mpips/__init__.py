"""Parameter server over MPI: servers hold the parameters, workers compute gradients.

From the command line, ``mpirun -n 8 python -m mpips.train`` trains a built-in model, or a model in
your own file (``--problem``). In a program, `run` calls your function on every worker:

    import sys

    import mpips
    import numpy as np

    x = np.random.default_rng(0).normal(size=(1000, 3))
    y = x @ [1.0, 2.0, 3.0]

    def gradient(params, batch, out):
        error = batch.x @ params["w"] - batch.y
        out["w"][:] = batch.x.T @ error / len(batch)
        return (error**2).mean() / 2

    def train(worker):
        for batch in worker.batches((x, y), batch_size=10, epochs=5):
            worker.step(gradient, batch)

    result = mpips.run(train, params={"w": np.zeros(3)}, optimizer=mpips.Adam(0.05), mode="sync")
    print(result.params["w"])
    sys.exit(result.code)

Run it by ``mpirun -n 4 python program.py``, or by ``python program.py`` on one rank. With
``mode="async"`` some ranks are servers. `run` takes the command line's options under their names.

Contents:

    run, Worker, Result        a run, the argument of its function, and its result
    Callback                   base of callbacks on steps, epochs, evaluations and checkpoints
    SGD, Adam, AdamW, ...      update rules, with their numbers
    UpdateRule                 base of update rules of your own
    Group                      learning rates and weight decay by patterns of names
    Table, Normal, Zeros, ...  embedding tables, with rows on servers; FTRL and RowAdagrad are
                               update rules for tables only
    Store                      pull and push, for MPI programs with their own loop
    UserError                  mistake in a job, with its remedy
    mpips.torch, mpips.jax     runs of PyTorch models, and of loss functions in JAX

See ``help(mpips.run)`` and the guide: ``python -m mpips guide`` lists its pages, and
``python -m mpips guide library`` shows the page about programs.

Neither an import nor an inspection of this package starts MPI. The first use of `run`, `Worker`,
`Result` or `Store` does. ``help(mpips)`` leaves these names out until then.
"""

import sys
from typing import TYPE_CHECKING

from mpips.mpi import excepthook

if TYPE_CHECKING:
    from mpips.config.groups import Group
    from mpips.errors import UserError
    from mpips.layout.tables import Normal, Table, Uniform, Zeros
    from mpips.library.callbacks import Callback
    from mpips.library.optimizers import (
        FTRL,
        SGD,
        Adadelta,
        Adagrad,
        Adam,
        AdamW,
        AMSGrad,
        Lion,
        Momentum,
        NAdam,
        Nesterov,
        RAdam,
        RMSprop,
        RowAdagrad,
        UpdateRule,
    )
    from mpips.library.run import Result, run
    from mpips.library.store import Store
    from mpips.library.worker import Worker

__version__ = "0.1.0"
__all__ = [
    "FTRL", "SGD", "AMSGrad", "Adadelta", "Adagrad", "Adam", "AdamW", "Callback", "Group", "Lion",
    "Momentum", "NAdam", "Nesterov", "Normal", "RAdam", "RMSprop", "Result", "RowAdagrad", "Store",
    "Table", "Uniform", "UpdateRule", "UserError", "Worker", "Zeros", "run",
]  # fmt: skip
_MODULES = {
    "Callback": "library.callbacks", "Group": "config.groups", "Normal": "layout.tables",
    "Result": "library.run", "Store": "library.store", "Table": "layout.tables",
    "Uniform": "layout.tables", "UserError": "errors", "Worker": "library.worker",
    "Zeros": "layout.tables", "run": "library.run",
}  # fmt: skip
_START_MPI = {"Result", "Store", "Worker", "run"}
_LOOKING = {"inspect", "rlcompleter"}  # modules that get every name of `dir`

excepthook.arm()


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    looking = name in _START_MPI and sys._getframe(1).f_globals.get("__name__") in _LOOKING
    if name not in __all__ or looking:
        raise AttributeError(f"module 'mpips' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"mpips.{_MODULES.get(name, 'library.optimizers')}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*{*__all__, *globals()}]
