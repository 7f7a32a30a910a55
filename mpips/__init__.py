"""mpips, a parameter server over MPI: servers hold the parameters, workers compute gradients.

From the command line, ``mpirun -n 8 python -m mpips.train`` trains a model; as a library, `run`
calls a training function of one's own on every worker, with a `Worker` that gives it batches and
parameters and takes its gradients. ``python -m mpips.guide`` lists the pages of the guide.

Importing this package starts nothing; MPI is started when a name of it is used that needs it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpips.config.groups import Group
    from mpips.errors import UserError
    from mpips.layout.tables import Normal, Table, Uniform, Zeros
    from mpips.library.callbacks import Callback
    from mpips.library.optimizers import (
        FTRL,
        SGD,
        Adagrad,
        Adam,
        AdamW,
        Momentum,
        Nesterov,
        RMSprop,
        RowAdagrad,
    )
    from mpips.library.run import Result, run
    from mpips.library.store import Store
    from mpips.library.worker import Worker

__version__ = "0.1.0"
__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Callback",
    "Group",
    "Momentum",
    "Nesterov",
    "Normal",
    "RMSprop",
    "Result",
    "RowAdagrad",
    "Store",
    "Table",
    "Uniform",
    "UserError",
    "Worker",
    "Zeros",
    "run",
]
_MODULES = {
    "Callback": "library.callbacks",
    "Group": "config.groups",
    "Normal": "layout.tables",
    "Result": "library.run",
    "Store": "library.store",
    "Table": "layout.tables",
    "Uniform": "layout.tables",
    "UserError": "errors",
    "Worker": "library.worker",
    "Zeros": "layout.tables",
    "run": "library.run",
}


def __getattr__(name: str) -> object:
    """Import a name of the library when it is used."""
    if name not in __all__:
        raise AttributeError(f"module 'mpips' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"mpips.{_MODULES.get(name, 'library.optimizers')}")
    found: object = getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
