"""Options of the benchmarks, beyond those of `mpips bench`."""

from dataclasses import dataclass
from pathlib import Path

from mpips.tools.bench.measure import Options


@dataclass(frozen=True)
class BenchmarkOptions(Options):
    """Options of the benchmarks.

    Attributes:
        venv: Virtual environment with the peers' packages, or None.
        plot: File for the picture of the measures convergence and hosts, or None.
    """

    venv: Path | None = None
    plot: Path | None = None
