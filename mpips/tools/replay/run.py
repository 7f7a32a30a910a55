"""Replay of a run: its jobs, its program, and messages."""

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.checkpoint.exchange import NPZ, PARAMS, SLOTS, write_npz
from mpips.checkpoint.files import write_durably
from mpips.checkpoint.rows import Stream
from mpips.errors import UserError, counted, write_line
from mpips.library import run as library
from mpips.library.data import Samples, dataset, info_of
from mpips.library.program import Program
from mpips.library.start import DATASET, Start
from mpips.mpi.process import cpu_name
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.problems import Problem
from mpips.problems.accumulate import Tasks
from mpips.session.training import Ended
from mpips.tools.replay.machine import Replay, batch_text
from mpips.tools.replay.parts import Setting
from mpips.tools.replay.record import Part, checkpoints_of, damages_of, read_parts, stopped_parts
from mpips.tools.replay.rounds import RoundReplay, round_text
from mpips.tools.replay.server_file import damaged
from mpips.tools.replay.worker_process import ReplayEnded, ReplayLink


class ProgramSetting(Setting):
    """Inputs of a job that a program started; see `Setting`.

    Args:
        part: Record of the job.
        program: Arguments of the program's call of `mpips.run`.

    Raises:
        UserError: If another program started the job.
    """

    def __init__(self, part: Part, program: Program) -> None:
        self._program = program
        super().__init__(part)

    def _open(self) -> None:
        name, about = self._program.name, self.part.about
        if name != self.config.problem:
            remedy = f"start the program that has recorded {self.part.folder.parent.parent}"
            raise UserError(f"a run of {name}", f"that of {self.config.problem}", remedy)
        self.info, self.dataset = info_of(DATASET, *about["samples"]), None

    def problem(self) -> Problem:
        """See `Setting.problem`."""
        return self._program.of_job(self.info, self.config)

    def loader(self, job: Job) -> None:
        """See `Setting.loader`; the loop of the program reads its own samples."""

    def work(self, job: Job, link: ReplayLink) -> None:
        """Do the work of a worker's rank, in the worker's process."""
        program = self._program
        start = ReplayStart(program, job, link)
        program.begin(start)
        worker = program.make_worker(start)
        program.train(worker)
        worker.leave()


class ReplayStart(Start):
    """Start of a program on a worker of the replay, without other ranks.

    Args:
        program: Arguments of the program's call of `mpips.run`.
        job: Job of the worker's rank.
        link: Link to the replay, which requests gradients.
    """

    def __init__(self, program: Program, job: Job, link: ReplayLink) -> None:
        self.program, self._to_replay = program, link
        self.job, self.config, self.out = job, job.config, job.out
        self.ranks, self.trains, self._link = job.cluster, True, None
        self.board = contextlib.ExitStack()  # the end of the process closes what is open
        job.sets_rate = program.sets_rate

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse calls that need other ranks.

        Raises:
            UserError: Always.
        """
        got = "a call that waits for other workers in the loop"
        raise UserError(got, "none in a program that is replayed", f"there are no {name} here")

    def tasks(
        self, make: Callable[[], Samples] | None, batch_size: int | None, epochs: int | None
    ) -> Tasks[Ended]:
        """Yield the tasks of the replay; batch size and epochs are those of the run.

        Raises:
            UserError: If the number of samples differs from the run.
        """
        assert make is not None, "this is a worker"
        job, info = self.job, self.job.info
        job.dataset = dataset(DATASET, make(), self.program.held_out())
        here = job.dataset.info
        if (here.n_train, here.n_test) != (info.n_train, info.n_test):
            got = f"{here.n_train} samples, and {here.n_test} held out"
            raise UserError(got, f"{info.n_train} and {info.n_test}, as in the run")
        yield from self._to_replay.tasks(job)
        raise AssertionError("the replay sends batches until it ends")


def replay_program(
    run: Path, words: Sequence[str], until: int | None = None, out: Path | None = None
) -> None:
    """Start a program, replay the run in place of its call of `mpips.run`, and print messages.

    Args:
        run: Folder of the run.
        words: File of the program, and its arguments.
        until: See `replay`.
        out: See `replay`.

    Raises:
        UserError: As `replay`. Also if the file does not exist, or the program never calls
            `mpips.run`.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked processes have no pool of threads
    file = Path(words[0])
    if not file.is_file():
        raise UserError(f"program {file}", "the file of the program, with its words behind it")

    def replayed(program: Program) -> NoReturn:
        if "jax" in sys.modules:
            remedy = "JAX has threads, which a forked process is without"
            raise UserError("a replay of a program of JAX", "one of NumPy or PyTorch", remedy)
        for line in replay(run, until, out, lambda part: ProgramSetting(part, program)):
            write_line(line)
        raise ReplayEnded

    argv, path = sys.argv, sys.path[:]
    sys.argv, library.instead = [str(file), *words[1:]], replayed
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    except ReplayEnded:
        return
    finally:
        sys.argv, sys.path[:], library.instead = argv, path, None
    raise UserError(f"{file} that came to no mpips.run", "the program of the run")


