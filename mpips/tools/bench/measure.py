"""Measures: their catalogue, timing in turn, and table of rows."""

import ast
import importlib
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.errors import UserError, unknown

if TYPE_CHECKING:
    from mpips.mpi.world import Cluster

Names = tuple[str, str, str]  # of a row: what is measured, the case, what mpips stands beside
Both = tuple[Sequence[float], Sequence[float]]  # times of mpips and of the other side
RIGHT = (2, 3, 5, 6)  # columns of the table that are flushed right


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        repeats: Times that each side is measured, in turn.
        quick: Small sizes only: shows that everything runs, and says nothing about speed.
        sizes: Bytes of the parameters, in measures that have several sizes; empty for their own.
    """

    repeats: int = 5
    quick: bool = False
    sizes: tuple[int, ...] = ()

    def pick(self, normal: Sequence[int], quick: Sequence[int]) -> Sequence[int]:
        """Return the sizes to measure at: those asked for, or the measure's own."""
        return self.sizes or (quick if self.quick else normal)

    def times(self, bounds: tuple[int, int], wanted: int) -> int:
        """Return how often to do something in one repeat: as wanted within bounds, or a tenth."""
        least, most = bounds
        return max(least, min(most, wanted) // (10 if self.quick else 1))


class Ratio(float):
    """The median of ratios, which also has their spread.

    Args:
        ratios: All of them; or the median alone.
        spread: The least and the greatest, where `ratios` are not given.
    """

    spread: tuple[float, float] | None

    def __new__(
        cls, ratios: Sequence[float] | float, spread: Sequence[float] | None = None
    ) -> "Ratio":
        """Take the median."""
        if isinstance(ratios, Sequence):
            spread, ratios = (min(ratios), max(ratios)), statistics.median(ratios)
        self = super().__new__(cls, ratios)
        self.spread = None if spread is None else (spread[0], spread[1])
        return self


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        measure: What is measured.
        case: Sizes and ranks.
        value: What mpips reached.
        unit: Of `value` and `other`; a rate if `ratio` is value over other, else a time.
        beside: What mpips is compared to.
        other: What that reached, in the same run.
        ratio: How much better mpips is: above 1 it is faster. A `Ratio` where several were taken.
        reach: The least ratio that is aimed at, or None where none is.
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
        """The least and the greatest of the ratios, where several were taken."""
        return self.ratio.spread if isinstance(self.ratio, Ratio) else None

    @property
    def reached(self) -> bool:
        """Whether the ratio is what is aimed at."""
        return self.reach is None or self.ratio >= self.reach

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {**asdict(self), "spread": self.spread, "reached": self.reached}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Row":
        """Return the row that `to_json` gave."""
        row = cls(**{field.name: data[field.name] for field in fields(cls)})
        return replace(row, ratio=Ratio(row.ratio, data["spread"]))


def aims_for(options: Options, rows: Iterable[Row]) -> list[Row]:
    """Return the rows with their aims, or without any in a quick run."""
    return [replace(row, reach=None) for row in rows] if options.quick else list(rows)


def in_turn(
    cluster: "Cluster", sides: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Time each side `repeats` times, in turn, after once for warming up.

    Returns:
        The seconds of each repeat of each side: from a common start to the last rank's end.

    Collective: yes, and so may the sides be.
    """
    from mpips.mpi.collectives import begin_maximum  # starts MPI, which the driver does not

    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            cluster.barrier()
            cluster.barrier()  # all come out of the first one at their leisure
            start = time.perf_counter()
            side()
            spent = np.array([time.perf_counter() - start])
            longest = np.zeros(1)
            cluster.wait_request(begin_maximum(cluster.comm, spent, longest))
            if repeat:
                found[name].append(float(longest[0]))
    return found


def compare(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float, Ratio]:
    """Return the medians of two series of times taken in turn, and of other over mine."""
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    return statistics.median(mine), statistics.median(other), Ratio(ratios)


def rates(names: Names, work: float, unit: str, times: Both, reach: float | None = None) -> Row:
    """Return the row of two sides that did the same work in turn.

    Args:
        names: Of the row.
        work: What each side did in each of its times.
        unit: Of work a second.
        times: Of both sides.
        reach: The least ratio that is aimed at.
    """
    mine, other, ratio = compare(*times)
    return Row(*names[:2], work / mine, unit, names[2], work / other, ratio, reach)


def milliseconds(names: Names, steps: float, times: Both, reach: float | None = None) -> Row:
    """Return the row of the time of a step, of which each side made so many; see `rates`."""
    mine, other, ratio = compare(*times)
    ms = 1e3 / steps
    return Row(*names[:2], mine * ms, "ms", names[2], other * ms, ratio, reach)


def significant(value: float, digits: int = 3) -> str:
    """Return a number with that many digits: 1,234 or 0.0123."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, one line each."""
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


def say_rows(rows: Sequence[Row]) -> None:
    """Print rows to stderr as they come; `table` has them all at the end."""
    for row in rows:
        print(f"  {'  '.join(filter(None, _cells(row)))}", file=sys.stderr, flush=True)


def bytes_text(size: int) -> str:
    """Return a size as the tables have it: 64 KB (binary) or 16.8 MB (decimal)."""
    return f"{size >> 10} KB" if size < 1 << 20 else f"{size / 1e6:.1f} MB"


@dataclass(frozen=True)
class Measure:
    """One measure.

    Attributes:
        name: Its name on the command line, and of its module.
        worlds: Ranks of each world that the driver starts for it, for ``--quick`` of the first.
        least: The least ranks on which it can run.
        nodes: The least nodes. The driver, which has one, leaves out what needs several.
        named: Whether it is taken only where it is named: it is long.
        package: The package of its module.
    """

    name: str
    worlds: tuple[int, ...] = ()
    least: int = 1
    nodes: int = 1
    named: bool = False
    package: str = "mpips.tools.bench"

    @property
    def has_jobs(self) -> bool:
        """Whether it starts jobs of its own, and so is called by the driver."""
        return not self.worlds and self.nodes == 1

    def obstacle(self, ranks: int | None, nodes: int) -> UserError | None:
        """Return why a world cannot take it, or of None ranks the driver; None if it can."""
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
        """Returns or yields rows: ``run(cluster, options)``, or ``run(options)`` of the driver."""
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
    """Measures by name, in the order in which they are taken."""

    def __init__(self, *measures: Measure) -> None:
        super().__init__((measure.name, measure) for measure in measures)

    def choose(
        self, names: Sequence[str], ranks: int | None = None, nodes: int = 1
    ) -> list[Measure]:
        """Return the measures of these names, or all that can be taken and need not be named.

        Args:
            names: Of measures; empty for all.
            ranks: Of the world that takes them; None for the driver, which starts worlds.
            nodes: Of the world.

        Raises:
            UserError: If a name is not known, or one that is named cannot be taken.
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
        """Return the names and what they measure, a line each."""
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
