"""Measures: their catalogue, timing in turn, and table of rows."""

import ast
import importlib
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.errors import UserError, unknown

if TYPE_CHECKING:
    from mpips.mpi.world import Cluster

Names = tuple[str, str, str]  # texts of a row: measure, case and the other side
Both = tuple[Sequence[float], Sequence[float]]  # times of mpips and of the other side
RIGHT = (2, 3, 5, 6)  # right-aligned columns of the table


@dataclass(frozen=True)
class Options:
    """Options of the bench.

    Attributes:
        repeats: Number of times that each side is measured, in turn.
        quick: Whether to use small sizes only, which test the measures but not the speed.
        sizes: Bytes of the parameters, for measures with several sizes; empty for the default.
    """

    repeats: int = 5
    quick: bool = False
    sizes: tuple[int, ...] = ()

    def pick(self, normal: Sequence[int], quick: Sequence[int]) -> Sequence[int]:
        """Return the sizes to measure: the option's, or the default of a measure."""
        return self.sizes or (quick if self.quick else normal)

    def aimed(self, row: "Row") -> "Row":
        """Return a row; for a quick run, without its aim."""
        return replace(row, reach=None) if self.quick else row

    def times(self, bounds: tuple[int, int], wanted: int) -> int:
        """Return the number of iterations in one repeat: `wanted` within bounds, or a tenth."""
        least, most = bounds
        return max(least, min(most, wanted) // (10 if self.quick else 1))


class Ratio(float):
    """The median of several ratios.

    Attributes:
        spread: Smallest and largest ratio; None if there is only one.
    """

    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        measure: Measured quantity.
        case: Sizes and ranks.
        value: Result of mpips.
        unit: Unit of `value` and `other`. For a rate, `ratio` is value / other; for a time or a
            size, other / value.
        beside: Name of the other side.
        other: Result of the other side in the same run.
        ratio: Advantage of mpips; above 1, mpips is better. A `Ratio` if there are several.
        reach: Smallest ratio that is the aim, or None without an aim.
    """

    measure: str
    case: str
    value: float
    unit: str
    beside: str
    other: float
    ratio: float
    reach: float | None = None

    @property
    def spread(self) -> tuple[float, float] | None:
        """Smallest and largest ratio, if there are several; else None."""
        return getattr(self.ratio, "spread", None)

    @property
    def reached(self) -> bool:
        """Whether the ratio reaches the aim."""
        return self.reach is None or self.ratio >= self.reach

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {**asdict(self), "spread": self.spread, "reached": self.reached}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Row":
        """Build a row from the value of `to_json`."""
        row = cls(**{field.name: data[field.name] for field in fields(cls)})
        ratio = Ratio(row.ratio)
        ratio.spread = data["spread"] and tuple(data["spread"])
        return replace(row, ratio=ratio)


def in_turn(
    cluster: "Cluster", sides: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Time several sides in turn, `repeats` times each, after one turn to warm up.

    Args:
        cluster: All ranks.
        sides: Functions by name, which may be collective.
        repeats: Number of timed turns.

    Returns:
        Seconds of each repeat by side, from a common start to the end of the last rank.

    Collective: yes.
    """
    from mpips.mpi.collectives import begin_maximum  # starts MPI, which the driver must not

    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            cluster.barrier()
            cluster.barrier()  # ranks may leave the first one at different times
            start = time.perf_counter()
            side()
            spent = np.array([time.perf_counter() - start])
            longest = np.zeros(1)
            cluster.wait_request(begin_maximum(cluster.comm, spent, longest))
            if repeat:
                times[name].append(float(longest[0]))
    return times


def compare(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float, Ratio]:
    """Return the medians of two series of times taken in turn, and of the ratios other / mine."""
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    ratio = Ratio(statistics.median(ratios))
    ratio.spread = min(ratios), max(ratios)
    return statistics.median(mine), statistics.median(other), ratio


def rates(names: Names, work: float, unit: str, times: Both, reach: float | None = None) -> Row:
    """Return the row of two sides that did the same work in turn, as rates.

    Args:
        names: Texts of the row.
        work: Amount of work of each side in each repeat.
        unit: Unit of the rate.
        times: Seconds of both sides.
        reach: Smallest ratio that is the aim, or None.
    """
    mine, other, ratio = compare(*times)
    return Row(*names[:2], work / mine, unit, names[2], work / other, ratio, reach)


def milliseconds(names: Names, steps: float, times: Both, reach: float | None = None) -> Row:
    """Return the row of two sides as times of a step, with `steps` per repeat; see `rates`."""
    mine, other, ratio = compare(*times)
    ms = 1e3 / steps
    return Row(*names[:2], mine * ms, "ms", names[2], other * ms, ratio, reach)


def significant(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits as text, such as 1,234 or 0.0123."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table of text."""
    head = ("measure", "case", "mpips", "beside it", "", "ratio", "spread", "aim")
    cells = [head, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if k in RIGHT else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    aim = "" if row.reach is None else f"{row.reach:.3g} {'ok' if row.reached else 'MISSED'}"
    mine, other = (f"{significant(v)} {row.unit}" for v in (row.value, row.other))
    spread = "" if row.spread is None else "-".join(f"{ratio:.2f}" for ratio in row.spread)
    return row.measure, row.case, mine, other, row.beside, f"{row.ratio:.2f}", spread, aim


def say_row(row: Row) -> None:
    """Print a new row to stderr, before the final table of all rows."""
    print(f"  {'  '.join(filter(None, _cells(row)))}", file=sys.stderr, flush=True)


def bytes_text(size: int) -> str:
    """Return a size for a table, such as 64 KB (binary) or 16.8 MB (decimal)."""
    return f"{size >> 10} KB" if size < 1 << 20 else f"{size / 1e6:.1f} MB"


@dataclass(frozen=True)
class Measure:
    """One measure.

    Attributes:
        name: Name on the command line and of the module.
        worlds: Number of ranks of each world that the driver starts; with ``--quick``, only the
            first.
        least: Smallest number of ranks.
        nodes: Smallest number of nodes. The driver has one node, and skips measures for several.
        named: Whether the measure runs only if it is named, since it takes long.
        package: Package of the module.
    """

    name: str
    worlds: tuple[int, ...] = ()
    least: int = 1
    nodes: int = 1
    named: bool = False
    package: str = "mpips.tools.bench"

    @property
    def has_jobs(self) -> bool:
        """Whether the measure starts its own jobs, so that the driver calls it."""
        return not self.worlds and self.nodes == 1

    def obstacle(self, ranks: int | None, nodes: int) -> UserError | None:
        """Return the error if a world, or for None ranks the driver, cannot run the measure."""
        if ranks is None:
            remedy = "run it by mpirun or srun, with ranks on several hosts"
            error = UserError(f"measure {self.name} without mpirun", "a world", remedy)
            return error if self.nodes > 1 else None
        got = f"measure {self.name} in a world of {ranks} on {nodes} node{'s' * (nodes > 1)}"
        if self.has_jobs:
            remedy = f"run python -m {self.package} {self.name}, without mpirun"
            return UserError(got, "none: it starts jobs of its own", remedy)
        if ranks < self.least:
            return UserError(got, f"at least {self.least} ranks", "use mpirun -n 3")
        if nodes < self.nodes:
            return UserError(got, f"at least {self.nodes} nodes", "name several hosts")
        return None

    @property
    def run(self) -> Callable[..., Any]:
        """Function that returns or yields rows; all ranks call it, or the driver (`has_jobs`)."""
        return importlib.import_module(f"{self.package}.{self.name}").run

    @property
    def title(self) -> str:
        """The first sentence of the module's docstring, read without importing it."""
        spec = importlib.util.find_spec(f"{self.package}.{self.name}")
        assert spec is not None, self.name
        with open(spec.origin or "", encoding="utf-8") as file:
            text = ast.get_docstring(ast.parse(file.read())) or ""
        return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")


class Catalogue(dict[str, Measure]):
    """Measures by name, in the order in which they run."""

    def __init__(self, *measures: Measure) -> None:
        super().__init__((measure.name, measure) for measure in measures)

    def choose(
        self, names: Sequence[str], ranks: int | None = None, nodes: int = 1
    ) -> list[Measure]:
        """Return the measures of some names, or all that can run and need not be named.

        Args:
            names: Names of measures; empty for all.
            ranks: Number of ranks of the world; None for the driver, which starts worlds.
            nodes: Number of nodes of the world.

        Raises:
            UserError: If a name is unknown, or a named measure cannot run.
        """
        for name in names:
            if name not in self:
                raise unknown("measure", name, self)
        chosen = []
        for measure in self.values():
            if measure.name not in names if names else measure.named:
                continue
            obstacle = measure.obstacle(ranks, nodes)
            if names and obstacle is not None:
                raise obstacle
            chosen += [measure] if obstacle is None else []
        return chosen

    def listing(self) -> str:
        """Return names and titles of the measures, one per line."""
        width = max(len(name) for name in self)
        return "".join(f"{m.name:{width}}  {m.title}\n" for m in self.values())


MEASURES = Catalogue(
    Measure("pushpull", (3,), least=2),
    Measure("rounds", (2, 4, 8)),
    Measure("rules", (1,)),
    Measure("codecs", (1,)),
    Measure("rows", (1,)),
    Measure("remote_rows", (2,), least=2),
    Measure("link", least=2, nodes=2),
    Measure("wire", least=2, nodes=2),
    Measure("memory"),
    Measure("scale", (4, 8), least=3),
)
