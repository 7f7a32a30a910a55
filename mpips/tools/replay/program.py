"""A replay of a program of `mpips.run`: the program is started again, and its run is made again."""

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from mpips.errors import UserError, write_line
from mpips.library import run as library
from mpips.library.data import Samples, dataset, info_of
from mpips.library.program import Program
from mpips.library.start import DATASET, Start
from mpips.planning.job import Job
from mpips.problems import Problem
from mpips.problems.accumulate import Tasks
from mpips.session.training import Ended
from mpips.tools.replay.parts import Setting
from mpips.tools.replay.record import Part
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


def run_program(
    words: Sequence[str], replay: Callable[[Callable[[Part], Setting]], Iterator[str]]
) -> None:
    """Start a program, and replay where it comes to its run.

    Args:
        words: Its file, and what its command line has behind that.
        replay: Yields what is to be told, of jobs that are set up by what it is given.

    Raises:
        UserError: If there is no such file, or the program comes to no run.
        Over: In a copy for a worker.
    """
    file = Path(words[0])
    if not file.is_file():
        raise UserError(f"program {file}", "the file of the program, with its words behind it")

    def replayed(program: Program) -> NoReturn:
        if "jax" in sys.modules:
            remedy = "JAX has threads, which a copy of its process is without"
            raise UserError("a replay of a program of JAX", "one of NumPy or PyTorch", remedy)
        for line in replay(lambda part: ProgramSetting(part, program)):
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
