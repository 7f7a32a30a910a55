"""`mpips.torch.run`: one run of a training loop of a PyTorch model."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from mpips.checkpoint.exchange import left_out
from mpips.config import OPTIONS, Config
from mpips.config.groups import GROUPS, Group, parse_groups, text_of
from mpips.datasets import Batch, DataInfo
from mpips.errors import UserError
from mpips.library import run as library
from mpips.library.callbacks import Callback
from mpips.library.initial import Change, check_sum, taken
from mpips.library.optimizers import Optimizer
from mpips.library.program import Evaluate, Program
from mpips.library.start import Start, limit_of
from mpips.mpi.start import Comm
from mpips.problems.base import Arrays
from mpips.torch.embedding import Source, bind_tables
from mpips.torch.model import (
    Initial,
    evaluating,
    for_numpy,
    is_plain,
    make_model,
    place_of,
    state_of,
    tensors_by_name,
    trained_parameters,
)
from mpips.torch.rule_of import MakeOptimizer, read_optimizer
from mpips.torch.state import TorchState
from mpips.torch.worker import TorchSamples, Worker


@dataclass(frozen=True)
class Result(library.Result):
    """Result of a run, on every rank; see `mpips.Result`.

    Attributes:
        state_dict: The model's state dict, with the final parameters and BatchNorm's running means;
            `params` has both. Other buffers are means over the workers, or those of worker 0 if
            they have integers or differ in shape. It has no rows of `Embedding` and `EmbeddingBag`:
            `rows` reads them.
    """

    state_dict: Mapping[str, torch.Tensor]


def run(
    train: Callable[[Worker], object],
    model: Callable[[], torch.nn.Module],
    optimizer: Optimizer | MakeOptimizer | None = None,
    *,
    comm: Comm | None = None,
    evaluate: Callable[[torch.nn.Module, Any], dict[str, float]] | None = None,
    held_out: Any = None,
    callbacks: Sequence[Callback] = (),
    optimizer_state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Train a PyTorch model: each worker calls `train`, and servers serve until all are done.

    Args:
        train: Function that each worker calls with its `Worker`; see `mpips.run`.
        model: Makes the module, such as its class; called on every rank with the same seed.
            Parameters that then require a gradient are trained. `train` may freeze them and train
            them again, by ``requires_grad_``; and also parameters that are frozen at first, if one
            of `groups` gives them a rate. `Embedding` and `EmbeddingBag` of mpips.torch are
            tables, with the names that they have in the module.
        optimizer: The update rule: a function of the parameters that returns an optimizer of
            PyTorch, such as ``lambda params: torch.optim.AdamW(params, 1e-3)``, or the class of
            one; or ``mpips.AdamW(1e-3, weight_decay=0.01)``. Its numbers and parameter groups
            become those of the run; the optimizer itself is not used.
        comm: See `mpips.run`.
        evaluate: ``evaluate(model, batch)`` returns means over a batch of held-out samples:
            ``loss``, and ``accuracy`` for the option `target_accuracy`.
        held_out: A map-style dataset that is evaluated at intervals of the option `eval_every`, and
            at the end; or a function that returns one. Only workers and evaluators call it.
        callbacks: See `mpips.run`.
        optimizer_state: Initial state of the update rule in a new run, the same on every rank: the
            state dict of torch's optimizer of the same rule and numbers, over the trained
            parameters in the order of `mpips.torch.optimizer_state`. Rates are the run's. A resumed
            run continues with its own state.
        **options: See `mpips.run`. `init_from` may be a state dict.

    Returns:
        The result, on every rank.

    Raises:
        UserError: As `mpips.run`; if the model has parameters that cannot be trained here, such as
            sparse embeddings of torch; if the optimizer's state is of another rule or of other
            parameters.

    Collective: yes. Blocks: until the run has ended.
    """
    given = train, model, optimizer, options, optimizer_state, evaluate, held_out, callbacks
    result, program = library.run_program(partial(TorchProgram, *given), comm, limit_of(options))
    return Result(**vars(result), state_dict=program.state_dict(result.params))


class TorchProgram(Program):
    """Program of a run of a PyTorch model; see `run`."""

    sets_rate = True
    state_order: Sequence[Sequence[str]] | None = None  # see `TorchState`

    def __init__(
        self,
        train: Callable[[Worker], object],
        model: Callable[[], torch.nn.Module],
        optimizer: Optimizer | MakeOptimizer | None,
        options: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
        evaluate: Evaluate | None = None,
        held_out: Any = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        groups = _groups(options.get("groups", ()))
        self.model = _make(model, OPTIONS["seed"].check(options.get("seed", 0)), groups)
        self._source = Source()
        self._worker: Worker | None = None
        rule: Any = optimizer
        ours = isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
        if callable(optimizer) and not ours:
            if options.get("groups"):
                got, remedy = "groups= beside a PyTorch optimizer", "give the groups to that"
                remedy += "; to train later what is frozen now, give a rule of mpips"
                raise UserError(got, "one of them", remedy)
            rule, groups = read_optimizer(optimizer, self.model)
            options = {**options, "groups": groups}
        tables = bind_tables(self.model, self._source)
        initial = Initial(self.model, groups)
        self._initial, self._parameters = initial, dict(self.model.named_parameters())
        super().__init__(train, initial, rule, options, evaluate, held_out, callbacks, tables)
        trained = trained_parameters(self.model, groups)
        dtypes = {p.dtype for p in trained.values()}
        self.dtype = "float64" if torch.float64 in dtypes else "float32"
        self.statistics = tuple(initial.running)
        self.optimizer_state = optimizer_state
        frozen = [n for n, p in self._parameters.items() if n not in trained and is_plain(p)]
        marks = tuple(check_sum(self.array(name)) for name in frozen)
        self.same["checksum of frozen parameters"] = hash(marks)
        if optimizer_state is not None:
            self.same["optimizer_state"] = "given"
        self._buffers: dict[str, np.ndarray] = {}  # their means over the workers at the end

    def of_job(self, data: DataInfo, config: Config) -> Self:
        """Return the problem of a job, with the initial state of its update rule.

        Raises:
            UserError: If the optimizer's state does not fit the job.
        """
        problem = super().of_job(data, config)
        if (state := self.optimizer_state) is not None:
            problem.rule_state = TorchState(
                state, config, self.layout, self.statistics, self.state_order
            )
        return problem

    def take(self, name: str, array: np.ndarray | torch.Tensor) -> None:
        """See `Model.take`; it may also be an array that is not trained."""
        owner, last = place_of(self.model, name)
        tensor = getattr(owner, last)
        if not is_plain(tensor):
            new = pickle.loads(array.tobytes()) if isinstance(array, np.ndarray) else array.clone()
            setattr(owner, last, new)
            return
        if np.shape(array) != tuple(tensor.shape):  # a forward pass has changed a buffer
            tensor.data = tensor.new_empty(np.shape(array))
        with torch.no_grad():
            tensor.copy_(torch.tensor(array) if isinstance(array, np.ndarray) else array)
        if name in self._initial.running:
            self._initial.running[name] = for_numpy(tensor).numpy().copy()

    def begin_with(self, start: Mapping[str, Any]) -> None:
        """See `Program.begin_with`; arrays that are not trained are optional.

        Raises:
            UserError: See `Program.begin_with`.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors_by_name(self.model).items()}
        keys = taken(start, shapes, self.layout.names)
        for name, key in keys.items():
            given = start[key]
            try:
                self.take(name, torch.tensor(given) if isinstance(given, np.ndarray) else given)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UserError(f"init_from with {key!r} ({error})", "a tensor or array") from None
        used = {*keys.values(), *self.model.state_dict()}  # which lists tied parameters twice
        self.notes = left_out([key for key in start if key not in used], "init_from")

    def mark(self) -> None:
        """See `Program.mark`."""
        self._marks = self._marks_now()

    def changes(self) -> dict[str, Change]:
        """See `Program.changes`; workers may differ in buffers other than running means.

        Raises:
            UserError: If the training function has added, removed or replaced a parameter.
        """
        now = dict(self.model.named_parameters())
        for name in {**self._parameters, **now}:
            if now.get(name) is not self._parameters.get(name):
                got = f"parameter {name!r} that train has replaced, added or removed"
                remedy = "make it in model=; load_state_dict without assign=True keeps them"
                raise UserError(got, "those of the model as it was made", remedy)
        marks, made = self._marks_now(), self._marks
        changed = {n: self.array(n) for n in marks if n in made and marks[n] != made[n]}
        alike = {*now, *self.statistics}
        return {
            name: Change(array.shape, array.dtype.str, check_sum(array) if name in alike else None)
            for name, array in changed.items()
        }

    def array(self, name: str) -> np.ndarray:
        """See `Program.array`; a tensor that is not plain has the bytes of its pickle."""
        tensor = getattr(*place_of(self.model, name))
        if not is_plain(tensor):
            return np.frombuffer(pickle.dumps(tensor.detach().cpu()), "u1")
        return for_numpy(tensor).numpy()

    def _marks_now(self) -> dict[str, int]:
        return {name: check_sum(self.array(name)) for name in tensors_by_name(self.model)}

    def make_worker(self, start: Start) -> Worker:
        """See `Program.make_worker`."""
        self._worker = Worker(start, self.model, self._source)
        return self._worker

    def begin(self, start: Start) -> None:
        """See `Program.begin`."""
        torch.set_num_threads(start.ranks.threads)
        if not start.trains:
            self._source.open(start.pull_saved)

    def finish(self, start: Start) -> None:
        """Compute the means of the workers' buffers. Collective: yes.

        Buffers that are the same on all ranks, such as masks, are not sent.
        """
        names = [n for n, _ in self.model.named_buffers() if n not in self.statistics]
        mine, root = {name: self.array(name) for name in names}, start.ranks.roles.coordinator
        if start.trains:
            marks = {n: (a.shape, a.dtype.str, check_sum(a)) for n, a in mine.items()}
            every = start.ranks.gather(marks) or ()
            differ = {n for theirs in every if theirs for n, _ in theirs.items() ^ marks.items()}
            for name in start.ranks.share(sorted(differ), root):
                found = start.ranks.gather(mine.get(name) if start.works else None) or ()
                values = [value for value in found if value is not None]
                mine[name] = start.ranks.share(_mean(values) if values else None, root)
        self._buffers = start.share(mine)

    def samples(self, data: Any) -> TorchSamples:
        """See `Program.samples`."""
        return TorchSamples(data)

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """See `Program.evaluate`."""
        assert self.metrics is not None, "there are no held-out samples"
        with evaluating(self.model, params):
            return self.metrics(self.model, batch.x)

    def state_dict(self, params: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Return the model's state dict at the end of the run."""
        for name, _ in self.model.named_buffers():
            mean = self._buffers.get(name)
            if mean is not None and not np.array_equal(mean, self.array(name)):
                self.take(name, mean)
        return state_of(self.model, params)

    def close(self) -> None:
        """See `Program.close`; also closes the source of rows."""
        try:
            if self._worker is not None:
                self._worker.close()
        finally:
            self._source.close()


def _mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of the workers' buffers; the first one if there is none."""
    first = arrays[0]
    if first.dtype.kind != "f" or any(array.shape != first.shape for array in arrays):
        return first
    return np.asarray(np.mean(arrays, axis=0, dtype="f8"), first.dtype)  # float32 may overflow


def _groups(given: Any) -> Sequence[Group]:
    """Return the groups of a run; none if the value is invalid, which is reported later.

    Raises:
        UserError: If an element of a list is not a group.
    """
    text = text_of(given) if isinstance(given, (list, tuple)) else str(given)
    return parse_groups(text) if GROUPS.fullmatch(text) else ()


def _make(
    model: Callable[[], torch.nn.Module], seed: int, groups: Sequence[Group]
) -> torch.nn.Module:
    try:
        return make_model(model, seed, groups)
    except UserError:
        raise
    except Exception as error:
        got = f"model={getattr(model, '__name__', model)} raised {type(error).__name__}: {error}"
        raise UserError(got, "a module, on every rank") from error
