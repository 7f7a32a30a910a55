"""Optimizer state, converted to and from the state dict of torch."""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from mpips.checkpoint import Checkpoint, need_whole
from mpips.checkpoint.files import PathLike
from mpips.config import Config
from mpips.config.jobfile import from_toml
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.optim import RULES
from mpips.optim.rules import share_product
from mpips.planning.outcome import updates_made
from mpips.torch.optimizer import param_groups

# For each rule: torch's class, its arguments with their options, and the keys of its state.
ADAM = {"betas": ("beta1", "beta2"), "eps": ("eps",)}
MOMENTUM, MOMENTS = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")
KINDS: dict[str, tuple[Any, dict[str, tuple[str, ...]], tuple[str, ...]]] = {
    "sgd": (torch.optim.SGD, {}, ()),
    "momentum": (torch.optim.SGD, {"momentum": ("momentum",)}, MOMENTUM),
    "nesterov": (partial(torch.optim.SGD, nesterov=True), {"momentum": ("momentum",)}, MOMENTUM),
    "adagrad": (torch.optim.Adagrad, {"eps": ("eps",)}, ("sum",)),
    "rmsprop": (torch.optim.RMSprop, {"alpha": ("decay",), "eps": ("eps",)}, ("square_avg",)),
    "adadelta": (
        torch.optim.Adadelta,
        {"rho": ("decay",), "eps": ("eps",)},
        ("square_avg", "acc_delta"),
    ),
    "adam": (torch.optim.Adam, ADAM, MOMENTS),
    "adamw": (torch.optim.AdamW, ADAM, MOMENTS),
    "amsgrad": (partial(torch.optim.Adam, amsgrad=True), ADAM, (*MOMENTS, "max_exp_avg_sq")),
    "nadam": (torch.optim.NAdam, ADAM, MOMENTS),
    "radam": (torch.optim.RAdam, ADAM, MOMENTS),
}
UNCOUNTED = ("sgd", "momentum", "nesterov")  # torch's classes do not count their steps
# Keys of a group that may differ from the run's, and keys that older versions of torch lack.
SPEED = ("foreach", "fused", "capturable", "differentiable")
FREE = ("params", "lr", "initial_accumulator_value", *SPEED)
NEWER = ("decoupled_weight_decay", "maximize")


def optimizer_state(run: PathLike) -> dict[str, Any]:
    """Return the state dict of torch's optimizer at a run's newest checkpoint.

    Load it into torch's optimizer of the same rule, over the trained parameters, in the order of
    ``model.named_parameters()``. If the run has groups, make the same groups in torch: first the
    parameters of no group, then each group. Rates are those before any schedule.

    Args:
        run: The run's folder, such as ``result.out``, or one checkpoint.

    Returns:
        ``{"state": ..., "param_groups": ...}``, with copies of all tensors.

    Raises:
        UserError: If there is no complete checkpoint, or each worker has its own state (easgd).

    Collective: no; every rank that calls it reads the files. Blocks: until they are read.
    """
    saved, _ = need_whole(run)
    config, steps = from_toml(saved.config), updates_made(saved)
    _check(config, f"{run} of")
    statistics = saved.state.get("statistics", ())  # arrays after the parameters
    shapes = zip(saved.layout.names, saved.layout.shapes, strict=True)
    layout = Layout.of({name: shape for name, shape in shapes if name not in statistics})
    vectors = [_slot(saved, name)[: layout.size] for name in RULES[config.optimizer].slots]
    skipped = saved.state.get("skipped", {})
    return torch_optimizer(config, layout, vectors, steps, skipped).state_dict()


def torch_optimizer(
    config: Config,
    layout: Layout,
    vectors: list[np.ndarray],
    steps: int,
    skipped: Mapping[str, int] | None = None,
) -> torch.optim.Optimizer:
    """Return torch's optimizer of a job's rule, over new parameters.

    Args:
        config: Configuration of the job.
        layout: Layout of the vectors.
        vectors: State vectors of the rule, each of shape (n_params,).
        steps: Number of updates so far.
        skipped: Number of updates that left out a parameter, by its name.
    """
    make, numbers, names = KINDS[config.optimizer]
    views = [layout.views(vector) for vector in vectors]
    shapes = zip(layout.names, layout.shapes, strict=True)
    parameters = {name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes}
    given = {key: attrgetter(*name)(config) for key, name in numbers.items()}
    optimizer: torch.optim.Optimizer = make(param_groups(parameters, config), **given)
    for name, parameter in parameters.items() if names else ():
        made = steps - (skipped or {}).get(name, 0)
        if made <= 0:
            continue
        state = {key: torch.tensor(of[name]) for key, of in zip(names, views, strict=True)}
        if config.optimizer not in UNCOUNTED:
            state["step"] = torch.tensor(float(made))
        if config.optimizer == "nadam":
            state["mu_product"] = torch.tensor(share_product(config.beta1, made))
        optimizer.state[parameter] = state
    return optimizer


def _check(config: Config, where: str) -> None:
    """Check that a run has one optimizer, of a rule that torch has.

    Raises:
        UserError: If it does not.
    """
    if config.mode == "easgd":
        got = f"{where} mode easgd, whose workers each have an optimizer of their own"
        raise UserError(got, "a mode with one for all")
    if config.optimizer not in KINDS:
        got = f"the state of optimizer {config.optimizer!r} for torch"
        raise UserError(got, f"one of {', '.join(KINDS)}", "mpips checkpoint exports it as arrays")


