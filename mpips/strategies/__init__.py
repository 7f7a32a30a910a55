"""Consistency models, one a file; each has ``run(job, log) -> Outcome``."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpips.planning.job import Job
    from mpips.planning.outcome import Outcome
    from mpips.session.metrics import Log


def strategy(mode: str) -> "Callable[[Job, Log], Outcome]":
    """Return the strategy called `mode`, such as ``async``; it is imported only now."""
    import importlib

    name = {"async": "async_sgd", "sync": "sync_sgd"}.get(mode, mode)
    run: Callable[[Job, Log], Outcome] = importlib.import_module(f"mpips.strategies.{name}").run
    return run
