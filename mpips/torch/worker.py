"""Worker of a PyTorch program: model, optimizer, loader."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from mpips.checkpoint import Checkpoint, need_whole
from mpips.config.groups import parse_groups
from mpips.errors import UserError, nearest
from mpips.library.data import Samples
from mpips.library.epochs import Loader
from mpips.library.loop import Loop
from mpips.mpi.world import Cluster
from mpips.optim import Range
from mpips.planning.job import steps_before
from mpips.problems.accumulate import Task
from mpips.tables.saved_rows import find_rows
from mpips.torch.embedding import Source
from mpips.torch.model import Bound, evaluating, on_host, trained_parameters
from mpips.torch.optimizer import Losses, Optimizer, param_groups
from mpips.torch.processes import METHOD, Processes
from mpips.torch.streamed import Streamed, StreamedSamples

if TYPE_CHECKING:
    from mpips.library.start import Start

Collate = Callable[[list[Any]], Any]


class TorchSamples(Samples):
    """A PyTorch dataset of a known length, collated into batches.

    Args:
        dataset: Any object with ``len`` and ``dataset[k]``. Batches of a plain `TensorDataset` are
            taken by one index operation.
        collate: Makes a batch of a list of samples; by default torch's.
        processes: Processes that read the batches; None if the rank reads them itself.

    Raises:
        UserError: If it has no length or no sample.
    """

    def __init__(
        self, dataset: Any, collate: Collate | None = None, processes: Processes | None = None
    ) -> None:
        if isinstance(dataset, IterableDataset):
            got = f"dataset of type {type(dataset).__name__}, whose samples have no numbers"
            remedy = "wrap it: mpips.torch.Streamed(dataset, samples=N), N of an epoch"
            raise UserError(got, "one with a length and samples by number (map-style)", remedy)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            got = f"dataset of type {type(dataset).__name__}"
            raise UserError(got, "one with a length and samples by number (map-style)")
        self.n = len(dataset)
        if not self.n:
            raise UserError("dataset without a sample", "at least one")
        self._dataset, self._collate = dataset, collate
        own = getattr(type(dataset), "__getitem__", None) is not TensorDataset.__getitem__
        self._whole = collate is None and not own
        self._processes = processes
        self.ahead = processes.ahead if processes is not None else 0

    def ask(self, ids: np.ndarray, epoch: int) -> None:
        """Request a batch of the samples `ids`, shape (n,), int64, from the processes."""
        assert self._processes is not None, "only processes read ahead"
        self._processes.ask([(epoch, k) for k in ids.tolist()])

    def read(self, ids: np.ndarray) -> tuple[Any, Any]:
        """Return the batch of the samples `ids`, shape (n,), int64, and None for its targets."""
        if self._processes is not None:
            return self._processes.read(), None
        if self._whole:
            numbers = torch.from_numpy(ids)
            return [t.index_select(0, numbers) for t in self._dataset.tensors], None
        return (self._collate or default_collate)([self._dataset[k] for k in ids.tolist()]), None


class Worker(Loop):
    """A worker of a run of a PyTorch model, the argument of the function that is given to `run`.

    Attributes:
        id: This worker's number, from 0.
        workers: Number of workers.
        rank: This process's MPI rank in the run's communicator.
        model: The module. Before the loop over the batches every worker may change its parameters
            and buffers in place, all alike: a new run starts with these values. From the first
            batch on the parameters are views of this worker's replica: read them, and let the
            optimizer's `step` change them.
        optimizer: Pushes gradients, in place of an optimizer that applies them.
        steps: Steps of this worker, from the first batch on; in a resumed run with its share of
            earlier ones. With `accumulate` a step has several batches.
        batches_by: See `mpips.library.loop.Loop`, as for `unpushed`.
    """

    batches_by = "worker.loader"
    unpushed = (
        "call worker.optimizer.step() for each; for steps of k batches give mpips.torch.run "
        "accumulate=k, and do not divide the loss by k"
    )

    def __init__(self, start: "Start", model: torch.nn.Module, source: Source) -> None:
        super().__init__(start)
        self.model = model
        self._losses, self._source = Losses(), source
        trained = trained_parameters(model, parse_groups(start.config.groups))
        # In asynchronous modes each push is applied, so a worker pushes its share of running means.
        share = 1 / self.workers if start.config.mode in ("async", "ssp") else 1.0
        self._bound = Bound(model, share, trained, notice=self._losses.notice)
        source.open(self._pull_rows, self._losses.notice)
        self._saved: Checkpoint | None = None  # source of rows after the run
        groups = param_groups(self._bound.parameters, start.config)
        self.optimizer = Optimizer(groups, self.push_gradients, self.drop_gradients)
        self.steps, self._loss = 0, 0.0  # the last step's loss
        self._ranges: dict[str, Range] = {}  # range of each array in the flat vector
        self._processes: Processes | None = None

    def loader(
        self,
        dataset: "Dataset[Any] | Streamed",
        batch_size: int | None = None,
        epochs: int | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        multiprocessing_context: str = METHOD,
        **unknown: Any,
    ) -> Loader[Any]:
        """Return this worker's batches: in an epoch each sample goes to one of the workers, once.

        Iterate over them once for the whole run, or once in each epoch of `epochs`.

        Args:
            dataset: A map-style dataset, the same on every worker, or a `Streamed` one.
            batch_size: Samples in a batch; by default the option of that name.
            epochs: Passes over the data, with those before a resume; by default the option of that
                name, or as `epochs` says.
            collate_fn: Makes a batch of a list of samples; by default torch's.
            num_workers: Processes that read this worker's batches while it computes; 0 for none.
                They seed random numbers of a sample by the run's seed, the epoch and the sample.
            multiprocessing_context: Start method of Python's ``multiprocessing``. ``fork`` does not
                pickle the dataset, and is not safe with MPI on all networks.
            **unknown: Other arguments of torch's DataLoader, which are refused.

        Returns:
            An iterable of batches, as of torch's DataLoader. Its length is the number of this
            worker's batches in an epoch: exact in mode sync, else its share.

        Raises:
            UserError: As `mpips.Worker.batches`; if a parameter was replaced before the loop, or
                changed on some workers only; if a process cannot start, or has died.

        Collective: over the workers, in its first step. Blocks: until a batch arrives.
        """
        check_loader(dataset, num_workers, unknown)

        def make() -> Samples:
            if isinstance(dataset, Streamed):
                return StreamedSamples(dataset, dataset.part(self.id, self.workers), collate_fn)
            if num_workers != 0:
                args = num_workers, self._start.config.seed, multiprocessing_context
                self._processes = Processes(dataset, collate_fn, *args)
            return TorchSamples(dataset, collate_fn, self._processes)

        def count() -> int:
            return len(dataset) if isinstance(dataset, Streamed) else TorchSamples(dataset).n

        view = operator.attrgetter("x")
        return self._use(Loader(self, make, count, view, batch_size, epochs, dataset))

    def to(self, device: "torch.device | str", early: bool = False) -> torch.device:
        """Move the model to a device, before the loop; returns the device.

        Before each step the parameters are copied from the replica to the device. The optimizer's
        `step` copies the gradients back. The loop moves batches itself: ``x.to(device)``.

        Args:
            device: Device such as ``cuda:1``. With ``cuda`` the workers of a node take one device
                each, in turn.
            early: Copy each gradient within the backward pass. If it is changed in place before
                `step`, as by clipping, it is copied again, but not after changes of ``grad.data``.

        Raises:
            UserError: If this process has no such device, or the loop has begun.

        Collective: no. Blocks: no.
        """
        if not self._bound.unmoved:
            raise UserError("to() in the loop over the batches", "a call before it")
        found = device_of(device, self._start.ranks)
        self._bound.forget()
        self.model.to(found)
        share, trained, notice = self._bound.share, self._bound.parameters, self._losses.notice
        self._bound = Bound(self.model, share, trained, early, notice)
        return found

    def push_gradients(self, factor: float = 1.0) -> None:
        """Push the gradients of the backward passes since the batch was taken.

        Args:
            factor: Factor of the run's learning rate, for this step.

        Raises:
            UserError: If there was no backward pass, or there is no current batch.

        Collective and blocking: as `mpips.Worker.push`.
        """
        task = self._current_task("step")
        self._bound.complete()
        if (loss := self._losses.mean()) is None:
            remedy = "add 0 * the sum of a parameter where a batch has nothing to train on"
            expected = "loss.backward() before it, of a loss that depends on a trained parameter"
            raise UserError("step without a gradient", expected, remedy)
        if math.isfinite(loss):  # otherwise the run ends, and no gradient is pushed
            self._source.push_into(lambda *rows: self._tables("step").push(*rows))
        self._start.job.rate_factor = factor
        self._start.job.frozen = tuple(self._ranges[name] for name in self._bound.frozen)
        self.steps += task.last
        self._loss = loss
        self._push(loss)

    def drop_gradients(self) -> None:
        """Drop the gradients of the backward passes since the batch was taken."""
        self._bound.drop()
        self._losses.clear()
        self._source.forget()

    def evaluate(
        self, metrics: Callable[[torch.nn.Module, Any], dict[str, float]], data: Any
    ) -> dict[str, float]:
        """Return the means over held-out samples; `mpips.Worker` says when workers share them.

        Args:
            metrics: ``metrics(model, batch)`` returns means over a batch, ``loss`` among them. It
                is called with the model in evaluation mode, and without gradients.
            data: A map-style dataset.

        Returns:
            Means by name over all samples; if workers share them, the same on every worker.

        Raises:
            UserError: As `mpips.Worker.evaluate`.

        Collective: over the workers, if they share the samples. Blocks: then, until all have come.
        """

        def of_batch(params: Any, batch: Any) -> dict[str, float]:
            with evaluating(self.model, params):
                return metrics(self.model, batch.x)

        return self._evaluate(of_batch, TorchSamples(data))

    def _outgoing(self, value: Any) -> Any:
        return on_host(value)

    def _reduce(self, like: Any, values: Sequence[Any], op: str) -> Any:
        if not isinstance(like, torch.Tensor):
            return super()._reduce(like, values, op)
        stacked = torch.stack(tuple(values))
        if op == "mean" and not stacked.is_floating_point():
            stacked = stacked.float()
        reduce = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}[op]
        return reduce(stacked, 0).to(like.device)

    def _write(self, obj: Any, path: Path) -> None:
        try:
            with open(path, "wb") as file:
                torch.save(on_host(obj), file)
        except OSError:
            raise
        except Exception as error:
            if isinstance(error.__context__, OSError):  # PyTorch hides the error of a full disk
                raise error.__context__ from None
            got = f"save() of {type(obj).__name__} ({type(error).__name__}: {error})"
            raise UserError(got, "what torch.save takes") from error

    def close(self) -> None:
        """End this worker, also after an error of the run.

        Processes that read for it end, and torch's own optimizers may step again.
        """
        self.optimizer.end()
        if self._processes is not None:
            self._processes.end()

    def _pull_rows(self, table: str, ids: np.ndarray) -> np.ndarray:
        """Return rows as the servers hold them now; after the run, rows of its last checkpoint."""
        if self.ended is None:
            return self._tables("forward").pull(table, ids)
        if self._saved is None:
            remedy = "rows are read from it when the run is over"
            self._saved, _ = need_whole(self._start.out, remedy=remedy)
        return find_rows(self._saved, table, ids)

    def _skip(self, task: Task) -> None:
        """Leave a batch uncomputed; a round cannot leave it out, so it gets zero gradients."""
        if not self._start.config.in_rounds:
            super()._skip(task)
            return
        self._start.job.left = True
        for array in task.out.values():
            array.fill(0)
        self._start.job.frozen = tuple(self._ranges[name] for name in self._bound.parameters)
        task.loss = self._loss

    def _take(self, epoch: int | None = None) -> Task | None:
        task = super()._take(epoch)
        self._losses.clear()
        self._source.forget()
        if task is not None:
            self._bound.collect_into(task.out)
        return task

    def _fetch(self) -> Task | None:
        begins = self._bound.unmoved
        task = super()._fetch()
        if begins:
            self.steps = steps_before(self._start.job)
            self._ranges = self._start.job.layout.slices()
            self._start.job.held.callback(self._bound.copies.unpin)
            self.optimizer.begin()
        if task is not None:
            self._bound.move_to(task.params)
            self.optimizer.note(self.updates)
        return task

    def _advance(self) -> Task | None:
        task = super()._advance()
        if self.ended is not None:  # the run has freed its memory
            self._bound.move_to(self._start.final_params(self.ended))
            self._bound.forget()
        return task


# Arguments of torch's DataLoader that a run does not have, with the remedy.
ARGUMENTS = ("dataset", "batch_size", "epochs", "collate_fn", "num_workers")
OF_DATALOADER = {
    "shuffle": "a run shuffles: give mpips.torch.run shuffle=, or leave it out",
    "drop_last": "each sample counts once an epoch: leave it out",
    **dict.fromkeys(("sampler", "batch_sampler"), "servers assign samples, without a sampler"),
    **dict.fromkeys(("pin_memory", "persistent_workers", "prefetch_factor"), "leave it out"),
    **dict.fromkeys(("worker_init_fn", "generator"), "give mpips.torch.run seed=, or leave it out"),
}


def check_loader(dataset: Any, processes: int, unknown: Mapping[str, Any]) -> None:
    """Check the arguments of a program's loader.

    Raises:
        UserError: If the dataset is a loader of torch, or an argument is unknown.
    """
    if isinstance(dataset, Streamed) and processes:
        got = f"num_workers={processes} of worker.loader() with a stream"
        remedy = f"mpips.torch.Streamed(DataLoader(dataset, None, num_workers={processes}), ...)"
        raise UserError(got, "processes that are the stream's own", remedy)
    if isinstance(dataset, DataLoader):
        raise UserError("a DataLoader", "the dataset of it", "give loader.dataset")
    for name in unknown:
        expected = f"{', '.join(ARGUMENTS[:-1])} or {ARGUMENTS[-1]}"
        remedy = OF_DATALOADER.get(name) or nearest(name, ARGUMENTS)
        raise UserError(f"{name}= of worker.loader()", expected, remedy)


def device_of(device: "torch.device | str", ranks: Cluster) -> torch.device:
    """Return the device of a worker; without a number, workers of a node take devices in turn.

    Raises:
        UserError: If there is no such device.
    """
    try:
        chosen = torch.device(device)
    except RuntimeError as problem:
        got = f"device {device!r} ({str(problem).splitlines()[0]})"
        raise UserError(got, "one of PyTorch's, such as cuda") from None
    if chosen.type == "cpu":
        return chosen
    count = getattr(getattr(torch, chosen.type, None), "device_count", lambda: 0)()
    workers = [rank for rank in ranks.my_node if rank in ranks.roles.workers]
    index = workers.index(ranks.rank) % max(1, count) if chosen.index is None else chosen.index
    if index >= count:
        got = f"device {str(device)!r} in a process that has {count} of {chosen.type}"
        raise UserError(got, "one that is there", "see torch.cuda.is_available()")
    return torch.device(chosen.type, index)
