"""Model of one vector, whose gradient is one pass over memory."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpips import codecs
from mpips.config import Config
from mpips.config.jobfile import resolve
from mpips.datasets import Batch, DataInfo
from mpips.kernels.compiled import kernel
from mpips.layout import Layout
from mpips.layout.roles import assign
from mpips.layout.tables import Table
from mpips.mpi.world import Cluster
from mpips.optim import warm
from mpips.planning.job import Job
from mpips.problems.base import Arrays, Problem
from mpips.session.probe import possible

ONE = Batch(np.zeros((1, 1), "f4"), np.zeros((1, 1), "f4"), np.zeros(1, "i8"))


@kernel()
def gradient_of(replica: np.ndarray, grad: np.ndarray) -> None:
    """Set ``grad = 1e-3 replica + 1e-3``, in one pass."""
    factor = replica.dtype.type(1e-3)
    for i in range(replica.size):
        grad[i] = replica[i] * factor + factor


class Vector(Problem):
    """A vector of `size` parameters, whose gradient takes `passes` passes over it."""

    def __init__(
        self, data: DataInfo, config: Config, size: int, tables: Mapping[str, Table]
    ) -> None:
        super().__init__(data, config)
        self.layout = Layout.of({"w": (size,)}, tables)
        self.passes = 1

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return ones."""
        return {"w": np.ones(self.layout.size, self.config.dtype)}

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        """Return 0, and write the gradient."""
        for _ in range(self.passes):
            gradient_of(params["w"], out["w"])
        return 0.0

    def evaluate(self, params: Arrays, batch: Batch) -> dict[str, float]:
        """Return a loss of 0."""
        return {"loss": 0.0}


def make_job(
    cluster: Cluster, size: int, mode: str, tables: Mapping[str, Table] | None = None,
    **options: Any,
) -> Job:  # fmt: skip
    """Return a job of `size` parameters on all ranks of `cluster`, and set the cluster's roles.

    Collective: yes.
    """
    config = resolve(
        {"optimizer": "sgd", "lr": 1e-3, "schedule": "constant", **options, "mode": mode}
    )
    servers = config.servers, config.server_ranks
    cluster.roles = assign(mode, cluster.hosts, cluster.node_of, *servers)
    info = DataInfo("none", 1, 0, (1,), (1,), None, "none")
    job = Job(config, cluster, info, None, Vector(info, config, size, tables or {}), Path(), 0)
    warm(job.rule, config.dtype, config.in_rounds)
    for codec in itertools.chain(*possible(config)):
        codecs.warm(codec, config.dtype)
    few = np.zeros(1, config.dtype)
    gradient = few.copy()
    few.flags.writeable = False  # as a worker's parameters
    gradient_of(few, gradient)
    return job
