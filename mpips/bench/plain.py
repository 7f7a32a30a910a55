"""What plain MPI does, as a script of one's own would: the other side of a comparison."""

import numpy as np

from mpips.cluster.collectives import sum_in_place
from mpips.cluster.start import Comm
from mpips.optim import Rule


def allreduce_step(comm: Comm, params: np.ndarray, grad: np.ndarray, rule: Rule, lr: float) -> None:
    """Make one synchronous step: blocking Allreduce in place, then the update on every rank."""
    sum_in_place(comm, grad)
    rule.apply(params, grad, (), 1, lr / comm.size)
