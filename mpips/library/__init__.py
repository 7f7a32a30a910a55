"""Library for programs with a training loop of their own.

    import mpips

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches((x, y), batch_size=64, epochs=5):
            params = worker.pull()
            loss = my_gradient(params, batch, out=worker.grads)
            worker.push(loss)

    result = mpips.run(train, params=init, optimizer=mpips.Adam(1e-3), mode="async")
    sys.exit(result.code)

The whole page of the guide: ``python -m mpips guide library``. The public names are in `mpips`,
which imports their modules, and starts MPI, when they are first used.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def import_name(
    package: str, modules: Mapping[str, str], name: str, into: dict[str, Any]
) -> object:
    """Import a public name of a package at its first use, with all others of its module.

    Args:
        package: Name of the package.
        modules: Module of each public name, relative to the package.
        name: The name that is used.
        into: Global names of the package. They get the imported names; a function replaces a
            module of its name.

    Raises:
        AttributeError: If the package has no such name.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module = import_module(f"{package}.{modules[name]}")
    into.update({n: getattr(module, n) for n, m in modules.items() if m == modules[name]})
    return into[name]
