"""Embeddings with rows on servers, in place of torch's.

A forward pass reads each row of its ids once, and looks up the ids in these few rows, as torch does
in a weight. The gradients of the rows are pushed with the step.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from mpips.errors import UserError
from mpips.layout.tables import Init, Normal, Ownership, Table

MODES = ("sum", "mean")
Pull = Callable[[str, np.ndarray], np.ndarray]
Push = Callable[[str, np.ndarray, np.ndarray], None]
Find = Callable[["RowsModule", torch.Tensor], tuple[torch.Tensor, torch.Tensor, int | None]]


class Source:
    """Reader of rows for the embeddings of a model, and store of their gradients until the push.

    A deep copy of a module has the same source. A pickled module has a closed one.

    Attributes:
        find: `RowsModule.find_rows`, outside of graphs of torch.compile, which break there.
    """

    def __init__(self) -> None:
        self._pull: Pull | None = None
        self.find: Find = RowsModule.find_rows
        # By the id of the tensor of rows, which the entry holds, so that the id stays unique.
        self._waiting: dict[int, tuple[torch.Tensor, str, np.ndarray]] = {}
        self._notice: Callable[[], None] = lambda: None

    def __deepcopy__(self, memo: Any) -> "Source":
        return self

    def __reduce__(self) -> tuple[type["Source"], tuple[()]]:
        return Source, ()

    def open(self, pull: Pull, notice: Callable[[], None] = lambda: None) -> None:
        """Set the functions that forward and backward passes call until `close`.

        Args:
            pull: Reads rows, by the name of their table and their numbers.
            notice: Called within a backward pass when a gradient of rows is complete.
        """
        self._pull, self._notice = pull, notice
        self.find = torch.compiler.disable(RowsModule.find_rows)  # a slow import: only on workers

    def close(self) -> None:
        """Refuse further reads, and drop the waiting gradients."""
        self._pull = None
        self.forget()

    def read(self, kind: str, table: str, numbers: np.ndarray) -> np.ndarray:
        """Return rows, shape (n, dim), for an embedding of class `kind`.

        Raises:
            UserError: If the source is closed.
        """
        if self._pull is None:
            got = f"a forward pass of an mpips.torch.{kind} outside a run"
            expected = "one in a model that mpips.torch.run trains: its rows lie with the servers"
            remedy = "result.rows(table, ids) has them later, as torch.nn.Embedding.from_pretrained"
            raise UserError(got, expected, f"{remedy} takes them")
        return self._pull(table, numbers)

    def leaf(self, table: str, numbers: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Return rows as a tensor of the same memory, whose gradient `push_into` pushes.

        Nothing is stored for rows that no backward pass reaches.
        """
        tensor = torch.from_numpy(rows)

        def wait(leaf: torch.Tensor) -> None:
            self._waiting[id(leaf)] = leaf, table, numbers
            self._notice()

        if torch.is_grad_enabled():
            tensor.requires_grad_()
            tensor.register_post_accumulate_grad_hook(wait)
        return tensor

    def push_into(self, push: Push) -> None:
        """Push the waiting gradients."""
        for leaf, table, numbers in self._waiting.values():
            assert leaf.grad is not None, "the hook of its gradient has run"
            k = len(numbers)  # the row of the padding comes after them
            push(table, numbers, leaf.grad.detach()[:k].numpy())
        self.forget()

    def forget(self) -> None:
        """Drop the waiting gradients."""
        for leaf, _, _ in self._waiting.values():
            leaf.grad = None
        self._waiting.clear()


class RowsModule(torch.nn.Module):
    """Base of both embeddings: a table, with the name that the module has in its model.

    Args:
        table: The table.
        padding_idx: Id whose row reads as zeros and is not trained. A negative id counts from the
            end, unless the table hashes its ids.

    Attributes:
        num_embeddings: Number of rows of the table.
        embedding_dim: Numbers in a row.
        padding_idx: The id, counted from the beginning unless ids are hashed.
        table: The table, as given.

    Raises:
        UserError: If the table has no row of `padding_idx`.
    """

    _like: torch.Tensor

    def __init__(self, table: Table, padding_idx: int | None) -> None:
        super().__init__()
        rows, self.padding_idx = table.rows, padding_idx
        if padding_idx is not None and not table.hashed:
            if not -rows <= padding_idx < rows:
                got = f"padding_idx={padding_idx} of {rows} embeddings"
                raise UserError(got, f"one from {-rows} to {rows - 1}")
            self.padding_idx = padding_idx % rows
        self.table, self.num_embeddings, self.embedding_dim = table, rows, table.dim
        # Moves with the model to a device, and to its dtype, which counts if it has 16 bits.
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self.bind("", Source())

    def bind(self, name: str, source: Source) -> None:
        """Set the name of the table, and the source of its rows."""
        self._name, self._source = name, source
        self._ownership = Ownership(name, self.table, 1)

    def find_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Read the rows of ids, each row once.

        Returns:
            The rows, shape (k, dim); the position of each id among them, shape of `ids`; and the
            position of the padding row, None if it is not among them.

        Raises:
            UserError: If the table has no row of an id, or no run is in progress.

        Collective: no. Blocks: as `mpips.Worker.pull_rows`.
        """
        kind = type(self).__name__
        if not isinstance(ids, torch.Tensor) or ids.is_nested:
            got = "nested input" if isinstance(ids, torch.Tensor) else f"input {type(ids).__name__}"
            raise UserError(f"{got} of an mpips.torch.{kind}", "a tensor of ids")
        flat = ids.detach().cpu().reshape(-1).numpy()
        if self.table.hashed:  # the reader of rows hashes the ids
            numbers, positions = np.unique(self._ownership.check(flat), return_inverse=True)
        else:
            grouped = self._ownership.group(flat)
            numbers = flat[grouped.order[grouped.starts[:-1]]].astype(np.int64, copy=False)
            positions = np.empty(len(flat), np.int64)
            positions[grouped.order] = np.repeat(np.arange(len(numbers)), np.diff(grouped.starts))
        numbers, positions, padding = self._padding_last(numbers, positions)
        rows = self._source.read(kind, self._name, numbers)
        if padding is not None:
            rows[padding] = 0
        leaf = self._source.leaf(self._name, numbers[:padding], rows)
        dtype = self._like.dtype if self._like.itemsize == 2 else leaf.dtype  # as of parameters
        at = torch.from_numpy(positions).reshape(ids.shape).to(ids.device)
        return leaf.to(self._like.device, dtype), at, padding

    def _padding_last(
        self, numbers: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int | None]:
        """Return both with the padding as the last row, and its position; None without one."""
        indices = np.flatnonzero(numbers == self.padding_idx)
        if not indices.size:
            return numbers, positions, None
        order = np.arange(len(numbers))
        order[[indices[0], -1]] = order[[-1, indices[0]]]
        return numbers[order], order[positions], len(numbers) - 1

    def extra_repr(self) -> str:
        """Return the arguments that ``print`` shows."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


