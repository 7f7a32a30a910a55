"""What one rank raises before a run ends the job: ``early.py HOW OUT``; HOW says what it is."""

from __future__ import annotations  # `mpips.Worker` would start MPI

import os
import sys

import numpy as np

import mpips

HOW, OUT = sys.argv[1:]
if HOW == "started":
    from mpi4py import MPI  # noqa: F401  (which starts it)
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def train(worker: mpips.Worker) -> None:
    for _ in worker.batches(8, batch_size=1, epochs=1):
        worker.grads["w"][:] = 0
        worker.push(0.0)


def of_a_model() -> None:
    """Have the model raise on one rank."""
    import torch

    import mpips.torch

    def net() -> torch.nn.Module:
        if RANK == 1:
            raise FileNotFoundError("weights.pt")
        return torch.nn.Linear(2, 1)

    mpips.torch.run(lambda worker: None, model=net, optimizer=mpips.SGD(0.1), out=OUT)


def in_a_part() -> None:
    """Have ranks 0 and 1 begin a run that is refused, while rank 2 waits for them."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(RANK // 2)
    if RANK < 2:
        mpips.run(train, {"w": np.zeros(2)}, comm=comm, mode="asink")
    MPI.COMM_WORLD.Barrier()


if HOW == "model":
    of_a_model()
elif HOW == "part":
    in_a_part()
elif HOW == "alike":
    raise mpips.UserError("a file that is on no rank", "one on each")
elif RANK == 1:
    raise FileNotFoundError("data.npy")
mpips.run(train, {"w": np.zeros(2)}, mpips.SGD(0.1), out=OUT)