def replay(
    run: Path,
    until: int | None = None,
    out: Path | None = None,
    make: Callable[[Part], Setting] = Setting,
) -> Iterator[str]:
    """Replay a run, or one of its jobs up to an update, and yield messages.

    Args:
        run: Folder of the run.
        until: The update; None to replay all jobs to their ends.
        out: File for parameters and slots at the end, or None.
        make: Function that returns the inputs of a job.

    Raises:
        UserError: If there is no record, or data, model or a checkpoint is missing. With exit
            code 1, if the record is damaged or a value differs.
    """
    if out is not None and out.suffix != NPZ:
        raise UserError(f"{out}", f"a name that ends in {NPZ}")
    if out is not None and not out.parent.is_dir():
        raise UserError(f"{out.parent} is no folder", "one for the file", "create it first")
    parts = read_parts(run)
    if make is Setting and any(part.config.dataset == DATASET for part in parts):
        remedy = f"give its file and words behind the run: python -m mpips replay {run} PROGRAM ..."
        raise UserError(f"{run} of a program", "the program as well", remedy)
    saved = checkpoints_of(run, parts)
    yield from saved.complaints
    stopped = stopped_parts(parts, saved)
    damages = damages_of(run, parts, saved, stopped)
    if until is None:
        for error in damages.values():
            raise error
    yield from (f"warning: {error}" for error in damages.values())
    ends: dict[int, int] = {}
    for part in parts if until is None else [_part_with(parts, until, {*damages, *stopped})]:
        yield from warnings(part)
        with contextlib.closing(make(part)) as setting:
            own = saved.of(part, part.number in stopped)
            replayed = (RoundReplay if part.config.in_rounds else Replay)(setting, own)
            state = replayed.run(until)
            ends[part.number] = min(store.version for store in replayed.servers.values())
            if until is not None:
                yield from update_texts(part, until, list(replayed.servers))
            else:
                yield summary(part, replayed, own)
            if out is not None and (until is not None or part is parts[-1]):
                save(out, replayed, state)
                without = ", without the rows of tables" if tables_of(replayed.job) else ""
                yield f"parameters and slots are in {out}{without}"
    for number in sorted(stopped) if until is None else ():
        raise _stopped(run, number, ends[number])


def _stopped(run: Path, number: int, last: int) -> UserError:
    """Return the error for an undamaged record that ends before its job."""
    got = f"{run}: the record of job {number} ends at update {last}"
    remedy = f"recording stopped, as on a full disk; use --until {last}"
    return damaged(got, "the end of the job", remedy)


