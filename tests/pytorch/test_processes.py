"""Processes that read for `worker.loader`: what they read, and what goes wrong in them."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, environment, run, until

torch = pytest.importorskip("torch")

from torch.utils.data import Subset  # noqa: E402

from mpips.errors import UserError  # noqa: E402
from mpips.mpi.process import running  # noqa: E402
from mpips.torch.processes import Processes, Seeded  # noqa: E402

UNGUARDED = """
import mpips, mpips.torch as mt, torch

def train(worker):
    for x in worker.loader([1.0] * 40, num_workers=2, batch_size=2, epochs=1):
        worker.model.weight.sum().backward()
        worker.optimizer.step()

model = lambda: torch.nn.Linear(1, 1)
mt.run(train, model=model, optimizer=mpips.SGD(1e-3), mode="sync", quiet=True)
"""
WAITS = """
import multiprocessing, time
from mpips.torch.processes import Processes

if __name__ == "__main__":
    reading = Processes([1.0] * 9, None, 2, 0, "{method}")
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(100)
"""


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_a_program_that_begins_its_run_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(UNGUARDED)
    found = run(2, ["own.py"], tmp_path, 200)
    assert found.code == 2
    assert "a run that begins in a process that a rank has started" in found.output
    assert "did not start: " in found.output
    assert not [*tmp_path.glob("runs/*")]


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_processes_end_with_a_rank_that_is_killed(method: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WAITS.format(method=method))
    args, env = [sys.executable, "own.py"], {**environment(), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(args, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pids = rank.stdout.readline().split()
        rank.kill()
    assert len(pids) == 2
    until(lambda: not running(map(int, pids)), 30)


# Without a run ---------------------------------------------------------------------------------


class Odd:
    """Samples of which one may be bad, or endless."""

    def __init__(self, bad: int = -1, endless: int = -1) -> None:
        self.bad, self.endless = bad, endless

    def __getitem__(self, k: int) -> int:
        if k == self.bad:
            raise ValueError(f"sample {k} is odd")
        while k == self.endless:
            time.sleep(0.1)
        return k


@pytest.fixture
def made() -> Iterator[Callable[..., Processes]]:
    """Makes processes that have been asked for batches; they are ended with the test."""
    every: list[Processes] = []

    def make(dataset: Any, *batches: list[int], method: str = "forkserver") -> Processes:
        every.append(Processes(dataset, None, 2, 0, method))
        for batch in batches:
            every[-1].ask([(0, k) for k in batch])
        return every[-1]

    yield make
    for one in every:
        one.end()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("args", "told"),
    [((-1,), "num_workers -1, expected"), ((1, 0, "forks"), "'forks', expected one of fork, ")],
)
def test_processes_that_cannot_be(args: tuple[Any, ...], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Processes(Odd(), None, *args)


@pytest.mark.long
def test_batches_come_in_the_order_in_which_they_are_asked_for(made: Any) -> None:
    """By forked processes of samples too that cannot be pickled."""

    class Local(Odd):
        """A class that cannot be found by its name."""

    batches = [5, 3], [4], [9, 8, 7], [1]
    for dataset, method in ((Odd(), "forkserver"), (Local(), "fork")):
        reading = made(dataset, *batches, method=method)
        assert tuple(reading.read().tolist() for _ in batches) == batches
    with pytest.raises(UserError, match=r"did not start: .* can be pickled"):
        made(Local())


@pytest.mark.long
def test_what_goes_wrong_in_a_process_is_told(made: Any) -> None:
    """One that does not end is ended by the fixture."""
    bad = made(Odd(bad=3), [1, 2], [3])
    assert bad.read().tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"(?s), in __getitem__.*sample 3 is odd"):
        bad.read()
    known = set(multiprocessing.active_children())
    endless = made(Odd(endless=2), [2], [2])
    for child in set(multiprocessing.active_children()) - known:
        os.kill(child.pid or 0, signal.SIGKILL)
    with pytest.raises(UserError, match="of a loader that died"):
        endless.read()
    made(Odd(endless=2), [2])


class Random:
    """Samples of which each has random numbers of three kinds."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, k: int) -> tuple[Any, ...]:
        return k, random.random(), np.random.rand(), torch.rand(2).tolist()


class Together(Random):
    """The same, several at once."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[k] for k in numbers]


def test_what_is_random_in_a_sample_is_the_samples() -> None:
    one, two, other = Seeded(Random(), 3), Seeded(Random(), 3), Seeded(Random(), 4)
    samples = [(0, 5), (0, 7), (1, 5)]
    found = one.__getitems__(samples)
    assert found == [two[sample] for sample in reversed(samples)][::-1]
    assert [sample[0] for sample in found] == [5, 7, 5]
    drawn = {tuple(sample[3]) for sample in [*found, *other.__getitems__(samples)]}
    assert len(drawn) == 6
    assert Seeded(Subset(Random(), range(9)), 3).__getitems__(samples) == found
    assert Seeded(Together(), 3).__getitems__(samples)[0] == found[0]
    assert Seeded(Together(), 3).__getitems__([]) == []
