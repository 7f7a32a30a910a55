"""Options of the benchmarks, beside those that all measures have."""

from dataclasses import dataclass
from pathlib import Path

from mpips.tools.bench.measure import Options


@dataclass(frozen=True)
class BenchmarkOptions(Options):
    """Options of all measures, and of some.

    Attributes:
        venv: A virtual environment with the peers' packages, or None.
        plot: File for the picture of convergence or hosts, or None.
    """

    venv: Path | None = None
    plot: Path | None = None
