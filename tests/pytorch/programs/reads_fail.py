"""Processes that read, one rank alone: what goes wrong in them is told, and nothing waits."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import mpips
import mpips.torch as mt

N = 40


class Odd(Dataset[Any]):
    """Samples of which one may be bad, or endless."""

    def __init__(self, bad: int = -1, endless: int = -1) -> None:
        self.bad, self.endless = bad, endless

    def __len__(self) -> int:
        return N

    def __getitem__(self, k: int) -> int:
        if k == self.bad:
            raise ValueError(f"sample {k} is odd")
        while k == self.endless:
            time.sleep(0.1)
        return k


def run(out: Path, dataset: Any, kill: bool = False, **how: Any) -> mt.Result:
    """Run on one rank; at the second batch one process may be killed, or the end asked for."""
    stop = how.pop("stop", False)
    given = {"num_workers": 2, **how}

    def train(worker: mt.Worker) -> None:
        for step, x in enumerate(worker.loader(dataset, **given)):
            (worker.model.weight.sum() * len(x)).backward()
            worker.optimizer.step()
            if step == 1 and kill:
                child = multiprocessing.active_children()[0]
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
            if step == 1 and stop:
                worker.stop()

    return mt.run(
        train, model=lambda: torch.nn.Linear(1, 1), optimizer=mpips.SGD(1e-3), mode="sync",
        out=out, quiet=True, batch_size=2, epochs=1, shuffle=False,
    )  # fmt: skip


def error_of(kind: type[Exception], out: Path, dataset: Any, **how: Any) -> str:
    """Return what a run is ended by, an error of that kind."""
    try:
        run(out, dataset, **how)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


def refused(out: Path) -> None:
    """What cannot start, one that raises, and one that is forked from the rank."""

    class Local(Odd):
        """A class that cannot be found by its name."""

    found = error_of(mpips.UserError, out / "local", Local())
    assert "did not start: " in found
    assert "can be pickled" in found
    assert "num_workers -1, expected" in error_of(mpips.UserError, out, Odd(), num_workers=-1)
    found = error_of(mpips.UserError, out, Odd(), multiprocessing_context="forks")
    assert "expected one of fork, " in found
    assert not out.exists(), "nothing was begun"
    found = error_of(ValueError, out / "bad", Odd(bad=30))
    assert "sample 30 is odd" in found
    assert ", in __getitem__" in found, "its traceback"
    result = run(out / "forked", Local(), multiprocessing_context="fork")
    assert result.summary["samples"] == N


def lost(out: Path) -> None:
    """One that is killed, and one that does not come to an end."""
    found = error_of(mpips.UserError, out / "killed", Odd(), kill=True)
    assert "of a loader that died" in found
    assert run(out / "stopped", Odd(endless=20), stop=True).reason == "stopped"


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"refused": refused, "lost": lost}[sys.argv[1]](Path(sys.argv[2]))
    assert not multiprocessing.active_children()
    print("told")
