"""The supervisor of a job on this host: starts it, watches it, ends it, and starts it again."""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpips.cluster import segments, signals
from mpips.config.command_line import load
from mpips.errors import UserError
from mpips.launch.mpirun import Running, survivors_launcher
from mpips.launch.verdict import Attempt, Verdict, verdict
from mpips.launch.watch import Run, Signs, Watch

POLL_S = 0.1
LOOK_S = 2.0  # at most, between two looks at a job
STACKS_S = 3.0
AT_ONCE = "ended by a second SIGINT"
PAUSE_S, LONGEST_S = 1.0, 60.0  # before the first restart, doubled with each


@dataclass(frozen=True)
class Order:
    """What is to be run, and how.

    Attributes:
        ranks: How many.
        words: Options of mpips.train, or a program or ``-m MODULE`` with its own.
        launcher: The launcher with its options; empty for mpirun on this host.
        restarts: How often the job may be started again.
        timeout_s: How long it may do nothing.
    """

    ranks: int
    words: Sequence[str]
    launcher: Sequence[str] = ()
    restarts: int = 5
    timeout_s: float = 300.0

    @property
    def is_program(self) -> bool:
        """Whether the words name a program of the user's."""
        return bool(self.words) and (self.words[0] == "-m" or self.words[0].endswith(".py"))


def supervise(order: Order) -> int:
    """Run a job until its run is complete, or would get no further; returns the exit code.

    The folder by which ranks tell what they do is this process's own on one host, and in the
    current folder, which hosts share, where a launcher is given.

    Raises:
        UserError: If there is no launcher, or that folder cannot be made.
    """
    try:
        folder = tempfile.TemporaryDirectory(
            prefix="mpips-launch-",
            dir=Path.cwd() if order.launcher else None,
            ignore_cleanup_errors=True,
        )
    except OSError as problem:
        got = f"{problem.filename}: {problem.strerror}"
        raise UserError(got, "a folder that can be written", "start it elsewhere") from None
    with folder, signals.noted():
        return Supervisor(order, Path(folder.name)).run()


