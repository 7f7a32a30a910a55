"""What a run's update rule has kept, as the state of the optimizer of torch that does the same."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mpips.checkpoint import Checkpoint, newest_whole
from mpips.checkpoint.files import PathLike
from mpips.config import Config
from mpips.config.jobfile import from_toml
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.optim import RULES
from mpips.torch.optimizer import param_groups

# Of each rule: what makes torch's, and what its slots are called there.
Make = Callable[[list[dict[str, Any]], Config], torch.optim.Optimizer]
KINDS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "sgd": (lambda groups, c: torch.optim.SGD(groups), ()),
    "momentum": (
        lambda groups, c: torch.optim.SGD(groups, momentum=c.momentum),
        ("momentum_buffer",),
    ),
    "nesterov": (
        lambda groups, c: torch.optim.SGD(groups, momentum=c.momentum, nesterov=True),
        ("momentum_buffer",),
    ),
    "adagrad": (lambda groups, c: torch.optim.Adagrad(groups, eps=c.eps), ("sum",)),
    "rmsprop": (
        lambda groups, c: torch.optim.RMSprop(groups, alpha=c.decay, eps=c.eps),
        ("square_avg",),
    ),
    "adam": (
        lambda groups, c: torch.optim.Adam(groups, betas=(c.beta1, c.beta2), eps=c.eps),
        ("exp_avg", "exp_avg_sq"),
    ),
    "adamw": (
        lambda groups, c: torch.optim.AdamW(groups, betas=(c.beta1, c.beta2), eps=c.eps),
        ("exp_avg", "exp_avg_sq"),
    ),
}
COUNTING = ("adagrad", "rmsprop", "adam", "adamw")  # torch's keep the number of steps


def optimizer_state(run: PathLike) -> dict[str, Any]:
    """Return the state dict of torch's optimizer that is where a run's newest checkpoint is.

    It can be loaded by the optimizer of torch of the same rule, over the parameters that were
    trained, in the order of ``model.named_parameters()``; where the run has groups, over the same
    in torch: what is of no group first, then each. Rates are those before any schedule.

    Args:
        run: The run's folder, such as ``result.out``, or one checkpoint.

    Returns:
        ``{"state": ..., "param_groups": ...}``, with copies of all that is in it.

    Raises:
        UserError: If there is no whole checkpoint, or each worker has a state of its own (easgd).

    Collective: no; every rank that calls it reads the files.
    """
    found, complaints = newest_whole(run)
    if found is None:
        what = "; ".join(complaints) or "there is none"
        raise UserError(f"{run}: {what}", "a run with a whole checkpoint")
    config, steps = from_toml(found.config), found.step
    if config.mode == "easgd":
        got = f"{run} of mode easgd, whose workers each have an optimizer of their own"
        raise UserError(got, "a mode with one for all")
    if config.mode == "local_sgd":
        steps *= config.local_steps
    kept = found.state.get("statistics", ())  # which lie behind the parameters
    shapes = zip(found.layout.names, found.layout.shapes, strict=True)
    layout = Layout.of({name: shape for name, shape in shapes if name not in kept})
    vectors = [_slot(found, name)[: layout.size] for name in RULES[config.optimizer].slots]
    return torch_optimizer(config, layout, vectors, steps).state_dict()


def torch_optimizer(
    config: Config, layout: Layout, vectors: list[np.ndarray], steps: int
) -> torch.optim.Optimizer:
    """Return torch's optimizer of a job's rule, over parameters that nothing else uses.

    Args:
        config: Of the job.
        layout: Of the vectors.
        vectors: The rule's slots, each of shape (n_params,).
        steps: Updates that it has made.
    """
    make, names = KINDS[config.optimizer]
    views = [_tensors(layout, vector) for vector in vectors]
    shapes = zip(layout.names, layout.shapes, strict=True)
    parameters = {name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes}
    found = make(param_groups(parameters, config), config)
    for name, parameter in parameters.items() if steps and names else ():
        state = {key: of_slot[name] for key, of_slot in zip(names, views, strict=True)}
        if config.optimizer in COUNTING:
            state["step"] = torch.tensor(float(steps))
        found.state[parameter] = state
    return found


def _slot(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Return a slot; where each worker keeps its own, their mean."""
    if name in checkpoint.slot_names:
        return checkpoint.read_slot(name)
    vector = np.zeros(checkpoint.layout.size, checkpoint.dtype)
    if name in checkpoint.worker_names:
        checkpoint.read_workers_mean(name, 0, vector)
    return vector


def _tensors(layout: Layout, vector: np.ndarray) -> Mapping[str, torch.Tensor]:
    return {name: torch.tensor(view) for name, view in layout.views(vector).items()}
