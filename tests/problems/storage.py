"""Runs whose disk is full, by turns or from some moment on."""

import contextlib
import errno
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar

from countdown import Stopping
from counting import Counting, MeanCounting, SlowCounting
from faulty import is_last

from mpips import checkpoint
from mpips.checkpoint import files, index, shards
from mpips.checkpoint.files import explained
from mpips.config import Config
from mpips.datasets import Batch, DataInfo
from mpips.problems.base import Arrays
from mpips.problems.mlp import MLP

ALWAYS = range(1, 10**9)
WRITING: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (files.begin_step, shards.write_shard, shards.write_worker, index.commit)
}


def failing(call: Callable[..., Any], calls: Collection[int], number: int) -> Callable[..., Any]:
    """Return `call` with a full disk in some of its calls, of those for owner `number` if any."""
    count = -1

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if call is WRITING["write_shard"] and args[1] != number:
            return call(*args, **kwargs)
        count += 1
        with explained("write", Path(args[0])):
            if count in calls:
                raise OSError(errno.ENOSPC, "No space left on device")
        return call(*args, **kwargs)

    return called


class Fails:
    """Fails to write now and then, each rank for itself, in a run that is not resumed."""

    calls: ClassVar[dict[str, Collection[int]]] = {
        "begin_step": {1}, "write_shard": {1}, "write_worker": {2}, "commit": {2},
    }  # fmt: skip

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)  # type: ignore[call-arg]
        fresh = not (Path(config.out) / "metrics.jsonl").exists()
        for name, original in WRITING.items():
            calls = self.calls.get(name, ()) if fresh else ()
            setattr(checkpoint, name, failing(original, calls, 1))


class Sometimes(Fails, SlowCounting):
    """Counts samples."""


class SometimesMean(Fails, MeanCounting):
    """Counts samples in rounds."""


class SometimesMLP(Fails, MLP):
    """Learns, also by replicas of its workers."""


class NeverMean(Fails, MeanCounting):
    """Has one server write the first checkpoint only, in rounds."""

    calls: ClassVar = {"write_shard": ALWAYS}


class Never(Fails, Counting):
    """The same asynchronously."""

    calls = NeverMean.calls


class NeverStopped(Stopping, Never):
    """The same, and asks to stop."""


class Moved(Fails, SlowCounting):
    """The last worker does something to the run's folder when it has a checkpoint.

    Until that is done all workers wait in their gradients, in each longer than in the one before:
    so a checkpoint is written, and the last worker has a batch, however busy the machine is.
    """

    calls: ClassVar = {}

    def __init__(self, data: DataInfo, config: Config) -> None:
        super().__init__(data, config)
        self.out, self.last = Path(config.out), is_last()
        self.done, self.pause = self.out.with_name(f"{self.out.name}.moved"), 1e-3
        self.waits = not config.resume

    def loss_and_grad(self, params: Arrays, batch: Batch, out: Arrays) -> float:
        end, self.pause = time.monotonic() + self.pause, min(1.3 * self.pause, 5.0)
        while self.waits and not self.done.exists():
            if self.last and list(self.out.glob("checkpoints/*/index.h5")):
                self.move()
                self.done.touch()
            elif time.monotonic() > end:
                break
            time.sleep(1e-3)
        return super().loss_and_grad(params, batch, out)

    def move(self) -> None:
        """Rename it."""
        self.out.rename(self.out.with_name(f"{self.out.name}-2"))


class Removed(Moved):
    """Removes it."""

    def move(self) -> None:
        """Remove it, though somebody may be writing; not the one that is made in its place."""
        number = self.out.stat().st_ino
        with contextlib.suppress(FileNotFoundError):
            while self.out.stat().st_ino == number:
                shutil.rmtree(self.out, ignore_errors=True)