def _slot(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Return a state vector; the mean over the workers if each of them has its own."""
    if name in checkpoint.slot_names:
        return checkpoint.read_slot(name)
    vector = np.zeros(checkpoint.layout.size, checkpoint.dtype)
    if name in checkpoint.worker_names:
        checkpoint.read_workers_share(name, 0, vector)
    return vector


class TorchState:
    """State of an optimizer of torch, as initial state of the same update rule.

    Args:
        state: State dict of the optimizer.
        config: Configuration of the run.
        layout: Layout of the run's vector.
        statistics: Names of arrays in the vector that are not parameters.
        order: Names of the parameters of each group of the state, frozen ones too; None for the
            groups of the run.

    Attributes:
        steps: Number of updates so far; 0 if the rule does not count them.
        slot_names: Names of the rule's state vectors.
        skipped: Number of updates that left out a parameter, by its name.

    Raises:
        UserError: If the state is of another rule, of other numbers, or of other parameters.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        config: Config,
        layout: Layout,
        statistics: Sequence[str],
        order: Sequence[Sequence[str]] | None = None,
    ) -> None:
        _check(config, "optimizer_state in")
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
            got = f"optimizer_state of type {type(state).__name__}"
            raise UserError(got, "what the state_dict() of an optimizer of torch returns")
        self._layout, self.slot_names = layout, RULES[config.optimizer].slots
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        trained = Layout.of({n: shape for n, shape in shapes.items() if n not in statistics})
        expected = torch_optimizer(config, trained, [], 0)
        in_run = [g["params"] for g in param_groups({name: name for name in trained.names}, config)]
        groups = zip(in_run, expected.param_groups, strict=True)
        ours = {name: group for names, group in groups for name in names}
        kind = type(expected).__name__
        _check_groups(state["param_groups"], order or in_run, ours, kind, config.optimizer)
        names = [name for names in order or in_run for name in names]
        numbers = [k for group in state["param_groups"] for k in group["params"]]
        found = {n: state["state"].get(k, {}) for n, k in zip(names, numbers, strict=True)}
        self._state = {name: found.get(name, {}) for name in trained.names}
        self._keys = dict(zip(self.slot_names, KINDS[config.optimizer][2], strict=True))
        for name, tensors in self._state.items():
            for key in self._keys.values():
                shape = shapes[name] if tensors.get(key) is None else tuple(tensors[key].shape)
                if shape != shapes[name]:
                    got = f"optimizer_state with {key} of shape {shape} for {name!r}"
                    raise UserError(got, f"{shapes[name]}, as in the model")
        counts = {name: int(entry.get("step", 0)) for name, entry in self._state.items()}
        self.steps = max(counts.values()) if config.optimizer not in UNCOUNTED else 0
        skipped = {name: self.steps - count for name, count in counts.items()}
        self.skipped: Mapping[str, int] = {n: count for n, count in skipped.items() if count > 0}

    def read_slot(
        self, name: str, begin: int = 0, end: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read ``[begin, end)`` of a state vector; see `mpips.optim.RuleState`.

        Parameters without state, which never had a gradient, read as zeros.
        """
        end = self._layout.size if end is None else end
        out = np.empty(end - begin) if out is None else out
        out.fill(0)
        for parameter, (first, last) in self._layout.slices().items():
            low, high = max(begin, first), min(end, last)
            tensor = self._state.get(parameter, {}).get(self._keys[name])
            if low < high and tensor is not None:
                flat = tensor.detach().cpu().reshape(-1)[low - first : high - first]
                out[low - begin : high - begin] = flat.double().numpy()
        return out


def _check_groups(
    given: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    expected: Mapping[str, Mapping[str, Any]],
    kind: str,
    rule: str,
) -> None:
    """Check that the groups of a state dict are those of the run, except for their rates.

    Args:
        given: The groups of the state dict.
        names: Names of the parameters of each group.
        expected: The run's group of each trained parameter, by its name.
        kind: Name of torch's class, for messages.
        rule: Name of the rule, for messages.

    Raises:
        UserError: If they differ.
    """
    sizes = [len(group["params"]) for group in given], [len(members) for members in names]
    if sizes[0] != sizes[1]:
        got = f"an optimizer_state with groups of {sizes[0]} parameters"
        remedy = "the first group is what is of no group of the run, then each of groups="
        raise UserError(got, f"{sizes[1]}, as in the run", remedy)
    for theirs, members in zip(given, names, strict=True):
        ours = next((expected[name] for name in members if name in expected), {})
        for key in [key for key in ours if key not in FREE]:
            if key not in theirs and key in NEWER:
                continue
            if key not in theirs:
                got = f"an optimizer_state without {key}"
                raise UserError(got, f"one of torch.optim.{kind}, for optimizer {rule}")
            if not _alike(theirs[key], ours[key]):
                got = f"an optimizer_state with {key} {theirs[key]}"
                remedy = f"the run is one of torch.optim.{kind}, with the numbers that it is given"
                raise UserError(got, f"{ours[key]}, as in the run", remedy)


def _alike(one: Any, other: Any) -> bool:
    numbers = isinstance(one, (int, float)), isinstance(other, (int, float))
    return bool(np.isclose(one, other, 1e-12, 0)) if all(numbers) else one == other
