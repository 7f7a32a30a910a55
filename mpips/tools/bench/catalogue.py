"""Catalogue of measures, each a module with a function ``run``."""

import ast
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpips.errors import UserError, unknown


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

    @property
    def run(self) -> Callable[..., Any]:
        """Returns or yields rows: ``run(cluster, options)``, or ``run(options)`` of the driver."""
        function: Callable[..., Any]
        function = importlib.import_module(f"{self.package}.{self.name}").run
        return function

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

    def choose(self, names: Sequence[str]) -> list[Measure]:
        """Return the measures of these names, or all but those that have to be named.

        Raises:
            UserError: If a name is not known.
        """
        for name in names:
            if name not in self:
                raise unknown("measure", name, self)
        return [m for m in self.values() if (m.name in names if names else not m.named)]

    def choose_for_driver(self, names: Sequence[str]) -> list[Measure]:
        """Return those of these names, or of all, that need one node.

        Raises:
            UserError: If a name is not known, or names one that needs several.
        """
        chosen = self.choose(names)
        for measure in chosen:
            if names and measure.nodes > 1:
                remedy = "run it by mpirun or srun, with ranks on several hosts"
                raise UserError(f"measure {measure.name} without mpirun", "a world", remedy)
        return [m for m in chosen if m.nodes == 1]

    def choose_for_world(self, names: Sequence[str], ranks: int, nodes: int) -> list[Measure]:
        """Return those of these names, or of all, that a world can run.

        Raises:
            UserError: If a name is not known, if the world is too small for it, or if it starts
                jobs of its own.
        """
        chosen = self.choose(names)
        if not names:
            chosen = [m for m in chosen if not m.has_jobs]
            return [m for m in chosen if m.least <= ranks and m.nodes <= nodes]
        for measure in chosen:
            got = f"measure {measure.name} in a world of {ranks} on {nodes} node{'s' * (nodes > 1)}"
            if measure.has_jobs:
                remedy = f"run python -m {measure.package} {measure.name}, without mpirun"
                raise UserError(got, "none: it starts jobs of its own", remedy)
            if ranks < measure.least:
                raise UserError(got, f"at least {measure.least} ranks", "use mpirun -n 3")
            if nodes < measure.nodes:
                raise UserError(got, f"at least {measure.nodes} nodes", "name several hosts")
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
