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
from mpips.tools.replay.pushes import PushReplay
from mpips.tools.replay.record import Part, checkpoints_of, damages_of, read_parts, stopped_parts
from mpips.tools.replay.rounds import RoundReplay, told_round
from mpips.tools.replay.server_file import damaged
from mpips.tools.replay.worker_process import Asked, Over


class ProgramSetting(Setting):
    """What all ranks of a recorded program had; see `Setting`.

    Args:
        part: The job.
        program: What the program gives its run.

    Raises:
        UserError: If the job was of another program.
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
        """See `Setting.loader`: the samples come with the loop."""

    def work(self, job: Job, asked: Asked) -> None:
        """Do what a worker's rank did, in a process of its own."""
        program = self._program
        start = Again(program, job, asked)
        program.begin(start)
        worker = program.make_worker(start)
        program.train(worker)
        worker.leave()


class Again(Start):
    """A program's run on a worker, as a replay has it: there are no other ranks.

    Args:
        program: What the program gives its run.
        job: Of the worker's rank.
        asked: Says what is to be computed.
    """

    def __init__(self, program: Program, job: Job, asked: Asked) -> None:
        self.program, self._asked = program, asked
        self.job, self.config, self.out = job, job.config, job.out
        self.ranks, self.trains, self._link = job.cluster, True, None
        job.sets_rate = program.sets_rate

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what a program asks of the other ranks.

        Raises:
            UserError: Always.
        """
        got = "a call that waits for other workers in the loop"
        raise UserError(got, "none in a program that is replayed", f"there are no {name} here")

    def tasks(
        self, make: Callable[[], Samples] | None, batch_size: int | None, epochs: int | None
    ) -> Tasks[Ended]:
        """Yield what is to be computed; batches and epochs are as in the run.

        Raises:
            UserError: If there are other samples than in the run.
        """
        assert make is not None, "this is a worker"
        job, info = self.job, self.job.info
        found = dataset(DATASET, make(), self.program.held_out())
        if (found.info.n_train, found.info.n_test) != (info.n_train, info.n_test):
            got = f"{found.info.n_train} samples, and {found.info.n_test} held out"
            raise UserError(got, f"{info.n_train} and {info.n_test}, as in the run")
        job.dataset = found
        yield from self._asked.tasks(job)
        raise AssertionError("batches come until the replay is over")


def replay_program(
    run: Path, words: Sequence[str], until: int | None = None, out: Path | None = None
) -> None:
    """Start the program of a run, and replay the run in place of another; prints what is told.

    Args:
        run: The run's folder.
        words: The program's file, and its words.
        until: See `replay`.
        out: Likewise.

    Raises:
        UserError: See `replay`; if there is no such file, or the program comes to no run.
        Over: In processes of workers.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of a pool of threads copies have nothing
    file = Path(words[0])
    if not file.is_file():
        raise UserError(f"program {file}", "the file of the program, with its words behind it")

    def replayed(program: Program) -> NoReturn:
        if "jax" in sys.modules:
            remedy = "JAX has threads, which a copy of its process is without"
            raise UserError("a replay of a program of JAX", "one of NumPy or PyTorch", remedy)
        for line in replay(run, until, out, lambda part: ProgramSetting(part, program)):
            write_line(line)
        raise Over(0, copied=False)

    argv, path = sys.argv, sys.path[:]
    sys.argv, library.instead = [str(file), *words[1:]], replayed
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    except Over as over:
        if over.copied:
            raise
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
    """Replay a run, or one of its jobs up to an update; yields what is to be told.

    Args:
        run: Its folder.
        until: The update, or None for all.
        out: Where parameters and slots at the end go, if anywhere.
        make: Makes what all ranks of a job had.

    Raises:
        UserError: If there is no record, something that it needs is missing, or, with exit code 1,
            the record is damaged or something differs.
    """
    if out is not None and out.suffix != NPZ:
        raise UserError(f"{out}", f"a name that ends in {NPZ}")
    parts = read_parts(run)
    if make is Setting and any(part.of_program for part in parts):
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
            made = (RoundReplay if part.in_rounds else PushReplay)(setting, own)
            found = made.run(until)
            ends[part.number] = min(store.version for store in made.servers.values())
            if until is not None:
                yield from told(part, until, list(made.servers))
            else:
                yield summary(part, made, own)
            if out is not None and part in (parts[-1], *[part] * (until is not None)):
                save(out, made, found)
                without = ", without the rows of tables" if tables_of(made.job) else ""
                yield f"parameters and slots are in {out}{without}"
    for number in sorted(stopped) if until is None else ():
        raise _stopped(run, number, ends[number])


