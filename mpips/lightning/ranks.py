"""Ranks of a job in Lightning's order: workers first, then servers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torchmetrics import Metric

from mpips.config import Config
from mpips.errors import UserError
from mpips.library.start import checked, of_program
from mpips.mpi.collective_errors import raise_on_all
from mpips.mpi.collectives import broadcast_polled, cluster_subset, gather_polled
from mpips.mpi.start import whole_world
from mpips.session.setup import assign_roles
from mpips.torch.model import is_plain, place_of

if TYPE_CHECKING:
    from mpips.lightning.run import Fit


class Ranks(ClusterEnvironment):
    """The ranks of a job, before, in and after its runs. Collective: construction.

    Args:
        options: Options of the job.

    Attributes:
        cluster: All ranks, with their roles.
        order: Ranks of the workers, then of the servers; an index is a global rank of Lightning.
        config: The configuration, without the options that a run adds.

    Raises:
        UserError: On every rank, if an option or the number of servers is invalid.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        comm = whole_world()
        with of_program(comm):
            self.config = raise_on_all(comm, lambda: Config(**checked(options, None)))
            if self.config.evaluators:
                got = f"evaluators={self.config.evaluators}"
                raise UserError(got, "none", "Lightning evaluates by Trainer(check_val_...)")
            self.cluster = assign_roles(comm, self.config)
        roles = self.cluster.roles
        self.order = (*roles.workers, *roles.servers)
        self._workers = cluster_subset(self.cluster, roles.workers)
        rank_zero_only.rank = self.global_rank()

    @property
    def works(self) -> bool:
        """Whether this rank is a worker."""
        return self.global_rank() < self.world_size()

    def gather(self, value: object, everywhere: bool = False) -> list[Any]:
        """Return the values of all workers, or of all ranks, by global rank.

        Collective: over the workers, or all ranks. Blocks: until all have come, but never in MPI.
        """
        comm = self.cluster.comm if everywhere else self._workers
        values = gather_polled(comm, value, self.cluster.wait_request)
        by_rank = dict(zip(sorted(self.order[: comm.size]), values, strict=True))
        return [by_rank[rank] for rank in self.order[: comm.size]]

    def share(self, value: Any) -> Any:
        """Return the value of worker 0 on every rank. Collective: yes."""
        return self.cluster.share(value, self.order[0])

    def share_state(self, module: torch.nn.Module) -> None:
        """Copy worker 0's parameters and buffers to the module of every rank.

        Raises:
            UserError: If the module of a rank has other names, shapes or dtypes.

        Collective: yes.
        """
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        mine = {name: (tuple(t.shape), str(t.dtype)) for name, t in named.items()}
        every = self.gather(mine, everywhere=True)
        for rank, theirs in enumerate(every):
            for name, _ in every[0].items() ^ theirs.items():
                got = f"{name!r} of shape {theirs.get(name)} in the model on rank {rank}"
                raise UserError(got, f"{every[0].get(name)}, as on rank 0")
        for name, tensor in named.items():
            if not is_plain(tensor):
                setattr(*place_of(module, name), self.share(tensor))
                continue
            flat = tensor.detach().contiguous().reshape(-1).clone()
            array = flat.view(torch.uint8).numpy()
            broadcast_polled(self.cluster.comm, array, self.order[0], self.cluster.wait_request)
            tensor.data.copy_(flat.view(tensor.shape))

    # Interface of Lightning's environments.

    creates_processes_externally = True
    main_port = 0

    @property
    def main_address(self) -> str:
        """Host of worker 0. Not used, as there is no process group."""
        return self.cluster.hosts[self.order[0]]

    @staticmethod
    def detect() -> bool:
        """Return False: only a strategy makes this environment."""
        return False

    def world_size(self) -> int:
        """Return the number of workers."""
        return len(self.cluster.roles.workers)

    def global_rank(self) -> int:
        """Return this rank's index in `order`."""
        return self.order.index(self.cluster.rank)

    def local_rank(self) -> int:
        """Return this rank's index among the ranks of its node, workers first."""
        here = [rank for rank in self.order if self.cluster.is_local(rank)]
        return here.index(self.cluster.rank)

    def node_rank(self) -> int:
        """Return the number of this rank's node."""
        return self.cluster.node_of[self.cluster.rank]

    def set_world_size(self, size: int) -> None:
        """Do nothing: MPI has started the ranks, so Lightning's number does not count."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing; see `set_world_size`."""


class Collectives:
    """Collective operations of Lightning's strategies, over the workers.

    In modes without rounds workers do not wait for each other in the training loop: a call returns
    the worker's own value there. So does a call in a round that has more batches for some workers
    than for others. On servers every call returns the server's own value.

    Attributes:
        ranks: The ranks.
        begins: Whether all ranks, including servers, are about to begin a run.
        trains: Whether this worker is in the training loop.
    """

    ranks: Ranks
    begins = trains = False
    _fit: "Fit"

    @property
    def root_device(self) -> torch.device:
        """Device of this rank's module."""
        return torch.device("cpu")

    @property
    def apart(self) -> bool:
        """Whether some workers are not at this point, for want of a batch in a round."""
        return self._fit.in_uneven_round

    @property
    def shares(self) -> bool:
        """Whether workers wait for each other at this point."""
        together = not self.trains or (self.ranks.config.in_rounds and not self.apart)
        return self.ranks.works and together

    def gather(self, value: Any) -> list[Any]:
        """Return the values of the workers that wait for each other, by global rank.

        Collective: over the workers that wait for each other. Blocks: until they have come.
        """
        if self.begins:
            return self.ranks.gather(value, everywhere=True)
        return self.ranks.gather(value) if self.shares else [value]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, maximum or minimum over the workers, the same on each.

        Collective: over the workers that wait for each other. Blocks: until they have come.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        values = torch.stack(self.gather(tensor.detach().cpu()))
        op = str(reduce_op).rpartition(".")[2].lower()
        if op in ("mean", "avg"):
            value = values.double().mean(0)
        else:
            value = getattr(torch, {"max": "amax", "min": "amin"}.get(op, op))(values, 0)
        return value.to(tensor.device, tensor.dtype)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all, or any, workers decide so; if none waits, whether worker 0 does.

        Collective: over the workers that wait for each other. Blocks: until they have come.
        """
        if self.trains and not self.shares:
            return decision and self.ranks.global_rank() == 0
        decisions = self.gather(bool(decision))
        return not decisions.count(False) if all else bool(decisions.count(True))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the workers.

        Collective: over the workers that wait for each other. Blocks: until they have come.
        """
        self.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of worker `src`.

        Collective: over the workers that wait for each other. Blocks: until they have come.
        """
        objects = self.gather(obj)
        return objects[src if len(objects) > src else 0]

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of the workers, shape (workers, ...).

        Collective: over the workers that wait for each other. Blocks: until they have come.
        """
        return torch.stack(self.gather(tensor.detach())).to(tensor.device)


@contextmanager
def metrics_shared(module: torch.nn.Module, strategy: Collectives) -> Iterator[None]:
    """Within the block, compute metrics of torchmetrics in a module over all workers."""

    # Functions, since copies of a metric share them; of a method they would copy the object.
    def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        return strategy.gather(tensor)

    def available() -> bool:
        return strategy.shares

    own = {
        metric: metric.distributed_available_fn
        for metric in module.modules()
        if isinstance(metric, Metric) and metric.dist_sync_fn is None
    }
    for metric in own:
        metric.dist_sync_fn, metric.distributed_available_fn = gather, available
    try:
        yield
    finally:
        for metric, function in own.items():
            metric.dist_sync_fn, metric.distributed_available_fn = None, function
