"""Server of stores: it applies pushes, and saves and loads checkpoints."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from mpips import checkpoint
from mpips.checkpoint.files import folder_step
from mpips.checkpoint.reader import check_checkpoint
from mpips.checkpoint.run_folder import CHECKPOINTS
from mpips.config.jobfile import to_toml
from mpips.errors import UserError
from mpips.kernels.vectors import all_finite
from mpips.mpi.collectives import begin_barrier, gathering
from mpips.mpi.start import Request
from mpips.mpi.waiting import duties, take_turns
from mpips.planning.job import Job, read_slots
from mpips.ps.assemble import ServerHalf
from mpips.ps.local_pushes import local_pushes

TURN_S = 50e-6  # time of a turn in which a server applies pushes
ALONE_S = 1e-3  # the same, if the process does nothing else
T = TypeVar("T")
Steps: TypeAlias = Generator[Request, None, T]  # yields requests to wait for

_serving: list["Serving"] = []  # servers of this process, in the order in which they were opened


def serve() -> bool:
    """Take a turn of every store of this process. Returns whether any store had work.

    A store in whose turn this is called is skipped. Blocks: no.
    """
    busy = [serving.take_turn() for serving in _serving]
    return any(busy)


class Serving:
    """Server of a store: it applies pushes, and saves and loads once all workers have asked.

    A server answers a save or a load after it has applied every earlier push. Workers wait for the
    answer, so servers may block each other while they access files. But a turn waits for no other
    server: a later turn continues when the others have reached the same point.
    """

    def __init__(self, job: Job, half: ServerHalf) -> None:
        self._job, self._cluster, self._half, self.server = job, job.cluster, half, half.server
        self._final: dict[int, int] = {}
        self._asked: dict[int, tuple[int, str, str]] = {}  # pushes, call and path, by worker
        self._answer: Steps[None] | None = None  # the answer in progress, and its next request
        self._awaited: Request | None = None
        self._in_turn = self._at_end = False
        self._local = local_pushes(job.cluster, half.design, half.server, half.receiver)
        self._nothing_assigned = job.allocator().state()
        job.fill(self.server.params, self.server.slots, job.shard)
        self.server.start_from(0)
        self._base = 0  # updates of the loaded checkpoint, less the pushes applied here before it
        # On the coordinator, the step that was saved or loaded last, by folder of checkpoints.
        self._own: dict[Path, int] = {}
        _serving.append(self)
        if serve not in duties:
            duties.append(serve)
        half.open(self._wait)

    def _wait(self, request: Request) -> None:
        take_turns(serve, request.Test, self._cluster.ranks_per_core)

    def serve_to_the_end(self) -> None:
        """Serve until every worker has closed the store. Collective: yes."""
        self._at_end = True
        done = lambda: self._answer is None and self._all_applied(self._final)  # noqa: E731
        take_turns(serve, done, self._cluster.ranks_per_core)
        self._wait(begin_barrier(self._cluster.comm))
        _serving.remove(self)
        self._half.close()

    def take_turn(self) -> bool:
        """Do pending work, unless this call is nested in a turn. Returns whether there was any."""
        if self._in_turn:
            return False
        self._in_turn = True
        try:
            return self._turn()
        finally:
            self._in_turn = False

    def _turn(self) -> bool:
        busy = self._apply_some()
        self.server.serve_reads()
        messages = self._cluster.poll()
        for source, kind, payload in messages:
            self._handle(source, kind, payload)
        waits = self._answer is None and bool(self._asked)
        if waits and self._all_applied({r: seq for r, (seq, *_) in self._asked.items()}):
            self._answer = self._answering()
        return self._go_on() or busy or bool(messages)

    def _apply_some(self) -> bool:
        """Apply pending pushes by the compiled loop, or else one push. Returns whether any was.

        It waits briefly for the next push only if this process has no other work.
        """
        local, server = self._local, self.server
        if local is not None and server.is_plain:
            alone = self._at_end and len(_serving) == 1
            busy = local.apply(None, ALONE_S if alone else TURN_S, waits=alone) > 0
            if not local.stuck:
                return busy
        push = self._half.receiver.take()
        if push is not None:
            server.apply(push)
        return push is not None

    def _go_on(self) -> bool:
        """Continue an answer as far as the other servers have come. Returns whether it moved."""
        if self._answer is None or (self._awaited is not None and not self._awaited.Test()):
            return False
        self._awaited = next(self._answer, None)
        if self._awaited is None:
            self._answer = None
        return True

    def _handle(self, source: int, kind: str, payload: Any) -> None:
        if kind == "read":
            self.server.want_read(source, payload[1:])
        elif kind == "fin":
            self._final[source] = payload
        else:
            assert kind in ("save", "load"), f"unknown message {kind!r} to a server"
            seq, path = payload
            self._asked[source] = seq, kind, path

    def _all_applied(self, pushed: Mapping[int, int]) -> bool:
        """Return whether the server has applied so many pushes of every worker.

        Args:
            pushed: Pushes of each worker, by rank; False if a worker is missing.
        """
        ranks = self._cluster.roles.workers
        return len(pushed) == len(ranks) and self.server.has_applied([pushed[r] for r in ranks])

    def _answering(self) -> Steps[None]:
        asked, self._asked = self._asked, {}
        pushed = sum(seq for seq, *_ in asked.values())
        calls = sorted({(what, path) for _, what, path in asked.values()})
        answer: tuple[str, Any]
        try:
            if calls[1:]:
                both = " and ".join(f"{what} {path!r}" for what, path in calls)
                raise _Failed(str(UserError(f"{both} at once", "the same call on every worker")))
            ((what, path),) = calls
            act = self._save if what == "save" else self._load
            answer = "done", (yield from act(Path(path), pushed))
        except _Failed as failed:
            answer = "failed", str(failed)
        if self._cluster.is_coordinator:
            for rank in self._cluster.roles.workers:
                self._cluster.send(rank, *answer)

    def _save(self, path: Path, pushed: int) -> Steps[int]:
        """Write a checkpoint. Collective: over the servers."""
        step, shard = self._base + pushed, self._job.shard

        def begin() -> Path:
            path.mkdir(parents=True, exist_ok=True)
            self._check_history(path / CHECKPOINTS)
            return checkpoint.begin_step(path / CHECKPOINTS, step)

        folder = (yield from self._agree(begin if self._cluster.is_coordinator else None))[0]
        slots = dict(zip(self._job.slots, self.server.slots, strict=True))
        number = self._cluster.roles.servers.index(self._cluster.rank)

        def write() -> checkpoint.ShardRecord:
            if not all_finite(params := self.server.params):
                raise UserError("parameters with NaN or infinity", "finite ones")
            return checkpoint.write_shard(folder, number, shard, step, params, slots)

        records = yield from self._agree(write)

        def commit() -> None:
            c, layout = self._job.config, self._job.layout
            state = self._job.state(step, self._nothing_assigned, 0)
            about = layout, np.dtype(c.dtype), self._job.slots, tuple(records), to_toml(c), state
            checkpoint.commit(folder, checkpoint.Contents(step, *about), c.keep)
            self._own[folder.parent.resolve()] = step

        yield from self._agree(commit if self._cluster.is_coordinator else None)
        return step

    def _check_history(self, folder: Path) -> None:
        """Check that the newest checkpoint in a folder, which a load would take, is this store's.

        Raises:
            UserError: If this store did not save or load it last.
        """
        listed, own = checkpoint.list_checkpoints(folder), self._own.get(folder.resolve())
        if not listed or folder_step(listed[-1]) == own:
            return
        found, _ = checkpoint.newest_whole(folder)
        if found is not None and found.step != own:
            got = f"{folder} holds step {found.step}, which this store neither saved nor loaded"
            raise UserError(got, "a folder of its own", "load it first, or save into another one")

    def _load(self, path: Path, pushed: int) -> Steps[int]:
        """Read a checkpoint completely, then start from it. Collective: over the servers."""
        find = partial(_newest, path, self._job)
        folder = (yield from self._agree(find if self._cluster.is_coordinator else None))[0]
        server, shard = self.server, self._job.shard
        live = (server.params, *server.slots)
        arrays, loaded = tuple(map(np.zeros_like, live)), list[Job]()

        def read() -> int:
            saved = checkpoint.open_checkpoint(folder)
            saved.read_params(shard.begin, shard.end, out=arrays[0])
            self._job.rule.init(arrays[0], arrays[1:])
            read_slots(saved, self._job.slots, arrays[1:], shard)
            loaded.append(replace(self._job, checkpoint=saved))
            return saved.step

        step = (yield from self._agree(read))[0]
        for old, new in zip(live, arrays, strict=True):
            np.copyto(old, new)
        self._continue(loaded[0])
        self._base = step - pushed
        self._own = {folder.resolve().parent: step}
        server.start_from(step)
        yield from self._agree(lambda: None)  # no worker may be answered before all shards are set
        return step

    def _continue(self, job: Job) -> None:
        """Count updates from those in the loaded slots, which may be another number than the step.

        Args:
            job: The job as a run that continues from the loaded checkpoint.
        """
        self._job, dense = job, self.server.dense
        dense.rule, dense.leaving = job.rule, job.leaving
        dense.cut()
        design = replace(self._half.design, rule=job.rule)
        self._local = local_pushes(job.cluster, design, self.server, self._half.receiver)

    def _agree(self, make: Callable[[], T] | None) -> Steps[list[T]]:
        """Call `make` on each server, and return the results in the order of servers.

        Args:
            make: Makes this server's result; None for the result None.

        Raises:
            _Failed: On every server, if `make` raises on one.
        """
        error: str | None = None
        result: Any = None
        try:
            result = make() if make is not None else None
        except (UserError, OSError) as problem:
            error = str(problem)
        parts = yield from gathering(self._half.servers, (result, error))
        errors = [text for _, text in parts if text is not None]
        if errors:
            raise _Failed(errors[0])
        return [value for value, _ in parts]


class _Failed(Exception):
    """Raised on all servers alike if a save or a load failed."""


def _newest(path: Path, job: Job) -> Path:
    """Return the folder of the newest complete checkpoint in a run's folder, once it is checked."""
    found, _ = checkpoint.need_whole(path)
    check_checkpoint(found, job.layout, job.config.dtype)
    return Path(found.path)
