"""Processes that read a rank's batches, by torch's DataLoader.

A DataLoader asks its sampler for a new batch whenever it returns one. The sampler here then names
the next batch that was assigned to this worker. If there is none, it names an empty batch, which
the reader drops. So the DataLoader never gets a batch that was not assigned, and it returns all
batches in the order of their assignment.

The processes are forked from a new server process (``forkserver``), not from the rank, because MPI
does not survive a fork on every network: pages that are registered with the network adapter are
missing in the child, or move in the rank. The processes do not start MPI, and do not get the
signals at which a rank saves and ends.

The processes import this module, without MPI.

Environment:
    MPI4PY_RC_INITIALIZE: Set to 0 for the processes of a ``DataLoader``, which are no ranks.
"""

import atexit
import functools
import multiprocessing
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from mpips.errors import Exit, UserError
from mpips.mpi import signals

Sample = tuple[int, int]  # epoch and number of the sample
PER_PROCESS = 2  # batches in progress in each process, as torch's `prefetch_factor`
METHOD = "forkserver"
KILLED_S = 5.0
DIED_S = 0.5  # time in which the death of a process with a broken connection is noticed
NO_MPI = "MPI4PY_RC_INITIALIZE"  # variable of mpi4py: whether its import starts MPI


class Processes:
    """Processes that read batches of a dataset, in the order of the requests.

    Args:
        dataset: A map-style dataset; it is pickled, except by method ``fork``.
        collate: Makes a batch of a list of samples; by default torch's.
        count: Number of processes.
        seed: Seed of random numbers in samples; see `Seeded`.
        method: Start method of Python's ``multiprocessing``.

    Attributes:
        ahead: Number of batches in progress or complete, beside the next one to be read.

    Raises:
        UserError: If the processes cannot start.

    Blocks: until they have started.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        count: int,
        seed: int = 0,
        method: str = METHOD,
    ) -> None:
        _check(count, method)
        self.ahead = PER_PROCESS * count
        self._requests: deque[list[Sample]] = deque()
        context = torch.multiprocessing.get_context(method)
        context.set_forkserver_preload([__name__])  # imports torch once for all processes
        reader, self._alive = context.Pipe(duplex=False)
        loader = DataLoader(
            Seeded(dataset, seed), batch_sampler=_batches(self._requests), num_workers=count,
            collate_fn=functools.partial(_collate, collate), prefetch_factor=PER_PROCESS,
            multiprocessing_context=context, generator=torch.Generator().manual_seed(seed),
            worker_init_fn=functools.partial(_watch, reader),
        )  # fmt: skip
        before = set(multiprocessing.active_children())
        problem: Exception | None = None
        try:
            with _without_mpi():
                self._made: Iterator[list[Any]] | None = iter(loader)
            for _ in range(count):  # receives an empty batch of each
                next(self._made)
        except Exception as error:
            problem = error
        self._children = set(multiprocessing.active_children()) - before
        reader.close()
        self._kill = functools.partial(_kill, self._children)
        atexit.register(self._kill)  # runs before multiprocessing waits for the processes
        if problem is not None:
            self.end()
            raise _not_started(problem) from None

    def ask(self, samples: list[Sample]) -> None:
        """Request a batch. Blocks: no."""
        self._requests.append(samples)

    def read(self) -> Any:
        """Return the next batch.

        Raises:
            UserError: If a process has died.
            Exception: As the dataset raised it in a process, whose traceback is in the message.

        Blocks: until the batch is complete.
        """
        assert self._made is not None, "the processes have not ended"
        try:
            while not (made := next(self._made)):
                pass
        except Exception as error:  # the death of a process raises exceptions of several types
            dead = wait([child.sentinel for child in self._children], DIED_S)
            if not dead:
                raise
            gone = next(child for child in self._children if child.sentinel in dead)
            got = f"process {gone.pid} of a loader that died ({error})"
            remedy = "was it killed for want of memory, on this host or in its /dev/shm?"
            raise UserError(got, "one that reads to the end", remedy) from error
        return made[0]

    def end(self) -> None:
        """Kill the processes; batches that were not read are lost. May be called twice.

        Blocks: until they have ended, at most some seconds for each.
        """
        self._made = None
        self._kill()
        self._alive.close()
        atexit.unregister(self._kill)


class Seeded:
    """A dataset in a reading process, with random numbers that depend on the sample alone.

    The generators of Python's `random`, NumPy (the legacy one) and torch are seeded before each
    sample with the run's seed, the epoch and the sample's number. So the sample is the same in each
    process, and in any order. A dataset that reads several samples at once (``__getitems__``) is
    seeded by the first one; so is a `Subset` of it.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, sample: Sample) -> Any:
        self._begin(sample)
        return self._dataset[sample[1]]

    def __getitems__(self, samples: list[Sample]) -> Any:
        inner = self._dataset
        while getattr(type(inner), "__getitems__", None) is Subset.__getitems__:
            inner = inner.dataset
        if not hasattr(inner, "__getitems__") or not samples:
            return [self[sample] for sample in samples]
        self._begin(samples[0])
        return self._dataset.__getitems__([number for _, number in samples])

    def _begin(self, sample: Sample) -> None:
        seed_generators(*np.random.SeedSequence((self._seed, *sample)).generate_state(3).tolist())


