"""Problems with tables of rows, such as embeddings.

Such a problem has tables, in its layout or as its attribute `tables`. In place of ``loss_and_grad``
and ``evaluate`` it has ``loss_and_grad_rows`` and ``evaluate_rows``, which take an object that
reads and pushes rows. A user's class need not subclass `TableProblem`.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from mpips.errors import UserError
from mpips.layout import Layout
from mpips.problems.base import Arrays, Problem

if TYPE_CHECKING:
    from mpips.datasets.base import Batch
    from mpips.layout.tables import Table


class RowReads(Protocol):
    """Reader of table rows."""

    def pull(self, name: str, ids: Any) -> np.ndarray:
        """Read rows of a table.

        Args:
            name: Name of the table.
            ids: Ids of the rows, integers of any shape; duplicates are allowed.

        Returns:
            The rows, shape (*ids.shape, dim), a new array.
        """


class Rows(RowReads, Protocol):
    """Reader of table rows that also takes their gradients."""

    def push(self, name: str, ids: Any, grads: Any) -> None:
        """Add gradients of rows to those of the step; gradients of the same row are summed.

        Args:
            name: Name of the table.
            ids: Ids of the rows, as in `pull`.
            grads: Gradient of the mean loss over the batch by each row, shape (*ids.shape, dim),
                finite.
        """


class TableProblem(Problem):
    """Base class of problems with tables.

    Attributes:
        tables: Tables by name; set by the subclass's ``__init__``, unless they are in its `layout`.
    """

    tables: Mapping[str, "Table"] = MappingProxyType({})

    @abstractmethod
    def loss_and_grad_rows(self, params: Arrays, rows: Rows, batch: "Batch", out: Arrays) -> float:
        """Return the mean loss over the batch, write its gradient, and push that of its rows.

        Args:
            params: As in `Problem.loss_and_grad`.
            rows: Reads and pushes rows. Push no gradient if the loss is not finite.
            batch: As in `Problem.loss_and_grad`.
            out: As in `Problem.loss_and_grad`.

        Returns:
            As in `Problem.loss_and_grad`.
        """

    @abstractmethod
    def evaluate_rows(self, params: Arrays, rows: RowReads, batch: "Batch") -> dict[str, float]:
        """Return means over the batch, as `Problem.evaluate`.

        Args:
            params: Parameters.
            rows: Reads rows.
            batch: Held-out samples.
        """

    def wanted_rows(self, batch: "Batch") -> Mapping[str, np.ndarray]:
        """Return the ids by table that `loss_and_grad_rows` will pull for a batch.

        mpips requests rows of other nodes ahead: while the last batch is computed, or in mode ssp
        while the worker waits for its parameters. It requests no rows of tables that are missing
        here. In a problem without this method, it requests none.

        Args:
            batch: The samples of a later step; not written.
        """
        return {}


def tables_of_problem(problem: Any) -> Mapping[str, "Table"]:
    """Return the tables of a problem, from its layout or its attribute `tables`.

    Raises:
        UserError: If both have tables, and they differ.
    """
    own, of_layout = getattr(problem, "tables", {}), problem.layout.tables
    if own and of_layout and own != of_layout:
        got = f"tables of a problem, {own}, beside {of_layout} in its layout"
        raise UserError(got, "one of them", "give them by Layout.of(..., tables=...) alone")
    return own or of_layout


def uses_rows(problem: Any) -> bool:
    """Return whether a problem, or its class, has the method `loss_and_grad_rows`."""
    return callable(getattr(problem, "loss_and_grad_rows", None))


def wanted_rows(problem: Any, batch: "Batch") -> Mapping[str, np.ndarray]:
    """Return `TableProblem.wanted_rows` of a batch; empty for a problem without that method."""
    find = getattr(problem, "wanted_rows", None)
    return find(batch) if callable(find) else {}


def evaluation(
    problem: Problem, params: Arrays, rows: RowReads | None
) -> Callable[["Batch"], Mapping[str, float]]:
    """Return a function that evaluates a batch, whether or not the problem has tables."""
    if not uses_rows(problem):
        return lambda batch: problem.evaluate(params, batch)
    assert rows is not None, "modes without tables refuse it"
    tables = cast("TableProblem", problem)
    return lambda batch: tables.evaluate_rows(params, rows, batch)


def without_tables(problem: Problem, batches: Iterable["Batch"], dtype: str) -> Problem:
    """Return the problem with the rows that these batches need as parameters.

    The parameters have the names of the tables. The new problem needs no servers, and computes only
    these batches. A problem without tables is returned itself.
    """
    if not uses_rows(problem):
        return problem
    return _RowsAsParameters(cast("TableProblem", problem), batches, dtype)


def rows_a_batch(problem: Problem) -> Mapping[str, float]:
    """Return the mean number of distinct rows of a batch, by table.

    Args:
        problem: Result of `without_tables`.
    """
    return problem.needed if isinstance(problem, _RowsAsParameters) else {}


class _RowsAsParameters(Problem):
    """A problem with tables, of which the rows that some batches need are parameters.

    Attributes:
        needed: Mean number of distinct rows of a batch, by table.
    """

    def __init__(self, problem: TableProblem, batches: Iterable["Batch"], dtype: str) -> None:
        self._problem, self.layout = problem, problem.layout
        flat = np.zeros((2, self.layout.size), dtype)
        first = problem.init(np.random.default_rng(0))
        self._tables = tables_of_problem(problem)
        found: dict[str, list[np.ndarray]] = defaultdict(list)
        for batch in batches:
            recorder = _IdRecorder(self._tables, np.dtype(dtype))
            problem.loss_and_grad_rows(first, recorder, batch, self.layout.views(flat[1]))
            for name, ids in recorder.ids.items():
                found[name].append(np.unique(np.concatenate(ids)))
        self.needed = {name: float(np.mean([*map(len, each)])) for name, each in found.items()}
        self._ids = {name: np.unique(np.concatenate(each)) for name, each in found.items()}
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        shapes |= {k: (ids.size, self._tables[k].dim) for k, ids in self._ids.items()}
        self.layout = Layout.of(shapes)

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return initial parameters; rows are normal, with the scale of their table."""
        found = self._problem.init(rng)
        for name, ids in self._ids.items():
            table = self._tables[name]
            found[name] = table.init.scale * rng.standard_normal((ids.size, table.dim))
        return found

    def loss_and_grad(self, params: Arrays, batch: "Batch", out: Arrays) -> float:
        """See `Problem.loss_and_grad`."""
        for name in self._ids:
            out[name].fill(0)
        return self._problem.loss_and_grad_rows(params, _Few(self._ids, params, out), batch, out)

    def evaluate(self, params: Arrays, batch: "Batch") -> dict[str, float]:
        """See `Problem.evaluate`."""
        return self._problem.evaluate_rows(params, _Few(self._ids, params, {}), batch)


class _IdRecorder:
    """Records the ids that are read or pushed; every row is zero."""

    def __init__(self, tables: Mapping[str, "Table"], dtype: np.dtype) -> None:
        self._tables, self._dtype = tables, dtype
        self.ids: dict[str, list[np.ndarray]] = defaultdict(list)

    def pull(self, name: str, ids: Any) -> np.ndarray:
        self.ids[name].append(np.ravel(ids))
        return np.zeros((*np.shape(ids), self._tables[name].dim), self._dtype)

    def push(self, name: str, ids: Any, grads: Any) -> None:
        self.ids[name].append(np.ravel(ids))


class _Few:
    """Reads rows from arrays, and adds their gradients to arrays."""

    def __init__(self, ids: Mapping[str, np.ndarray], params: Arrays, out: Arrays) -> None:
        self._ids, self._params, self._out = ids, params, out

    def pull(self, name: str, ids: Any) -> np.ndarray:
        return self._params[name][np.searchsorted(self._ids[name], ids)]

    def push(self, name: str, ids: Any, grads: Any) -> None:
        np.add.at(self._out[name], np.searchsorted(self._ids[name], ids), grads)
