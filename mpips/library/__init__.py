"""Library for programs with a training loop of their own.

    import mpips

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches((x, y), batch_size=64, epochs=5):
            params = worker.pull()
            loss = my_gradient(params, batch, out=worker.grads)
            worker.push(loss)

    result = mpips.run(train, params=init, optimizer=mpips.Adam(1e-3), mode="async")
    sys.exit(result.code)

The guide has it whole: ``python -m mpips guide library``. The names are in `mpips` itself, which
imports them, and starts MPI, when they are used.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def import_name(
    package: str, modules: Mapping[str, str], name: str, into: dict[str, Any]
) -> object:
    """Import a name of a package when it is used, and all others of its module.

    Args:
        package: What has the name, and the modules.
        modules: In which module each name of the package is.
        name: One of them.
        into: The names of the package. A function called as its module is replaces that there.

    Raises:
        AttributeError: If there is no such name.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module = import_module(f"{package}.{modules[name]}")
    into.update({n: getattr(module, n) for n, m in modules.items() if m == modules[name]})
    return into[name]
