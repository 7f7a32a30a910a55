"""Duration of a job whose nodes fail.

Nodes fail at random, each once in so long on average. What was done since the newest checkpoint is
lost, and the start takes its time. Mean and spread are those of `LIVES` simulated jobs. The mean is
that of J. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 2006.
"""

import math
from dataclasses import dataclass

import numpy as np

from mpips.errors import UserError

LIVES = 500
HOPELESS = 1000  # failures for each life of a job, after which it is given up


@dataclass(frozen=True)
class Hazards:
    """What may stop a job, and what it does about it.

    Attributes:
        mtbf_s: Mean time between two failures of any of its nodes; infinite: none fails.
        restart_s: From a failure to the next step.
        period_s: Of training between two checkpoints; infinite: at the end alone.
        save_s: For which training stands still in each.
        start_s: Before the first step.
    """

    mtbf_s: float = math.inf
    restart_s: float = 120.0
    period_s: float = 60.0
    save_s: float = 0.0
    start_s: float = 0.0


@dataclass(frozen=True)
class Lifetime:
    """How long a job takes, its start-up and all that is lost included.

    Attributes:
        mean_s: On average.
        p90_s: At most, in nine cases of ten.
        failures: On average.
        lost_s: Of training that is done again, on average.
        saving_s: In which training stands still for checkpoints.
        start_s: Before the first step.
    """

    mean_s: float
    p90_s: float
    failures: float
    lost_s: float
    saving_s: float
    start_s: float


def live(work_s: float, hazards: Hazards, seed: int, lives: int = LIVES) -> Lifetime:
    """Simulate a job with so many seconds of training.

    Raises:
        UserError: If it would hardly ever get from one checkpoint to the next.
    """
    h = hazards
    saving = work_s // h.period_s * h.save_s if math.isfinite(h.period_s) else 0.0
    if math.isinf(h.mtbf_s):
        whole = h.start_s + work_s + saving
        return Lifetime(whole, whole, 0.0, 0.0, saving, h.start_s)
    piece = min(work_s, h.period_s) + h.save_s
    if (piece + h.restart_s) / h.mtbf_s > math.log(HOPELESS):
        got = f"a failure every {h.mtbf_s:.3g} s with {piece + h.restart_s:.3g} s to a checkpoint"
        raise UserError(got, "checkpoints that are reached", "set a shorter --checkpoint-every")
    rng = np.random.default_rng(seed)
    found = np.array([_life(work_s, h, rng) for _ in range(lives)])
    mean, failures, lost = found.mean(axis=0)
    return Lifetime(float(mean), float(np.percentile(found[:, 0], 90)), float(failures),
                    float(lost), saving, h.start_s)  # fmt: skip


def _life(work_s: float, h: Hazards, rng: np.random.Generator) -> tuple[float, float, float]:
    """Return the seconds of a life, its failures, and the seconds of training that were lost."""
    at, done, failures, lost = 0.0, 0.0, 0, 0.0
    while True:
        start_s = h.restart_s if failures else h.start_s
        left = rng.exponential(h.mtbf_s) - start_s
        at += min(0.0, left) + start_s
        if left > 0:
            ahead = work_s - done
            pieces = ahead // h.period_s if math.isfinite(h.period_s) else 0.0
            if left >= ahead + pieces * h.save_s:
                return at + ahead + pieces * h.save_s, failures, lost
            whole = left // (h.period_s + h.save_s) if math.isfinite(h.period_s) else 0.0
            kept = whole * h.period_s
            lost += left - whole * (h.period_s + h.save_s)
            at, done = at + left, done + kept
        failures += 1
