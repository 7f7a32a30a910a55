"""Learning-rate schedules, and clipping of gradients by the global norm."""

import math
from collections.abc import Callable

from mpips.errors import UserError, unknown


def schedule(
    name: str,
    lr: float,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    step_every: int = 0,
    step_factor: float = 0.1,
) -> Callable[[int], float]:
    """Return the learning rate as a function of the 1-based number of the update.

    Whatever the schedule, the rate rises linearly from ``lr / warmup_steps`` at step 1 to its full
    value at step `warmup_steps`.

    Args:
        name: ``constant``; ``warmup``, constant after a warm-up; ``cosine``, half a cosine from
            `lr` after the warm-up to 0 after `total_steps`; or ``step``, multiplied by
            `step_factor` after every `step_every` steps, those of the warm-up counted.
        lr: The full rate.
        total_steps: Length of the run; only ``cosine`` depends on it.
        warmup_steps: Length of the warm-up, 0 for none.
        step_every: Steps between two drops of ``step``.
        step_factor: Factor of each drop.

    Raises:
        UserError: If there is no such schedule, or a number that it needs is missing.

    References: Goyal et al., arXiv 1706.02677 (warm-up); Loshchilov and Hutter, ICLR 2017 (cosine).
    """
    shapes: dict[str, Callable[[int], float]] = {
        "constant": lambda step: 1.0,
        "warmup": lambda step: 1.0,
        "cosine": lambda step: _cosine(step, warmup_steps, total_steps),
        "step": lambda step: step_factor ** ((step - 1) // step_every),
    }
    if name not in shapes:
        raise unknown("schedule", name, shapes)
    _need(name, "warmup_steps", warmup_steps, name == "warmup")
    _need(name, "step_every", step_every, name == "step")
    shape = shapes[name]
    if not warmup_steps:
        return (lambda step: lr) if name == "constant" else lambda step: lr * shape(step)
    return lambda step: lr * min(1.0, step / warmup_steps) * shape(step)


def _cosine(step: int, begin: int, end: int) -> float:
    """Return the factor that falls from 1 at step begin + 1 to 0 after step `end`."""
    share = (step - 1 - begin) / max(1, end - begin)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, share))))


def _need(name: str, option: str, value: int, needed: bool) -> None:
    """Raise unless `value` is 1 or more, or 0 where the schedule does not need it."""
    if value < needed:
        flag = f"--{option.replace('_', '-')}"
        constraint = f"{option} >= {int(needed)} with schedule {name!r}"
        raise UserError(f"{option}={value}", constraint, f"give {flag} N")


def clip_factor(sum_of_squares: float, max_norm: float) -> float:
    """Return the factor that brings a gradient's norm down to `max_norm`, at most 1.

    Args:
        sum_of_squares: Of the whole gradient, over all shards.
        max_norm: Greatest norm allowed; 0 means that clipping is off.

    Returns:
        1 where the norm is within the bound; NaN for a NaN and 0 for an infinite sum of squares,
        with which an infinite gradient becomes NaN and is not hidden.
    """
    norm = math.sqrt(sum_of_squares)
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm
