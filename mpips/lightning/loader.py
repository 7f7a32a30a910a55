"""DataLoader in mpips: batches that servers or rounds assign."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from mpips.errors import UserError

if TYPE_CHECKING:
    from mpips.lightning.run import Fit


class Batches:
    """This worker's batches in place of those of a DataLoader, one pass an epoch.

    Args:
        given: The DataLoader.
        fit: The run that trains on its samples.
        limit: Lightning's limit of the batches in an epoch: a number of batches, or a share. Each
            epoch has the same samples: the first ones, or random ones if the loader shuffles.

    Raises:
        UserError: If mpips cannot read its samples, or not in its order.
    """

    def __init__(self, given: Any, fit: "Fit", limit: int | float = 1.0) -> None:
        self._given, self._fit = given, fit
        refused = _refused(given)
        if refused:
            expected = "a DataLoader of a map-style dataset, with batch_size= and shuffle= alone"
            remedy = "mpips assigns the samples: each once an epoch to one of the workers"
            raise UserError(f"train_dataloader with {refused}", expected, remedy)
        self.shuffle = isinstance(given.sampler, RandomSampler)
        self._round_size = given.batch_size * fit.ranks.world_size()
        batches = limit if isinstance(limit, int) else int(limit * len(self))
        self._samples = min(len(given.dataset), batches * self._round_size)

    def __len__(self) -> int:
        """Return the number of this worker's batches in an epoch: exact in sync, else its share."""
        return math.ceil(len(self._given.dataset) / self._round_size)

    @property
    def share(self) -> int:
        """Number of this worker's batches in an epoch, within Lightning's limit."""
        return math.ceil(self._samples / self._round_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch; none after the end of the run."""
        yield from self._fit.next_pass()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `mpips.torch.Worker.loader`."""
        given, data = self._given, self._given.dataset
        if self._samples < len(data):
            order: Any = range(self._samples)
            if self.shuffle:
                order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
                order = order[: self._samples].tolist()
            data = Subset(data, order)
        arguments = {
            "dataset": data,
            "batch_size": given.batch_size,
            "collate_fn": given.collate_fn,
            "num_workers": given.num_workers,
        }
        if (context := given.multiprocessing_context) is not None:
            arguments["multiprocessing_context"] = context.get_start_method()
        return arguments


def _refused(given: Any) -> str:
    """Return a property of a DataLoader that mpips does not support; empty if there is none."""
    if not isinstance(given, DataLoader):
        return f"a {type(given).__name__}"
    if not hasattr(given.dataset, "__len__") or not hasattr(given.dataset, "__getitem__"):
        return f"an iterable dataset, {type(given.dataset).__name__}"
    if type(given.batch_sampler) is not BatchSampler:
        return f"batch_sampler={type(given.batch_sampler).__name__}"
    sampler = given.sampler
    plain = type(sampler) in (RandomSampler, SequentialSampler)
    if not plain or getattr(sampler, "replacement", False) or len(sampler) != len(given.dataset):
        return f"sampler={type(sampler).__name__}"
    init = given.worker_init_fn
    is_lightnings = getattr(init, "func", None) is pl_worker_init_function  # mpips seeds samples
    return "" if init is None or is_lightnings else f"worker_init_fn={init}"
