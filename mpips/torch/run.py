"""`mpips.torch.run`: one run of a training loop of a PyTorch model."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpips.cluster.start import Comm
from mpips.config import OPTIONS
from mpips.config.groups import GROUPS, Group, parse_groups, text_of
from mpips.errors import UserError
from mpips.layout.tables import Table
from mpips.library import run as library
from mpips.library.callbacks import Callback
from mpips.library.optimizers import Optimizer
from mpips.library.start import Start
from mpips.torch.embedding import Source, bind_tables
from mpips.torch.model import (
    DTYPES,
    Initial,
    evaluating,
    for_numpy,
    make_model,
    state_of,
    statistics_of,
    trained_parameters,
)
from mpips.torch.state import state_maker
from mpips.torch.worker import TorchSamples, Worker


@dataclass(frozen=True)
class Result(library.Result):
    """What a run leaves, on every rank; see `mpips.Result`.

    Attributes:
        state_dict: The model's, with the parameters at the end, and BatchNorm's running means,
            which `params` has behind them; other buffers are the means over the workers. Rows of
            `Embedding` and `EmbeddingBag` are not in it: `rows` reads them.
    """

    state_dict: Mapping[str, torch.Tensor]


def run(
    train: Callable[[Worker], object],
    model: Callable[[], torch.nn.Module],
    optimizer: Optimizer | None = None,
    *,
    comm: Comm | None = None,
    evaluate: Callable[[torch.nn.Module, Any], dict[str, float]] | None = None,
    held_out: Any = None,
    callbacks: Sequence[Callback] = (),
    optimizer_state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Train a PyTorch model: `train` runs on every worker, servers serve until all are done.

    Args:
        train: Called with a `Worker` on each worker; see `mpips.run`.
        model: Makes the module, such as its class; called on every rank with the same seed. Those
            of its parameters are trained that require a gradient then; `train` may freeze any of
            them, and train it again, by ``requires_grad_``; and so it may those that come frozen,
            where one of `groups` gives them a rate. `Embedding` and `EmbeddingBag` of
            mpips.torch are tables, named as they are in it.
        optimizer: The update rule, such as ``mpips.AdamW(1e-3, weight_decay=0.01)``.
        comm: As in `mpips.run`.
        evaluate: ``evaluate(model, batch)`` returns means over a batch of held-out samples,
            ``loss`` among them, and ``accuracy``, which `target_accuracy` looks at.
        held_out: A map-style dataset that is evaluated as the option `eval_every` says, and at
            the end; or a function that returns one, called on workers alone, and on evaluators.
        callbacks: As in `mpips.run`.
        optimizer_state: What the update rule of a new run begins with, the same on every rank: the
            state dict of torch's optimizer of the same rule and numbers, over the trained
            parameters in the order of `mpips.torch.optimizer_state`. Rates are the run's.
            A resumed run goes on with its own.
        **options: Likewise.

    Returns:
        The result, on every rank.

    Raises:
        UserError: As `mpips.run`; if the model has parameters that cannot be trained here, such as
            sparse embeddings of torch, or the optimizer's state is of another rule or of other
            parameters.

    Collective: yes. Blocks: until the run is over.
    """
    source = Source()
    module, tables, groups = library.agreed(comm, lambda: _make(model, options, source), options)
    options.setdefault("dtype", _dtype(module, groups))
    buffers: dict[str, np.ndarray] = {}

    def metrics(params: Mapping[str, np.ndarray], batch: Any) -> dict[str, float]:
        assert evaluate is not None, "checked with held_out"
        with evaluating(module, params):
            return evaluate(module, batch.x)

    def make_worker(start: Start) -> Worker:
        worker = Worker(start, module, source)
        over.callback(worker.close)
        return worker

    program = library.Program(
        train, make_worker, lambda start: _begin(start, source),
        lambda start: buffers.update(_mean_buffers(start, module)),
        metrics if evaluate is not None else None, held_out, TorchSamples, callbacks,
        sets_rate=True, statistics=tuple(statistics_of(module)),
        make_state=state_maker(optimizer_state, module), tables=tables,
    )  # fmt: skip
    with contextlib.ExitStack() as over:
        over.callback(source.close)
        result = library.run_program(program, Initial(module, groups), optimizer, comm, options)
    _set_buffers(module, buffers)
    return Result(**vars(result), state_dict=state_of(module, result.params))


def _groups(given: Any) -> Sequence[Group]:
    """Return the groups that a run is given; of what is none, nothing: it is refused later.

    Raises:
        UserError: If one of a list is something else.
    """
    text = text_of(given) if isinstance(given, (list, tuple)) else str(given)
    return parse_groups(text) if GROUPS.fullmatch(text) else ()


def _make(
    model: Callable[[], torch.nn.Module], options: Mapping[str, Any], source: Source
) -> tuple[torch.nn.Module, dict[str, Table], Sequence[Group]]:
    """Return a run's module, the tables that are in it, and the groups of its parameters."""
    groups = _groups(options.get("groups", ()))
    try:
        module = make_model(model, options.get("seed", OPTIONS["seed"].default), groups)
    except UserError:
        raise
    except Exception as error:
        got = f"model={getattr(model, '__name__', model)} raised {type(error).__name__}: {error}"
        raise UserError(got, "a module, on every rank") from error
    return module, bind_tables(module, source), groups


def _begin(start: Start, source: Source) -> None:
    torch.set_num_threads(start.ranks.threads)
    if not start.trains:
        source.open(start.pull_saved)


def _dtype(module: torch.nn.Module, groups: Sequence[Group]) -> str:
    """Return the dtype of a job that is given none: float32 where all parameters are of it."""
    dtypes = {DTYPES[p.dtype] for p in trained_parameters(module, groups).values()}
    return "float32" if dtypes <= {"float32"} else "float64"


def _mean_buffers(start: Start, module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the means of the workers' buffers, on every rank. Collective: yes."""
    ranks, found = start.ranks, None
    if start.trains:
        found = ranks.gather(_floating_buffers(module) if start.works else None)
    of_workers = [one for one in found or () if one is not None]
    means = {
        name: np.asarray(np.mean([one[name] for one in of_workers], axis=0))
        for name in (of_workers[0] if of_workers else ())
    }
    return start.share(ranks.share(means, ranks.roles.chief) if start.trains else means)


def _floating_buffers(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {
        name: for_numpy(buffer).numpy().copy()
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point()
    }


def _set_buffers(module: torch.nn.Module, means: Mapping[str, np.ndarray]) -> None:
    for name, buffer in module.named_buffers():
        if name in means:
            buffer.copy_(torch.from_numpy(means[name]))
