"""DataLoader as mpips reads it: batches from servers or of rounds."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from mpips.errors import UserError

if TYPE_CHECKING:
    from mpips.lightning.run import Fit


class Batches:
    """This worker's batches in place of those of a DataLoader, one pass an epoch.

    Args:
        given: The DataLoader.
        fit: The run that its samples are for.
        limit: Lightning's: how many batches of an epoch, or which share of them, are used.

    Raises:
        UserError: If its samples or their order are not those of mpips' loader.
    """

    def __init__(self, given: Any, fit: "Fit", limit: int | float = 1.0) -> None:
        self._given, self._fit = given, fit
        refused = _refused(given)
        if refused:
            expected = "a DataLoader of a map-style dataset, with batch_size= and shuffle= alone"
            remedy = "mpips assigns the samples: each once an epoch to one of the workers"
            raise UserError(f"train_dataloader with {refused}", expected, remedy)
        self.shuffle = isinstance(given.sampler, RandomSampler)
        self._of_round = given.batch_size * fit.ranks.world_size()
        batches = limit if isinstance(limit, int) else round(limit * len(self))
        self._samples = min(len(given.dataset), batches * self._of_round)

    def __len__(self) -> int:
        """Return the number of this worker's batches in an epoch: exact in sync, else its share."""
        return math.ceil(len(self._given.dataset) / self._of_round)

    @property
    def share(self) -> int:
        """This worker's batches in an epoch, of those samples that Lightning's limit leaves."""
        return math.ceil(self._samples / self._of_round)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch; none when the run is over."""
        yield from self._fit.next_pass()

    def arguments(self) -> dict[str, Any]:
        """Return what `mpips.torch.Worker.loader` is given."""
        given, data = self._given, self._given.dataset
        found = {
            "dataset": data if self._samples == len(data) else Subset(data, range(self._samples)),
            "batch_size": given.batch_size,
            "collate_fn": given.collate_fn,
            "num_workers": given.num_workers,
        }
        if (context := given.multiprocessing_context) is not None:
            found["multiprocessing_context"] = context.get_start_method()
        return found


def _refused(given: Any) -> str:
    """Return what a DataLoader has that mpips' loader has not; an empty text for nothing."""
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
    begins = given.worker_init_fn
    lightnings = getattr(begins, "func", None) is pl_worker_init_function  # samples are seeded
    return "" if begins is None or lightnings else f"worker_init_fn={begins}"