def _stopped(run: Path, number: int, last: int) -> UserError:
    """Return the error for a record that is sound and ends before its job."""
    got = f"{run}: the record of job {number} ends at update {last}"
    remedy = f"recording stopped, as on a full disk; use --until {last}"
    return damaged(got, "the end of the job", remedy)


def _part_with(parts: Sequence[Part], until: int, unsure: Collection[int]) -> Part:
    """Return the last job that has made an update; a run that was killed goes back.

    Args:
        parts: The jobs.
        until: The update.
        unsure: The numbers of jobs that may have made more updates than are recorded.
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
    """Yield what is known to be other than in the run, and may make other bits."""
    pairs = (
        ("processor", part.about["world"]["cpu"], cpu_name()),
        ("NumPy", part.about["numpy"], np.__version__),
    )
    for what, run, now in pairs:
        if run != now:
            yield f"warning: {what} {now}, in the run {run}: the bits may differ"


def summary(part: Part, made: Replay, saved: Mapping[int, Checkpoint]) -> str:
    """Return what has come of a replay that agrees."""
    servers, workers = len(made.servers), len(part.about["workers"])
    updates = made.servers[0].version - part.base
    whole = [step for step in sorted(saved) if made.compared.get(step) == servers]
    steps = ", ".join(f"{step:,}" for step in whole)
    plural = "checkpoint of step" if len(whole) == 1 else "checkpoints of steps"
    what = f"equal bits in the {plural} {steps}" if whole else "no checkpoint of it is there"
    who = f"{counted(workers, 'worker')}, {counted(servers, 'server')}"
    text = f"job {part.number}: {updates:,} updates from step {part.base:,} on, {who}: {what}"
    lost = max(made.left.values())
    if not lost:
        return text
    pushes = "the last push is" if lost == 1 else f"the last {lost} pushes are"
    how = "recording stopped" if part.stopped else "the job was killed"
    return f"{text}; {pushes} left out: {how} before the pushes they depend on were written"


def told(part: Part, until: int, servers: Sequence[int]) -> Iterator[str]:
    """Yield which push the update `until` of each server was."""
    if part.in_rounds:
        yield told_round(part, until)
        return
    for k in servers:
        records = part.records[k]
        if until - part.base > len(records):
            continue
        record = records[until - part.base - 1]
        worker, stale = int(record["worker"]), int(record["stale"])
        seq = int((records["worker"][: until - part.base] == worker).sum())
        which = part.records[servers[0]]
        mine = which[which["worker"] == worker]
        text = f"update {until} of server {k}: push {seq} of worker {worker}, staleness {stale}"
        if seq <= len(mine):
            begin, more = int(mine[seq - 1]["begin"]), int(mine[seq - 1]["samples"])
            batch = int(mine[seq - 1]["epoch"]), begin, begin + more
            text += f", {batch_text(batch)}, loss {float(mine[seq - 1]['loss']):.6g}"
        yield text


def save(out: Path, made: Replay, found: Mapping[int, Sequence[np.ndarray]]) -> None:
    """Write parameters and slots, as an exported checkpoint has them.

    Raises:
        UserError: If the file cannot be written.
    """
    layout, names = made.job.layout, ("", *made.job.slots)
    whole = [np.zeros(layout.size, made.job.dtype) for _ in names]
    for k, arrays in found.items():
        for vector, array in zip(whole, arrays, strict=True):
            vector[made.servers[k].shard.range] = array

    named = (
        (f"{SLOTS}{slot}/{name}" if slot else f"{PARAMS}{name}", Stream.of(array))
        for slot, vector in zip(names, whole, strict=True)
        for name, array in layout.views(vector).items()
    )
    write_durably(out, lambda path: write_npz(path, named))