class Supervisor:
    """Runs a job, see `supervise`.

    Args:
        order: What is to be run.
        folder: Of this process.
    """

    def __init__(self, order: Order, folder: Path) -> None:
        self._order, self._folder = order, folder
        self._launcher = order.launcher
        self._survives = not order.launcher and _goes_on(order) and bool(survivors_launcher())
        if self._survives:
            self._launcher = survivors_launcher()
        self._attempts: list[Attempt] = []
        self._run: Run | None = None  # the last that has begun
        self._handed_on = False

    def run(self) -> int:
        """Start the job, again and again; returns the exit code."""
        found: Verdict | None = None
        while found is None:
            self._attempts.append(self._attempt())
            asked = signals.received() or ""
            found = verdict(self._attempts, self._order.restarts, asked)
            if found is None:
                found = self._pause()
        if found.why:
            _say(found.why)
        if found.code and len(self._attempts) > 1:
            for number, attempt in enumerate(self._attempts, 1):
                _say(f"attempt {number}: {attempt}")
        return found.code

    def _pause(self) -> Verdict | None:
        """Say what comes next, and wait; returns the verdict if the end is asked for meanwhile."""
        last, number = self._attempts[-1], len(self._attempts)
        pause_s = min(LONGEST_S, PAUSE_S * 2 ** (number - 1))
        onward = f"from step {last.step}" if last.step >= 0 else "from the beginning"
        _say(f"attempt {number}: {last}")
        _say(f"starting again {onward} in {pause_s:g} s")
        end = time.monotonic() + pause_s
        while not signals.received():
            if time.monotonic() >= end:
                return None
            time.sleep(POLL_S)
        return Verdict(signals.EXIT_SAVED, f"{signals.received()} before a restart: run it again")

    def _attempt(self) -> Attempt:
        """Start the job, and wait for its end."""
        order, begin = self._order, time.monotonic()
        signs = Signs(self._folder / f"{len(self._attempts) + 1}")
        self._handed_on = False
        with contextlib.closing(signs):
            args = ["-m", "mpips.launch.rank", str(signs.folder), *self._words()]
            with Running(order.ranks, args, Path.cwd(), launcher=self._launcher, shown=True) as job:
                trouble = self._watch(job, signs)
                if trouble and trouble != AT_ONCE:
                    _say(f"{trouble}: ending the job; where its ranks are:")
                    _say(signs.ask_for_stacks(job.process.pid, STACKS_S).rstrip())
                signs.read()
                job.kill(signs.alive())
            if job.process.returncode and job.left():
                time.sleep(segments.YOUNG_S)  # until it is clear that they are nobody's
            segments.clean()  # if one rank is killed, the others may be gone at once
            return self._came_to(job.process.returncode, trouble, time.monotonic() - begin, signs)

    def _words(self) -> list[str]:
        """Return what Python runs in each rank."""
        words = list(self._order.words)
        if self._order.is_program:
            return words
        if self._run is not None:
            words += ["--out", str(self._run.out), "--resume", "auto"]
        return ["-m", "mpips.train", *words]

    def _watch(self, job: Running, signs: Signs) -> str:
        """Wait until mpirun has ended, or something hangs; returns what."""
        order, now = self._order, time.monotonic()
        watch = Watch(signs, order.timeout_s, order.is_program, now, self._survives)
        every_s = min(LOOK_S, order.timeout_s / 10)
        due = now + every_s
        while job.process.poll() is None:
            time.sleep(POLL_S)
            if signals.count(signal.SIGINT) > 1:
                return AT_ONCE
            self._hand_on(job)
            if time.monotonic() >= due:
                trouble = watch.look(time.monotonic())
                if trouble:
                    return trouble
                self._end_hung(watch)
                due = time.monotonic() + every_s
        return ""

    def _end_hung(self, watch: Watch) -> None:
        """End the ranks that a run goes on without as soon as they are dead."""
        for rank in watch.hung:
            _say(f"{rank} is stopped: ending it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        watch.hung.clear()

    def _hand_on(self, job: Running) -> None:
        """Ask the ranks to save and end, once, if that is asked for.

        By SIGUSR1: Open MPI's mpirun kills its ranks soon after another one.
        """
        if signals.received() and not self._handed_on:
            self._handed_on = True
            _say(f"{signals.received()}: asking the ranks to save")
            job.process.send_signal(signals.SIGNALS[0])

    def _came_to(self, code: int, trouble: str, seconds: float, signs: Signs) -> Attempt:
        """Return what an attempt has come to."""
        if not trouble and signs.codes:
            told = [c for c in signs.codes.values() if c]
            code = told[0] if told else code
            if len(signs.codes) == self._order.ranks and not told:
                code = 0
        if not signs.runs:
            step = self._run.saved_step if self._run else -1
            return Attempt(code, seconds, trouble, step=step)
        if self._run is not None:
            self._run.close()
        self._run = run = signs.runs.pop()
        told_step, reason = run.last()
        complete = run.is_done and (code == 0 or not self._order.is_program)
        resumes = run.resumes or not self._order.is_program
        step, runs = run.saved_step, len(signs.runs) + 1
        return Attempt(code, seconds, trouble, runs, complete, reason, step, told_step, resumes)


def _goes_on(order: Order) -> bool:
    """Whether the job is of a mode that may go on when a rank dies: one without rounds."""
    if order.is_program:
        return False
    try:
        return load(order.words).mode in ("async", "ssp")
    except UserError:
        return False  # the ranks say what is wrong


def _say(text: str) -> None:
    """Print what the supervisor has to say, each line as its own."""
    for line in text.splitlines():
        print(f"mpips.launch: {line}", file=sys.stderr, flush=True)