def seed_generators(python: int, numpy: int, pytorch: int) -> None:
    """Seed the global generators of Python, NumPy (the legacy one) and PyTorch on the host."""
    random.seed(python)
    np.random.seed(numpy % 2**32)
    torch.default_generator.manual_seed(pytorch)


def _batches(requests: deque[list[Sample]]) -> Iterator[list[Sample]]:
    """Yield the next requested batch, or an empty one, without end."""
    while True:
        yield requests.popleft() if requests else []


def _collate(collate: Callable[[list[Any]], Any] | None, samples: Any) -> list[Any]:
    """Return a list of the batch of some samples; of no samples an empty list."""
    empty = isinstance(samples, list) and not samples
    return [] if empty else [(collate or default_collate)(samples)]


def _check(count: int, method: str) -> None:
    """Check the number of processes and the start method.

    Raises:
        UserError: If one is invalid.
    """
    if not isinstance(count, int) or count < 1:
        raise UserError(f"num_workers {count!r}", "a whole number >= 0")
    methods = multiprocessing.get_all_start_methods()
    if method not in methods:
        raise UserError(f"multiprocessing_context {method!r}", f"one of {', '.join(methods)}")


def _not_started(problem: Exception) -> UserError:
    got = f"processes of a loader that did not start: {type(problem).__name__}: {problem}"
    expected = "a dataset and collate_fn that can be pickled, in a program that can be imported: "
    expected += 'what begins its run is behind if __name__ == "__main__":'
    return UserError(got, expected, "num_workers=0 needs neither")


def _watch(rank: Connection, worker: int) -> None:
    """End this process when its rank ends; the forkserver may outlive the rank."""
    threading.Thread(target=_end_with, args=(rank,), daemon=True).start()


def _end_with(rank: Connection) -> None:
    try:
        rank.recv()  # returns when the rank ends, as nothing is ever sent
    finally:
        os._exit(Exit.FAILED)


def _kill(children: Iterable[BaseProcess]) -> None:
    for child in children:
        if child.is_alive():
            child.kill()
            child.join(KILLED_S)


@contextmanager
def _without_mpi() -> Iterator[None]:
    """Make processes that start within the block neither start MPI nor get a rank's signals."""
    with signals.blocked():
        resource_tracker.ensure_running()  # its own start unblocks some signals
    before = os.environ.get(NO_MPI)
    os.environ[NO_MPI] = "0"
    try:
        with signals.blocked():
            yield
    finally:
        del os.environ[NO_MPI]
        if before is not None:
            os.environ[NO_MPI] = before
