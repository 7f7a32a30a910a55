"""Datasets without numbered samples, such as torch's IterableDataset, for `Worker.loader`."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate

from mpips.errors import UserError
from mpips.library.data import Samples


class Streamed:
    """A stream of samples, an IterableDataset or a WebDataset, as a dataset for `Worker.loader`.

        stream = mt.Streamed(dataset, samples=100_000)
        stream = mt.Streamed(lambda worker, workers: part_of(worker, workers), samples=100_000)

    The number of samples in an epoch is exact, also if the run is resumed. The choice of samples is
    not, unlike in a dataset of numbered samples:

    - The next sample is the next one in the worker's part of the stream. A part that ends starts
      again. In the modes without rounds a fast worker goes through its part more often than others.
    - A resumed run starts each part at its beginning: some samples may count twice, others never.
    - Samples that are read ahead when the run ends or stops do not count.
    - The option ``shuffle`` has no effect: the stream determines the order.

    Args:
        dataset: An iterable, which each worker reads completely, again and again. Of W workers each
            uses every W-th sample. Or a function of a worker's number and the number of workers
            that returns this worker's part, such as a WebDataset over its shards.
        samples: Number of samples in an epoch, over all workers: a stream has no length.

    Raises:
        UserError: If `samples` is not an integer of at least 1; if the dataset can be iterated only
            once, or yields batches.
    """

    def __init__(
        self, dataset: Iterable[Any] | Callable[[int, int], Iterable[Any]], samples: int
    ) -> None:
        if not isinstance(samples, int) or samples < 1:
            raise UserError(f"samples {samples!r} of a stream", "an integer >= 1")
        if isinstance(dataset, Iterator):
            got = f"a stream of a {type(dataset).__name__}, which can be iterated only once"
            remedy = "give a function that makes it: Streamed(lambda worker, workers: ..., samples)"
            raise UserError(got, "an iterable that begins anew each time", remedy)
        if isinstance(dataset, DataLoader) and dataset.batch_size is not None:
            got = f"a stream of a DataLoader with batch_size={dataset.batch_size}"
            raise UserError(got, "one of samples, batch_size=None", "worker.loader() makes batches")
        self._dataset, self._samples = dataset, samples

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return self._samples

    def part(self, worker: int, workers: int) -> Iterator[Any]:
        """Yield a worker's samples without end.

        Raises:
            UserError: If the worker's part has no sample.

        Collective: no. Blocks: while the stream is read.
        """
        got = f"a stream without a sample for worker {worker} of {workers}"
        while True:
            if callable(self._dataset):
                samples = iter(self._dataset(worker, workers))
            else:
                samples = itertools.islice(iter(self._dataset), worker, None, workers)
            none = object()
            first = next(samples, none)
            if first is none:
                raise UserError(got, "at least one for each", "use fewer workers, or other parts")
            yield first
            yield from samples
            got = f"a stream that worker {worker} iterates again, and that yields nothing then"


class StreamedSamples(Samples):
    """A worker's part of a stream, in batches.

    Args:
        stream: The stream.
        part: Yields the worker's samples.
        collate: Makes a batch of a list of samples; by default torch's.
    """

    def __init__(
        self, stream: Streamed, part: Iterator[Any], collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self.n, self._part, self._collate = len(stream), part, collate or default_collate

    def read(self, ids: np.ndarray) -> tuple[Any, Any]:
        """Return a batch of as many samples as `ids` has numbers, and None in place of targets."""
        return self._collate(list(itertools.islice(self._part, len(ids)))), None
