"""Supervisor of a job: start, watch, end, and restart."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpips.checkpoint.run_folder import is_claimed
from mpips.config.command_line import given_values
from mpips.errors import Exit, UserError, write_line
from mpips.launch import mpirun, slurm, verdict
from mpips.launch.folders import OwnFolder, remove_left
from mpips.launch.heartbeat import Terms
from mpips.launch.hosts import is_srun, launcher_words
from mpips.launch.mpirun import SURVIVING, Running, default_launcher
from mpips.launch.order import Order
from mpips.launch.placement import Placement, changed_options, words_of
from mpips.launch.ranks import ranks_table
from mpips.launch.remote_execution import RemoteExecution
from mpips.launch.returned import Returned
from mpips.launch.verdict import Attempt, Verdict
from mpips.launch.watch import Heartbeats, Run, Watch, saved_step
from mpips.mpi import segments, signals
from mpips.mpi.process import send_signal

POLL_S = 0.1
LOOK_S = 2.0  # at most, between two looks at a job
STACKS_S = 3.0
PREFIX = "mpips-launch-"  # of the folder by which ranks tell what they do
AT_ONCE = "ended by a second SIGINT"
PAUSE_S, LONGEST_S = 1.0, 60.0  # before a restart, doubled with each that made no progress
ASK_AGAIN_S, HOSTS_S = 5.0, 300.0  # hosts, where there are too few, and how long
UNWATCHED_S = 3600.0  # of a job that ends itself when it hangs, as far as its ranks can see it


def supervise(order: Order) -> int:
    """Run a job until its run is complete, or would get no further; returns the exit code.

    The folder by which ranks tell what they do is this process's own on one host, and in the
    current folder, which hosts share, where hosts or a launcher are given.

    Raises:
        UserError: If there is no launcher, too few hosts answer, or that folder cannot be made.
    """
    parent = Path.cwd() if order.is_shared else None
    remove_left(parent)
    try:
        folder = OwnFolder(PREFIX, parent)
    except OSError as problem:
        got = f"{problem.filename}: {problem.strerror}"
        raise UserError(got, "a folder that can be written", "start it elsewhere") from None
    with folder, signals.noted(), contextlib.ExitStack() as stack:
        place = None
        if order.hosts:
            reach = RemoteExecution(order.remote, order.slurm, Path(folder.name), order.hosts)
            stack.enter_context(contextlib.closing(reach))
            known = order.hosts, order.ranks, order.least
            place = Placement(*known, reach, order.again, order.grows)
        return Supervisor(order, Path(folder.name), place).run()


def alone(order: Order) -> str:
    """Return why MPI is not to let ranks go on where others die; empty if it is, if it can."""
    launcher = order.launcher
    if launcher and not order.hosts:
        return "with --mpirun a death ends all ranks"
    if is_srun(*launcher[:1]):
        return "srun ends all ranks"
    if not mpirun.is_open_mpi(*launcher[:1]):
        return "this MPI ends all ranks"
    if not order.goes_on:
        return "it is a program without --ft" if order.is_program else "its mode needs all ranks"
    return ""


class Supervisor:
    """Runs a job, see `supervise`.

    Args:
        order: What is to be run.
        folder: Of this process.
        place: Chooses the hosts, if they are given.
    """

    def __init__(self, order: Order, folder: Path, place: Placement | None = None) -> None:
        self._order, self._folder, self._place = order, folder, place
        self._survivors = list[str]()  # the launcher of ranks that go on where others die
        self._alone = ""  # why they do not
        self._attempts: list[Attempt] = []
        self._run: Run | None = None  # the last that has begun
        self._where = ""  # the next attempt is
        self._changes: list[str] = []  # of the job's words, on fewer ranks
        self._returned = Returned(place) if place is not None else None

    def run(self) -> int:
        """Start the job, again and again; returns the exit code."""
        found = self._gather()
        if found is None:
            self._find_survivors()
            if self._order.survives and self._alone:
                _say(f"--ft has no effect: {self._alone}")
        while found is None:
            self._attempts.append(self._attempt())
            asked = signals.received() or ""
            if self._order.begins_run:
                found = verdict.verdict(self._attempts, self._order.restarts, asked)
            else:
                found = verdict.verdict_without_run(self._attempts, asked)
            if found is None:
                found = self._pause() or self._gather()
        if left := self._place.finish() if self._place is not None else "":
            _say(f"ranks may be left, and end when they see that it is over, on {left}")
        if found.why:
            _say(found.why)
        if found.code and self._attempts[1:]:
            for number, attempt in enumerate(self._attempts, 1):
                _say(f"attempt {number}: {attempt}")
        return found.code

    def _find_survivors(self) -> None:
        """Find the launcher of ranks that go on where others die, or why they do not."""
        order, place = self._order, self._place
        if why := alone(order):
            self._alone = why
            return
        words = there = [*(order.launcher or default_launcher(hosts=place is not None)), *SURVIVING]
        if place is not None:
            there = launcher_words(words, place.used, place.reach.agent)
        ranks, fabrics = (1, True) if place is None else (place.ranks, order.survives)
        self._alone = mpirun.refusal(there, ranks, fabrics)
        self._survivors = [] if self._alone else words

    def _pause(self) -> Verdict | None:
        """Say what comes next, and wait; returns the verdict if the end is asked for meanwhile."""
        last, number = self._attempts[-1], len(self._attempts)
        pause_s = min(
            LONGEST_S, PAUSE_S * 2 ** verdict.without_progress([a.got for a in self._attempts])
        )
        onward = f"from step {last.step}" if last.step >= 0 else "from the beginning"
        _say(f"attempt {number}: {last}")
        if last.moves:
            return None
        _say(f"starting again {onward} in {pause_s:g} s")
        return _wait(pause_s)

    def _gather(self) -> Verdict | None:
        """Find hosts for the next attempt, and wait until they can be used.

        Returns:
            The verdict if the end is asked for meanwhile, or if that lasts too long.

        Raises:
            UserError: If there are too few for the first attempt; SLURM has its own to give.
        """
        begin, said = time.monotonic(), ""
        slurm_s, limit_s = self._order.slurm, self._order.timeout_s or HOSTS_S
        while lacking := self._lacking():
            if signals.received():
                break
            if not self._attempts and not slurm_s:
                remedy = "bring them up, give others, or begin with fewer ranks by --elastic"
                raise UserError(lacking, "hosts that answer", remedy)
            if time.monotonic() - begin >= limit_s:
                why = "run it again, on other nodes" if slurm_s else "giving up"
                return Verdict(Exit.SAVED if slurm_s else Exit.FAILED, f"{lacking}: {why}")
            if lacking != said:
                _say(f"{lacking}: waiting up to {limit_s:g} s")
                said = lacking
            if found := _wait(ASK_AGAIN_S):
                return found
        return _wait(0.0)

    def _lacking(self) -> str:
        """Choose the hosts of the next attempt; returns what it lacks, if anything."""
        order, place = self._order, self._place
        lacking = place.choose(signals.received) if place is not None else ""
        if not lacking and order.is_shared and self._run and is_claimed(self._run.out):
            lacking = f"ranks of the attempt before still hold {self._run.out}"
        if place is None or lacking or signals.received():
            return lacking
        self._changes = []
        if place.ranks < order.ranks and not order.is_program:
            given = given_values(order.words)
            try:
                self._changes = words_of(changed_options(given, order.ranks, place.nodes))
            except UserError as problem:
                return f"{problem} ({place.left_out})"
        where = " ".join([place.summary, *self._changes])
        if where != (self._where or where) or place.trouble:
            _say(where)
        self._where = where
        return ""

    def _attempt(self) -> Attempt:
        """Start the job, and wait for its end."""
        begin, place = time.monotonic(), self._place
        ranks, launcher = self._launcher()
        signs = Heartbeats(self._folder / f"{len(self._attempts) + 1}")
        failed = sum(not attempt.moves for attempt in self._attempts)
        order, left = self._order, self._order.restarts - failed
        if self._returned is not None:
            self._returned.begin(begin)
        timeout_s = order.timeout_s if order.begins_run else 0.0
        signs.begin(Terms(timeout_s, left, order.is_program, self._alone))
        step = slurm.Step(launcher)
        with contextlib.closing(signs):
            args = ["-m", "mpips.launch.rank", str(signs.folder), *self._words()]
            with Running(ranks, args, Path.cwd(), launcher=launcher, shown=True) as job:
                trouble = self._watch(job, signs, step)
                if trouble and trouble != AT_ONCE:
                    _say(f"{trouble}: ending the job; where its ranks are:")
                    if signs.runs:
                        with contextlib.suppress(UserError):  # of other hosts alone
                            _say(ranks_table(signs.runs[-1].out))
                    _say(signs.ask_for_stacks(job.process.pid, STACKS_S).rstrip())
                signs.end()
                job.kill(signs.alive())
            if place is not None:
                place.settle(bool(signs.runs), signs.ranks, signs.codes)
            if self._returned is not None:
                self._returned.end()
            if job.process.returncode and job.left():
                time.sleep(segments.YOUNG_S)  # until it is clear that they are nobody's
            segments.clean()  # if one rank is killed, the others may be gone at once
            code, seconds = job.process.returncode, time.monotonic() - begin
            if not trouble and len(signs.codes) == ranks and not any(signs.codes.values()):
                code = Exit.DONE
            elif not trouble and code and step.trouble() == slurm.OUT_OF_MEMORY:
                trouble = slurm.OUT_OF_MEMORY
            elif not trouble and place is not None and code == 0 and not any(signs.codes.values()):
                trouble = "mpirun has lost ranks"  # Open MPI's, with a host
            return self._came_to(code, trouble, seconds, signs)

    def _launcher(self) -> tuple[int, Sequence[str]]:
        """Return how many ranks are started, and the launcher with its options."""
        order, place = self._order, self._place
        if place is None:
            return order.ranks, self._survivors or order.launcher
        words = self._survivors or list(order.launcher or default_launcher(hosts=True))
        unseen = [a for a in self._attempts if not (a.begun or a.refusal)]
        by_plugin = [a for a in unseen if a.trouble != slurm.OUT_OF_MEMORY]
        if by_plugin and slurm.Step(words).is_by_pmi2:
            words = slurm.other_launcher()
            _say(f"no rank got as far as to begin: starting by {words[0]}")
        return place.ranks, launcher_words(words, place.used, place.reach.agent)

    def _words(self) -> list[str]:
        """Return what Python runs in each rank."""
        if self._order.is_program:
            return list(self._order.words)
        again = ["--out", str(self._run.out), "--resume", "auto"] if self._run else []
        return ["-m", "mpips.train", *self._order.words, *again, *self._changes]

    def _watch(self, job: Running, signs: Heartbeats, step: slurm.Step) -> str:
        """Wait until mpirun has ended, or something hangs; returns what.

        The ranks are asked to save and end, once, if that is asked for.
        """
        order, now, handed_on = self._order, time.monotonic(), False
        timeout_s = (order.timeout_s or UNWATCHED_S) if order.begins_run else math.inf
        gone = self._place.reach.gone if self._place is not None else {}
        watch = Watch(signs, timeout_s, order.is_program, now, bool(self._survivors), gone)
        every_s = min(LOOK_S, timeout_s / 10)
        due = now + every_s
        while job.process.poll() is None:
            time.sleep(POLL_S)
            if signals.count(signal.SIGINT) > 1:
                return AT_ONCE
            if signals.received() and not handed_on:
                handed_on = True
                _say(f"{signals.received()}: asking the ranks to save")
                # Soon after another signal, Open MPI's mpirun kills its ranks.
                job.process.send_signal(signal.SIGUSR1)
            if time.monotonic() >= due:
                trouble = watch.look(time.monotonic())
                if not (trouble or signs.runs or signs.codes):
                    trouble = step.trouble()
                if not trouble and self._place is not None and order.begins_run:
                    trouble = self._place.look(watch.quiet_s, time.monotonic())
                if trouble:
                    return trouble
                if self._returned is not None and order.begins_run and not handed_on:
                    said = self._returned.look(
                        signs.runs[-1] if signs.runs else None, time.monotonic()
                    )
                    _say(said)
                    if self._returned.asked:
                        handed_on = True
                        job.process.send_signal(signal.SIGUSR1)
                for rank in watch.hung:  # the run goes on without it as soon as it is dead
                    _say(f"{rank} is stopped: ending it")
                    send_signal(rank.pid)
                watch.hung.clear()
                due = time.monotonic() + every_s
        return ""

    def _came_to(self, code: int, trouble: str, seconds: float, signs: Heartbeats) -> Attempt:
        """Return what an attempt has come to."""
        if not trouble and signs.codes:
            codes = sorted(c for c in signs.codes.values() if c)  # of a death others say no more
            code = codes[0] if codes else code
        if not signs.runs:
            step = saved_step(self._run.out) if self._run else -1
            return Attempt(code, seconds, trouble, step=step, reported=bool(signs.codes))
        if self._run:
            self._run.close()
        self._run = run = signs.runs.pop()
        told_step, reason = run.last()
        complete = run.is_done and (code == 0 or not self._order.is_program)
        resumes = run.resumes or not self._order.is_program
        step, runs = saved_step(run.out), len(signs.runs) + 1
        moved = self._returned is not None and self._returned.asked
        return Attempt(
            code, seconds, trouble, runs, complete, reason, step, told_step, resumes,
            asked_to_move=moved,
        )  # fmt: skip


def _wait(seconds: float) -> Verdict | None:
    """Wait between attempts; returns the verdict if the end is asked for meanwhile."""
    end = time.monotonic() + seconds
    while not signals.received():
        if time.monotonic() >= end:
            return None
        time.sleep(POLL_S)
    return Verdict(Exit.SAVED, f"{signals.received()} before a start: run it again")


def _say(text: str) -> None:
    """Print each line of a text as the supervisor's."""
    for line in text.splitlines():
        write_line(f"mpips.launch: {line}", sys.stderr)
