"""The tables of a PyTorch model: its own embeddings, and those of torch that are to be sparse."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpips.checkpoint import newest_whole
from mpips.checkpoint.files import PathLike
from mpips.errors import UserError
from mpips.layout.tables import Table
from mpips.optim.row_rules import ROW_RULES
from mpips.planning.tables import TABLE_MODES
from mpips.ps.saved_rows import find_rows
from mpips.torch.embedding import MODES, Embedding, EmbeddingBag, RowsModule, Source
from mpips.torch.model import check_sum

SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)
MADE = "_mpips_made_as"  # a check sum of the weight that the module was made with


@contextmanager
def noting_weights() -> Iterator[None]:
    """Note in each sparse embedding of torch that is made in the block how its weight begins."""
    before = {kind: kind.__init__ for kind in SPARSE}

    def noted(init: Any) -> Any:
        def __init__(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            given = options.get("_weight") is not None or any(
                isinstance(arg, torch.Tensor) for arg in args
            )
            if self.sparse and not given and self.weight.device.type == "cpu":
                setattr(self, MADE, check_sum(self.weight))

        return __init__

    for kind, init in before.items():
        kind.__init__ = noted(init)
    try:
        yield
    finally:
        for kind, init in before.items():
            kind.__init__ = init


class ModelTables:
    """The tables of a model, whose sparse embeddings of torch are replaced by those of mpips.

    Args:
        model: The module, made within `noting_weights`.
        options: Of the run, with its rule as ``optimizer``, if that is given.

    Attributes:
        tables: By name: that of the module in the model.
        source: Where their modules read.
        taken: Those that were torch's, by name, with the dtype of their weight.

    Raises:
        UserError: If one cannot be a table, or has no rule, or the run's mode has no tables.
    """

    def __init__(self, model: torch.nn.Module, options: Mapping[str, Any]) -> None:
        if isinstance(model, RowsModule) or (isinstance(model, SPARSE) and model.sparse):
            got = f"a model that is an {type(model).__name__} and nothing else"
            raise UserError(got, "a module that has it", "such as torch.nn.Sequential(...)")
        sparse = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, SPARSE) and module.sparse and module.weight.requires_grad
        }
        uses = Counter(id(p) for m in model.modules() for p in m._parameters.values())
        for name, module in sparse.items():
            _check(name, module, uses[id(module.weight)])
        self.taken = {name: module.weight.dtype for name, module in sparse.items()}
        ours = {id(module): _replacing(module) for module in sparse.values()}
        for parent in model.modules():
            for key, child in parent._modules.items():
                parent._modules[key] = ours.get(id(child), child)
        self.source = Source()
        self._modules = {n: m for n, m in model.named_modules() if isinstance(m, RowsModule)}
        for name, module in self._modules.items():
            module.bind(name, self.source)
        self.tables = {name: module.table for name, module in self._modules.items()}
        _check_options(self.tables, options)

    @property
    def note(self) -> str:
        """What is to be said at the start of those that were torch's; empty without any."""
        if not self.taken:
            return ""
        names = ", ".join(self.taken)
        return f"sparse embeddings taken as tables, their rows N(0, 1) of the run's seed: {names}"

    def weights(self, run: PathLike) -> dict[str, torch.Tensor]:
        """Return the rows of those that were torch's as weights, as a run has left them.

        Of a run that has no checkpoint there are none.
        """
        found, _ = newest_whole(run) if self.taken else (None, [])
        weights = {}
        for name, dtype in self.taken.items() if found is not None else ():
            assert found is not None
            rows = torch.from_numpy(find_rows(found, name, np.arange(self.tables[name].rows)))
            if (padding := self._modules[name].padding_idx) is not None:
                rows[padding] = 0
            weights[f"{name}.weight"] = rows.to(dtype)
        return weights


def _check(name: str, module: Any, uses: int) -> None:
    """Check that a sparse embedding of torch can be a table.

    Raises:
        UserError: If not, with what to do.
    """
    kind = type(module)
    what = f"{name!r}, a torch.nn.{kind.__name__}(sparse=True)"
    dense = "leave out sparse=True: it is a parameter then, in every mode"
    own = "use mpips.torch.Embedding or EmbeddingBag, whose init= may be such as mpips.Uniform(0.1)"
    if kind not in SPARSE:
        got = f"{name!r} of {kind.__name__}, which is a sparse embedding of torch and more"
        raise UserError(got, "one of torch's own classes, to be taken as a table", dense)
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    mode = getattr(module, "mode", MODES[0])
    lacks = {
        f"with max_norm={module.max_norm}": module.max_norm is not None,
        "with scale_grad_by_freq": module.scale_grad_by_freq,
        "whose weight another module has too": uses > 1,
        "with hooks": any(hooks),
        f"of mode {mode!r}": mode not in MODES,
    }
    for lack, there in lacks.items():
        if there:
            raise UserError(f"{what}, {lack}", "one without, to be taken as a table", dense)
    if getattr(module, MADE, None) != check_sum(module.weight):
        got = f"{what}, whose weight is not as torch makes it"
        expected = "rows that begin N(0, 1), to be taken as a table"
        raise UserError(got, expected, f"{own}; or {dense}")


def _replacing(module: Any) -> RowsModule:
    """Return what takes the place of a sparse embedding of torch."""
    shape, padding = (module.num_embeddings, module.embedding_dim), module.padding_idx
    found: RowsModule
    if isinstance(module, torch.nn.EmbeddingBag):
        last = module.include_last_offset
        found = EmbeddingBag(
            *shape, mode=module.mode, include_last_offset=last, padding_idx=padding
        )
    else:
        found = Embedding(*shape, padding_idx=padding)
    found.to(module.weight.dtype)
    return found.train(module.training)


def _check_options(tables: Mapping[str, Table], options: Mapping[str, Any]) -> None:
    """Check what a run has for its tables; what is not said here its planning looks at.

    Raises:
        UserError: If it is of a mode without them, or of a rule that is none for rows.
    """
    mode = options.get("mode", TABLE_MODES[0])
    if tables and mode not in TABLE_MODES:
        got = f"mode {mode!r} with the embeddings {', '.join(tables)}, whose rows are tables"
        remedy = "torch.nn.Embedding without sparse=True is a parameter, in every mode"
        raise UserError(got, f"mode {' or '.join(TABLE_MODES)}", remedy)
    of_run, rule = [n for n, t in tables.items() if t.optimizer is None], options.get("optimizer")
    if of_run and rule is not None and rule not in ROW_RULES:
        got = f"optimizer {rule!r} of the run for the embeddings {', '.join(of_run)}"
        remedy = "give mpips.torch.Embedding its own, such as optimizer=mpips.Adagrad(0.1)"
        raise UserError(got, f"one for rows of tables: {', '.join(ROW_RULES)}", remedy)