def _part_with(parts: Sequence[Part], until: int, unsure: Collection[int]) -> Part:
    """Return the last job that made an update; a killed run repeats updates in its next job.

    Args:
        parts: Records of the jobs.
        until: The update.
        unsure: Numbers of jobs that may have made more updates than are recorded.

    Raises:
        UserError: If no job has recorded the update, or a later job may have made it too.
    """
    made = [part for part in parts if part.base < until <= part.base + part.updates]
    if not made:
        ranges = ", ".join(f"{p.base + 1} to {p.base + p.updates}" for p in parts if p.updates)
        raise UserError(f"--until {until}", f"an update that is recorded: {ranges or 'none is'}")
    bases = {part.number: part.base for part in parts}
    for number in sorted(unsure):
        if number > made[-1].number and bases.get(number, 0) < until:
            got = f"--until {until}: the record of job {number} ends before it or is damaged"
            remedy = f"job {made[-1].number} made that update, too, before job {number}"
            raise damaged(got, "the record of the last job that made that update", remedy)
    return made[-1]


def warnings(part: Part) -> Iterator[str]:
    """Yield a warning if the processor or NumPy differs from the run, which may change bits."""
    pairs = (
        ("processor", part.about["world"]["cpu"], cpu_name()),
        ("NumPy", part.about["numpy"], np.__version__),
    )
    for what, run, now in pairs:
        if run != now:
            yield f"warning: {what} {now}, in the run {run}: the bits may differ"


def summary(part: Part, replayed: Replay, saved: Mapping[int, Checkpoint]) -> str:
    """Return the message after a replay without differences."""
    servers, workers = len(replayed.servers), len(part.about["workers"])
    updates = replayed.servers[0].version - part.base
    whole = [step for step in sorted(saved) if replayed.compared.get(step) == servers]
    steps = ", ".join(f"{step:,}" for step in whole)
    plural = "checkpoint of step" if len(whole) == 1 else "checkpoints of steps"
    what = f"equal bits in the {plural} {steps}" if whole else "no checkpoint of it is there"
    ranks = f"{counted(workers, 'worker')}, {counted(servers, 'server')}"
    text = f"job {part.number}: {updates:,} updates from step {part.base:,} on, {ranks}: {what}"
    lost = max(replayed.left.values())
    if not lost:
        return text
    pushes = "the last push is" if lost == 1 else f"the last {lost} pushes are"
    why = "recording stopped" if part.stopped else "the job was killed"
    return f"{text}; {pushes} left out: {why} before the pushes they depend on were written"


def update_texts(part: Part, until: int, servers: Sequence[int]) -> Iterator[str]:
    """Yield a message about the push that made update `until` of each server."""
    if part.config.in_rounds:
        yield round_text(part, until)
        return
    for k in servers:
        records = part.records[k]
        record = records[until - part.base - 1]
        worker, stale = int(record["worker"]), int(record["stale"])
        seq = int((records["worker"][: until - part.base] == worker).sum())
        first = part.records[servers[0]]
        own = first[first["worker"] == worker]
        epoch, begin, count = (int(own[name][seq - 1]) for name in ("epoch", "begin", "samples"))
        text = f"update {until} of server {k}: push {seq} of worker {worker}, staleness {stale}"
        batch, loss = batch_text((epoch, begin, begin + count)), float(own["loss"][seq - 1])
        yield f"{text}, {batch}, loss {loss:.6g}"


def save(out: Path, replayed: Replay, state: Mapping[int, Sequence[np.ndarray]]) -> None:
    """Write parameters and slots to a file, in the format of an exported checkpoint.

    Raises:
        UserError: If the file cannot be written.
    """
    layout, names = replayed.job.layout, ("", *replayed.job.slots)
    whole = [np.zeros(layout.size, replayed.job.dtype) for _ in names]
    for k, arrays in state.items():
        for vector, array in zip(whole, arrays, strict=True):
            vector[replayed.servers[k].shard.range] = array

    named = (
        (f"{SLOTS}{slot}/{name}" if slot else f"{PARAMS}{name}", Stream.of(array))
        for slot, vector in zip(names, whole, strict=True)
        for name, array in layout.views(vector).items()
    )
    write_durably(out, lambda path: write_npz(path, named))
