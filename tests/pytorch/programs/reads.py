"""Processes that read: each sample once an epoch, in each mode, and over a stop by a signal."""

import multiprocessing
import os
import random
import signal
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch.utils.data import Dataset, get_worker_info

import mpips
import mpips.torch as mt

N, EPOCHS, SIZE = 70, 2, 4
WORLD = MPI.COMM_WORLD
Read = tuple[int, float, float, float]  # a sample's number, and what was random in it


class Slow(Dataset[tuple[Read, int]]):
    """Samples that take 5 ms each, and are random."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, k: int) -> tuple[Read, int]:
        time.sleep(0.005)
        info = get_worker_info()
        assert info is not None, "in a process of its own"
        return (k, random.random(), np.random.rand(), float(torch.rand(()))), info.id


def signal_all() -> None:
    """Send what ends a run to this rank, and to all that it has started, as a launcher may."""
    started = [child.pid for child in multiprocessing.active_children()]
    started += [forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]
    assert len(started) == 4
    for pid in (*started, os.getpid()):
        assert pid is not None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)


def part(comm: MPI.Intracomm, out: Path, stop: int, mode: str) -> tuple[list[Read], str]:
    """Run until a worker has made so many steps, or to the end; returns what all have pushed."""
    pushed: list[Read] = []

    def train(worker: mt.Worker) -> None:
        readers = set()
        loader = worker.loader(Slow(), batch_size=SIZE, epochs=EPOCHS, num_workers=2)
        for step, (found, reader) in enumerate(loader, 1):
            readers.update(reader.tolist())
            worker.model.weight.sum().backward()
            worker.optimizer.step()
            pushed.extend(zip(*(x.tolist() for x in found), strict=True))
            if step == stop and worker.id == 0:
                signal_all()
        assert readers == {0, 1} or (worker.id and readers < {0, 1}), "both are at it"

    result = mt.run(
        train, model=lambda: torch.nn.Linear(1, 1), optimizer=mpips.SGD(1e-3), mode=mode,
        comm=comm, out=out, resume="auto", quiet=True,
    )  # fmt: skip
    assert not multiprocessing.active_children(), "they have ended"
    return [read for of_rank in comm.allgather(pushed) for read in of_rank], result.reason


def main(out: Path) -> None:
    """Run each mode in two parts, the second with one worker; rank 0 never is one."""
    both, fewer = WORLD.Split(WORLD.rank > 0), WORLD.Split(WORLD.rank < 2)
    one, seen = WORLD.Split(WORLD.rank == 1), []
    for mode in ("async", "ssp", "sync"):
        first, second = (both, one) if mode == "sync" else (WORLD, fewer)
        if mode != "sync" or WORLD.rank:
            reads, reason = part(first, out / mode, 4, mode)
            assert reason == "SIGTERM", reason
            assert 0 < len(reads) < N * EPOCHS
        if WORLD.rank == 1 or (mode != "sync" and WORLD.rank == 0):
            rest, reason = part(second, out / mode, -1, mode)
            assert reason == "epochs"
            seen.append(sorted(reads + rest))
            counts = np.bincount([read[0] for read in seen[-1]], minlength=N)
            np.testing.assert_array_equal(counts, EPOCHS)
        WORLD.barrier()
    if WORLD.rank == 1:
        assert seen[0] == seen[1] == seen[2], "what is random in a sample is the sample's"
        assert len({read[1:] for read in seen[0]}) == N * EPOCHS
