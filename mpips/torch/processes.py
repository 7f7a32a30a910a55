"""Reader processes of a rank: those of torch's DataLoader.

A DataLoader asks its sampler for the next batch whenever it returns one. Here it is told then what
has been assigned to this worker in the meantime, or, if that is nothing, to make an empty batch,
which is dropped when it comes. So it never knows a batch that was not assigned, and returns all
of them in the order in which they were.

The processes are forked from a server process that has begun anew (``forkserver``), not from the
rank: MPI does not survive a fork on every network, where pages that are registered with the adapter
are missing in the child, or move away from under the adapter in the rank. They start no MPI, and
do not see the signals that a rank saves and ends at.

This module is imported in them: without MPI.

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
from torch.utils.data import DataLoader, default_collate

from mpips.errors import Exit, UserError
from mpips.mpi import signals

Sample = tuple[int, int]  # its epoch and its number
PER_PROCESS = 2  # batches under way in each, as torch's `prefetch_factor`
METHOD = "forkserver"
KILLED_S = 5.0
DIED_S = 0.5  # in which a process that has broken a connection is seen to be dead
NO_MPI = "MPI4PY_RC_INITIALIZE"  # of mpi4py: whether its import starts MPI


class Processes:
    """Reads batches of a dataset in processes of its own, in the order in which they are asked for.

    Args:
        dataset: A map-style dataset; it is pickled, but for method ``fork``.
        collate: Makes a batch of a list of samples; by default torch's.
        count: Number of processes.
        seed: Of what is random in samples; see `Seeded`.
        method: How they start, one of Python's ``multiprocessing``.

    Attributes:
        ahead: Batches that they are at, or have made, beside the one that is read.

    Raises:
        UserError: If they cannot start.

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
        self._asked: deque[list[Sample]] = deque()
        context = torch.multiprocessing.get_context(method)
        context.set_forkserver_preload([__name__])  # so that each need not import torch
        reader, self._alive = context.Pipe(duplex=False)
        loader = DataLoader(
            Seeded(dataset, seed), batch_sampler=_Asked(self._asked), num_workers=count,
            collate_fn=_Collated(collate), prefetch_factor=PER_PROCESS,
            multiprocessing_context=context, generator=torch.Generator().manual_seed(seed),
            worker_init_fn=functools.partial(_watch, reader),
        )  # fmt: skip
        before = set(multiprocessing.active_children())
        problem: Exception | None = None
        try:
            with _apart():
                self._made: Iterator[list[Any]] | None = iter(loader)
            for _ in range(count):  # an empty batch of each
                next(self._made)
        except Exception as error:
            problem = error
        self._children = set(multiprocessing.active_children()) - before
        reader.close()
        self._kill = functools.partial(_kill, self._children)
        atexit.register(self._kill)  # before multiprocessing waits for them there
        if problem is not None:
            self.end()
            raise _not_started(problem) from None

    def ask(self, samples: list[Sample]) -> None:
        """Have a batch read. Blocks: no."""
        self._asked.append(samples)

    def read(self) -> Any:
        """Return the next batch.

        Raises:
            UserError: If a process has died.
            Exception: What the dataset has raised there, with its traceback in the message.

        Blocks: until it is made.
        """
        assert self._made is not None, "they have not ended"
        try:
            while not (made := next(self._made)):
                pass
        except Exception as error:  # what a death looks like depends on what was under way
            dead = wait([child.sentinel for child in self._children], DIED_S)
            if not dead:
                raise
            gone = next(child for child in self._children if child.sentinel in dead)
            got = f"process {gone.pid} of a loader that died ({error})"
            remedy = "was it killed for want of memory, on this host or in its /dev/shm?"
            raise UserError(got, "one that reads to the end", remedy) from error
        return made[0]

    def end(self) -> None:
        """End the processes; what they have made is lost. May be called twice.

        Blocks: until each has read the batch that it is at, but no longer than some seconds.
        """
        self._made = None
        self._kill()
        self._alive.close()
        atexit.unregister(self._kill)


class Seeded:
    """A dataset in a process that reads it: what is random in a sample depends on the sample alone.

    Python's `random`, NumPy's legacy generator and torch's are seeded before each sample, by the
    seed, the epoch and the sample's number: whoever reads it, and in whatever order, makes the
    same of it. A dataset that gives samples together (``__getitems__``) is seeded by the first.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, sample: Sample) -> Any:
        self._begin(sample)
        return self._dataset[sample[1]]

    def __getitems__(self, samples: list[Sample]) -> Any:
        together = getattr(self._dataset, "__getitems__", None)
        if together is None or not samples:
            return [self[sample] for sample in samples]
        self._begin(samples[0])
        return together([number for _, number in samples])

    def _begin(self, sample: Sample) -> None:
        words = np.random.SeedSequence((self._seed, *sample)).generate_state(3).tolist()
        random.seed(words[0])
        np.random.seed(words[1])
        torch.default_generator.manual_seed(words[2])


class _Asked:
    """What a loader asks for the samples of its next batch; those of an empty one if it must."""

    def __init__(self, asked: deque[list[Sample]]) -> None:
        self._asked = asked

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        return self._asked.popleft() if self._asked else []


class _Collated:
    """Makes a list with a batch in it; of no samples a list without."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate or default_collate

    def __call__(self, samples: Any) -> list[Any]:
        empty = isinstance(samples, list) and not samples
        return [] if empty else [self._collate(samples)]


def _check(count: int, method: str) -> None:
    """Check what a program has given.

    Raises:
        UserError: If it cannot be.
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
    """Have this process end when its rank does, which the server process may outlive."""
    threading.Thread(target=_end_with, args=(rank,), daemon=True).start()


def _end_with(rank: Connection) -> None:
    try:
        rank.recv()  # nothing is ever sent
    finally:
        os._exit(Exit.FAILED)


def _kill(children: Iterable[BaseProcess]) -> None:
    for child in children:
        if child.is_alive():
            child.kill()
            child.join(KILLED_S)


@contextmanager
def _apart() -> Iterator[None]:
    """Have what starts within the block not start MPI, and never see a rank's signals."""
    with signals.blocked():
        resource_tracker.ensure_running()  # it leaves some of them open behind it
    before = os.environ.get(NO_MPI)
    os.environ[NO_MPI] = "0"
    try:
        with signals.blocked():
            yield
    finally:
        del os.environ[NO_MPI]
        if before is not None:
            os.environ[NO_MPI] = before
