"""Embeddings with rows on servers, in place of torch's.

A forward pass reads the rows of its ids, each once, and looks up the ids in these few rows as
torch does in a weight. What the backward pass leaves for them waits, and goes out with the step.
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
    """Where the embeddings of a model read rows, and where the gradients of these wait.

    A copy of a module reads from the same; one that was pickled reads nowhere.

    Attributes:
        find: `RowsModule.find_rows`, at which a graph of torch.compile ends, and the next begins.
    """

    def __init__(self) -> None:
        self._pull: Pull | None = None
        self.find: Find = RowsModule.find_rows
        # By the id of the rows, which are held, so that no other has it.
        self._waiting: dict[int, tuple[torch.Tensor, str, np.ndarray]] = {}
        self._noticed: Callable[[], None] = lambda: None

    def __deepcopy__(self, memo: Any) -> "Source":
        return self

    def __reduce__(self) -> tuple[type["Source"], tuple[()]]:
        return Source, ()

    def open(self, pull: Pull, noticed: Callable[[], None] = lambda: None) -> None:
        """Have rows be read until `close`.

        Args:
            pull: Reads rows, given a table and their numbers.
            noticed: Called within a backward pass whenever it has added to a gradient.
        """
        self._pull, self._noticed = pull, noticed
        self.find = torch.compiler.disable(RowsModule.find_rows)  # imports much: on workers alone

    def close(self) -> None:
        """Read no more."""
        self._pull = None
        self.forget()

    def read(self, kind: str, table: str, numbers: np.ndarray) -> np.ndarray:
        """Return rows, shape (n, dim), for an embedding of a kind.

        Raises:
            UserError: If no run goes on.
        """
        if self._pull is None:
            got = f"a forward pass of an mpips.torch.{kind} outside a run"
            expected = "one in a model that mpips.torch.run trains: its rows lie with the servers"
            remedy = "result.rows(table, ids) has them later, as torch.nn.Embedding.from_pretrained"
            raise UserError(got, expected, f"{remedy} takes them")
        return self._pull(table, numbers)

    def leaf(self, table: str, numbers: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Return rows as a tensor of the same memory, whose gradient is pushed with the step.

        Nothing is kept of rows that no backward pass comes to.
        """
        found = torch.from_numpy(rows)

        def wait(leaf: torch.Tensor) -> None:
            self._waiting[id(leaf)] = leaf, table, numbers
            self._noticed()

        if torch.is_grad_enabled():
            found.requires_grad_()
            found.register_post_accumulate_grad_hook(wait)
        return found

    def push_into(self, push: Push) -> None:
        """Push the gradients that wait."""
        for leaf, table, numbers in self._waiting.values():
            assert leaf.grad is not None, "it waits since it has one"
            k = len(numbers)  # behind them is the padding
            push(table, numbers, leaf.grad.detach()[:k].numpy())
        self.forget()

    def forget(self) -> None:
        """Drop the gradients that wait."""
        for leaf, _, _ in self._waiting.values():
            leaf.grad = None
        self._waiting.clear()