def bind_tables(model: torch.nn.Module, source: Source) -> dict[str, Table]:
    """Bind the embeddings of a model to a source; returns their tables by name.

    Raises:
        UserError: If the model itself is an embedding, which has no name.
    """
    if isinstance(model, RowsModule):
        got = f"a model that is an {type(model).__name__} and nothing else"
        raise UserError(got, "a module that has it", "such as torch.nn.Sequential(...)")
    modules = {name: m for name, m in model.named_modules() if isinstance(m, RowsModule)}
    for name, module in modules.items():
        module.bind(name, source)
    return {name: module.table for name, module in modules.items()}


class Embedding(RowsModule):
    """Replacement of `torch.nn.Embedding`: servers own its rows, as a table, in place of a weight.

    The table has the module's name in its model, such as ``deep.items``. In the loop, a forward
    pass reads the current rows, and ``opt.step()`` pushes their gradients.

    Args:
        num_embeddings: Number of rows of the table; ids are from 0 to ``num_embeddings - 1``.
        embedding_dim: Numbers in a row.
        padding_idx: Id whose row reads as zeros and is not trained.
        init: Initial values of a row; by default N(0, 1), as in torch.
        **options: Other arguments of `mpips.Table`: ``optimizer``, ``capacity``, ``push_rows``,
            ``ownership``, ``evict_after``, and ``hashed``, which allows any integers of 64 bits as
            ids.

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        init: Init = Normal(1.0),  # noqa: B008  # it is immutable
        **options: Any,
    ) -> None:
        super().__init__(Table(num_embeddings, embedding_dim, init, **options), padding_idx)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids.

        Args:
            input: Ids, integers of any shape, duplicates allowed.

        Returns:
            The rows, shape (*input.shape, embedding_dim), of the run's dtype.

        Raises:
            UserError: If the table has no row of an id, or no run is in progress.

        Collective: no. Blocks: as `mpips.Worker.pull_rows`.
        """
        rows, positions, padding = self._source.find(self, input)
        return F.embedding(positions, rows, padding)


class EmbeddingBag(RowsModule):
    """Replacement of `torch.nn.EmbeddingBag`: sums or means of bags of rows; see `Embedding`.

    Args:
        num_embeddings: See `Embedding`, as for `embedding_dim`, `init` and `options`.
        mode: ``mean``, the default as in torch, or ``sum``.
        include_last_offset: Whether `offsets` also has the end of the last bag.
        padding_idx: Id that bags leave out.

    Raises:
        UserError: If a number is out of range, or the mode is unknown.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        init: Init = Normal(1.0),  # noqa: B008  # it is immutable
        **options: Any,
    ) -> None:
        super().__init__(Table(num_embeddings, embedding_dim, init, **options), padding_idx)
        if mode not in MODES:
            raise UserError(f"mode={mode!r} of an EmbeddingBag", " or ".join(MODES))
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum or mean of each bag; zeros for an empty bag.

        Args:
            input: Ids, integers: a bag in each row, shape (bags, n), or all bags, shape (n,).
            offsets: Begin of each bag in a one-dimensional `input`, shape (bags,).
            per_sample_weights: Factor of each row, in mode ``sum``; shape of `input`. They get
                gradients.

        Returns:
            Shape (bags, embedding_dim), of the run's dtype.

        Raises:
            UserError: As `Embedding.forward`. Torch checks the other arguments.

        Collective: no. Blocks: as `mpips.Worker.pull_rows`.
        """
        rows, positions, padding = self._source.find(self, input)
        offsets = offsets.to(positions.dtype) if offsets is not None else None
        return F.embedding_bag(
            positions, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the arguments that ``print`` shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
