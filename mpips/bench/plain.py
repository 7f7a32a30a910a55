"""What plain MPI does, as a script of one's own would: the other side of a comparison."""

import numpy as np
from mpi4py import MPI

from mpips.optim import Rule


def allreduce_step(
    comm: MPI.Intracomm, params: np.ndarray, grad: np.ndarray, rule: Rule, lr: float
) -> None:
    """Make one synchronous step: blocking Allreduce in place, then the update on every rank."""
    comm.Allreduce(MPI.IN_PLACE, grad)
    rule.apply(params, grad, (), 1, lr / comm.size)