class RowsModule(torch.nn.Module):
    """What both kinds have: a table, by the name that the module has in its model.

    Args:
        table: The table.
        padding_idx: Id whose row reads as zeros and is not trained, from the end if negative, but
            where ids are hashed.

    Attributes:
        num_embeddings: Rows of the table; `embedding_dim` numbers each.
        padding_idx: As given, from the beginning.
        table: As given.

    Raises:
        UserError: If there is no such row.
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
        # Goes where the model goes, and has its dtype, where that is one of 16 bits.
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self.bind("", Source())

    def bind(self, name: str, source: Source) -> None:
        """Have the rows be those of a table that is called so."""
        self._name, self._source = name, source
        self._ownership = Ownership(name, self.table, 1)

    def find_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Read the rows of ids, those of an id once.

        Returns:
            The rows, shape (k, dim), the place of each id among them, shape of `ids`, and the
            place of the padding, None where it is not among them.

        Raises:
            UserError: If an id is none of a row's, or no run goes on.

        Collective: no. Blocks: as `mpips.Worker.pull_rows`.
        """
        kind = type(self).__name__
        if not isinstance(ids, torch.Tensor) or ids.is_nested:
            got = "nested input" if isinstance(ids, torch.Tensor) else f"input {type(ids).__name__}"
            raise UserError(f"{got} of an mpips.torch.{kind}", "a tensor of ids")
        flat = ids.detach().cpu().reshape(-1).numpy()
        if self.table.hashed:  # whoever reads rows finds which they are
            numbers, places = np.unique(self._ownership.check(flat), return_inverse=True)
        else:
            grouped = self._ownership.group(flat)
            numbers = flat[grouped.order[grouped.starts[:-1]]].astype(np.int64, copy=False)
            places = np.empty(len(flat), np.int64)
            places[grouped.order] = np.repeat(np.arange(len(numbers)), np.diff(grouped.starts))
        numbers, padding = self._padding_last(numbers, places)
        rows = self._source.read(kind, self._name, numbers)
        if padding is not None:
            rows[padding] = 0
        found = self._source.leaf(self._name, numbers[:padding], rows)
        dtype = self._like.dtype if self._like.itemsize == 2 else found.dtype  # as parameters have
        at = torch.from_numpy(places).reshape(ids.shape).to(ids.device)
        return found.to(self._like.device, dtype), at, padding

    def _padding_last(
        self, numbers: np.ndarray, places: np.ndarray
    ) -> tuple[np.ndarray, int | None]:
        """Have the padding be the last of the rows, and return its place, if it is among them."""
        found = np.flatnonzero(numbers == self.padding_idx)
        if not found.size:
            return numbers, None
        at, last = int(found[0]), len(numbers) - 1
        numbers[[at, last]] = numbers[[last, at]]
        was_last = places == last
        places[places == at] = last
        places[was_last] = at
        return numbers, last

    def extra_repr(self) -> str:
        """Return what ``print`` shows of it."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


def bind_tables(model: torch.nn.Module, source: Source) -> dict[str, Table]:
    """Have the embeddings of a model read from a source; returns their tables by name.

    Raises:
        UserError: If the model is an embedding itself, which has no name.
    """
    if isinstance(model, RowsModule):
        got = f"a model that is an {type(model).__name__} and nothing else"
        raise UserError(got, "a module that has it", "such as torch.nn.Sequential(...)")
    found = {name: m for name, m in model.named_modules() if isinstance(m, RowsModule)}
    for name, module in found.items():
        module.bind(name, source)
    return {name: module.table for name, module in found.items()}


class Embedding(RowsModule):
    """In place of `torch.nn.Embedding`: its rows are a table of the servers, not a weight here.

    The table is called as the module is in its model, such as ``deep.items``. In the loop a forward
    pass reads the rows as they are now; the gradient goes out by rows with ``opt.step()``.

    Args:
        num_embeddings: Rows of the table; ids go from 0 to ``num_embeddings - 1``.
        embedding_dim: Numbers of a row.
        padding_idx: Id whose row reads as zeros and is not trained.
        init: What a row holds before it is touched; by default N(0, 1), as in torch.
        **options: The others of `mpips.Table`: ``optimizer``, ``capacity``, ``push_rows``,
            ``ownership``, ``evict_after``, and ``hashed``, by which ids are any integers of 64
            bits.

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        init: Init = Normal(1.0),  # noqa: B008  # it cannot change
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
            UserError: If an id is none of a row's, or no run goes on.

        Collective: no. Blocks: as `mpips.Worker.pull_rows`.
        """
        rows, places, padding = self._source.find(self, input)
        return F.embedding(places, rows, padding)


class EmbeddingBag(RowsModule):
    """In place of `torch.nn.EmbeddingBag`: sums or means of bags of rows; see `Embedding`.

    Args:
        num_embeddings: See `Embedding`; `embedding_dim` and those below as well.
        mode: ``mean``, as in torch by default, or ``sum``.
        include_last_offset: Whether `offsets` have the end of the last bag too.
        padding_idx: Id that is left out of bags.

    Raises:
        UserError: If a number is out of range, or the mode is another.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        init: Init = Normal(1.0),  # noqa: B008  # it cannot change
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
        """Return the sum or mean of each bag; zeros of an empty one.

        Args:
            input: Ids, integers, a bag in each row of shape (bags, n), or all in one of shape (n,).
            offsets: Where each bag begins in `input` of one dimension, shape (bags,).
            per_sample_weights: What each row is multiplied by, in mode ``sum``; shape of `input`.
                A gradient goes to them too.

        Returns:
            Shape (bags, embedding_dim), of the run's dtype.

        Raises:
            UserError: As `Embedding.forward`; what torch raises of the other arguments.

        Collective: no. Blocks: as `mpips.Worker.pull_rows`.
        """
        rows, places, padding = self._source.find(self, input)
        offsets = offsets.to(places.dtype) if offsets is not None else None
        return F.embedding_bag(
            places, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return what ``print`` shows of it."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
