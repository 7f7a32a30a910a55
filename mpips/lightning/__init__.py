"""Lightning: `Trainer(strategy=Strategy(...))` and `Fabric(strategy=FabricStrategy(...))`.

    import lightning
    import mpips.lightning

    strategy = mpips.lightning.Strategy(mode="async", servers=1)
    trainer = lightning.Trainer(strategy=strategy, max_epochs=5)
    trainer.fit(LitModel(), loader)

``mpirun -n 3 python script.py`` starts two workers, which fit, and a server, which serves them.
Every rank runs the script.
"""

from typing import TYPE_CHECKING

from mpips.errors import UserError
from mpips.library import import_name

try:
    import lightning.pytorch  # noqa: F401
except ImportError as problem:
    got, expected = f"no Lightning ({problem})", "lightning >= 2.6"
    raise UserError(got, expected, "pip install 'mpips[lightning]'") from problem

if TYPE_CHECKING:
    from mpips.lightning.fabric import FabricStrategy as FabricStrategy
    from mpips.lightning.strategy import Strategy as Strategy

_MODULES = {"FabricStrategy": "fabric", "Strategy": "strategy"}
__all__ = ["FabricStrategy", "Strategy"]


def __getattr__(name: str) -> object:
    """Import a public name at its first use, which starts MPI."""
    return import_name(__name__, _MODULES, name, globals())


def __dir__() -> list[str]:
    return [*globals(), *__all__]
