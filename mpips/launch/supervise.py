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
from mpips.launch import heartbeat, mpirun, slurm, verdict
from mpips.launch.folders import OwnFolder, remove_left, slurm_start
from mpips.launch.heartbeat import Terms
from mpips.launch.hosts import is_srun, launcher_words
from mpips.launch.mpirun import SURVIVING, Running, default_launcher
from mpips.launch.order import Order
from mpips.launch.placement import Placement, changed_options, words_of
from mpips.launch.ranks import ranks_table
from mpips.launch.remote_execution import RemoteExecution
from mpips.launch.returned import HostReturn
from mpips.launch.verdict import Attempt, Verdict
from mpips.launch.watch import Heartbeats, Run, Watch, saved_step
from mpips.mpi import segments, signals
from mpips.mpi.process import send_signal

POLL_S = 0.1
LOOK_S = 2.0  # longest time between two checks of a job
STACKS_S = 3.0
PREFIX = "mpips-launch-"  # prefix of the folder with the ranks' heartbeats
AT_ONCE = "ended by a second SIGINT"
PAUSE_S, LONGEST_S = 1.0, 60.0  # before a restart; doubled with each attempt without progress
ASK_AGAIN_S, HOSTS_S = 5.0, 300.0  # between questions to missing hosts, and the limit for them
UNWATCHED_S = 3600.0  # limit for a job whose ranks detect hangs themselves


def supervise(order: Order) -> int:
    """Run a job until its run is complete or makes no more progress. Return the exit code.

    The ranks write their heartbeats to a folder. On one host, it is a temporary folder. If hosts or
    a launcher are given, it is in the current folder, which the hosts share.

    Raises:
        UserError: If there is no launcher, too few hosts answer, or the folder cannot be created.
    """
    parent = Path.cwd() if order.is_shared else None
    left = remove_left(parent)
    folder = OwnFolder(PREFIX, parent)
    with folder, signals.noted(), contextlib.ExitStack() as stack:
        if left and parent:  # their ranks see it, and end: they may hold the run
            _wait(2 * heartbeat.LOOK_S)
        placement = None
        if order.hosts:
            remote = RemoteExecution(order.remote, order.slurm, Path(folder.name), order.hosts)
            stack.enter_context(contextlib.closing(remote))
            placement = Placement(order, remote)
        return Supervisor(order, Path(folder.name), placement).run()


def why_all_end(order: Order) -> str:
    """Return why the death of a rank ends all ranks; empty if others may continue."""
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
    """Starts a job, watches it and restarts it; see `supervise`.

    Args:
        order: The job.
        folder: Folder of this process.
        placement: Hosts of the job; None if none are given.
    """

    def __init__(self, order: Order, folder: Path, placement: Placement | None = None) -> None:
        self._order, self._folder, self._placement = order, folder, placement
        self._ft_launcher = list[str]()  # launcher of ranks that continue when others die
        self._why_all_end = ""  # why they cannot continue
        self._attempts: list[Attempt] = []
        self._run: Run | None = None  # the last one that has begun
        self._where = ""  # hosts of the next attempt, as text
        self._changes: list[str] = []  # options that differ on fewer ranks
        self._returned = HostReturn(placement) if placement is not None else None

    def run(self) -> int:
        """Start and restart the job until it ends, and return the exit code."""
        found = self._gather()
        if found is None:
            self._find_ft_launcher()
            if self._order.survives and self._why_all_end:
                _say(f"--ft has no effect: {self._why_all_end}")
        while found is None:
            self._attempts.append(self._attempt())
            asked = signals.received() or ""
            if self._order.begins_run:
                found = verdict.verdict(self._attempts, self._order.restarts, asked)
            else:
                found = verdict.verdict_without_run(self._attempts, asked)
            if found is None:
                found = self._pause() or self._gather()
        if left := self._placement.finish() if self._placement is not None else "":
            _say(f"ranks may be left, and end when they see that it is over, on {left}")
        if found.why:
            _say(found.why)
        if found.code and self._attempts[1:]:
            for number, attempt in enumerate(self._attempts, 1):
                _say(f"attempt {number}: {attempt}")
        return found.code

    def _find_ft_launcher(self) -> None:
        """Find the launcher of ranks that continue when others die, or why they cannot."""
        order, placement = self._order, self._placement
        if why := why_all_end(order):
            self._why_all_end = why
            return
        words = there = [*(order.launcher or default_launcher(hosts=bool(placement))), *SURVIVING]
        if placement is not None:
            there = launcher_words(words, placement.used, placement.remote.agent)
        ranks, fabrics = (1, True) if placement is None else (placement.ranks, order.survives)
        self._why_all_end = mpirun.refusal(there, ranks, fabrics)
        self._ft_launcher = [] if self._why_all_end else words

    def _pause(self) -> Verdict | None:
        """Print the next step, and wait. Return a verdict if a signal arrives meanwhile."""
        last, number = self._attempts[-1], len(self._attempts)
        failures = verdict.without_progress([attempt.got for attempt in self._attempts])
        pause_s = min(LONGEST_S, PAUSE_S * 2**failures)
        onward = f"from step {last.step}" if last.step >= 0 else "from the beginning"
        _say(f"attempt {number}: {last}")
        if last.moves:
            return None
        _say(f"starting again {onward} in {pause_s:g} s")
        return _wait(pause_s)

    def _gather(self) -> Verdict | None:
        """Find hosts for the next attempt, and wait until they can be used.

        Returns:
            A verdict if a signal arrives meanwhile, or the wait exceeds its limit; else None.

        Raises:
            UserError: If the first attempt has too few hosts, outside SLURM.
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
        """Choose the hosts of the next attempt. Return why it cannot start; empty if it can."""
        order, placement = self._order, self._placement
        lacking = placement.choose(signals.received) if placement is not None else ""
        out = self._held_before()
        if not lacking and out is not None and is_claimed(out):
            lacking = f"ranks of the start before still hold {out}"
        if placement is None or lacking or signals.received():
            return lacking
        self._changes = []
        if placement.ranks < order.ranks and not order.is_program:
            given = given_values(order.words)
            try:
                self._changes = words_of(changed_options(given, order.ranks, placement.nodes))
            except UserError as problem:
                return f"{problem} ({placement.left_out})"
        where = " ".join([placement.summary, *self._changes])
        if where != (self._where or where) or placement.trouble:
            _say(where)
        self._where = where
        return ""

    def _held_before(self) -> Path | None:
        """Return the folder of the run that ranks of an earlier start may hold, on other hosts."""
        order = self._order
        if self._run is not None:
            return self._run.out if order.is_shared else None
        if order.is_program or not (order.begins_run and order.slurm and slurm_start()[1]):
            return None
        return Path(given_values(order.words).get("out") or "")

    def _attempt(self) -> Attempt:
        """Start the job, wait for its end, and return the result."""
        begin, placement = time.monotonic(), self._placement
        ranks, launcher = self._launcher()
        heartbeats = Heartbeats(self._folder / f"{len(self._attempts) + 1}")
        failed = sum(not attempt.moves for attempt in self._attempts)
        order, left = self._order, self._order.restarts - failed
        if self._returned is not None:
            self._returned.begin(begin)
        timeout_s = order.timeout_s if order.begins_run else 0.0
        heartbeats.begin(Terms(timeout_s, left, order.is_program, self._why_all_end))
        step = slurm.Step(launcher)
        with contextlib.closing(heartbeats):
            args = ["-m", "mpips.launch.rank", str(heartbeats.folder), *self._words()]
            with Running(ranks, args, Path.cwd(), launcher=launcher, shown=True) as job:
                trouble = self._watch(job, heartbeats, step)
                if trouble and trouble != AT_ONCE:
                    _say(f"{trouble}: ending the job; where its ranks are:")
                    if heartbeats.runs:
                        with contextlib.suppress(UserError):  # all ranks may be on other hosts
                            _say(ranks_table(heartbeats.runs[-1].out))
                    _say(heartbeats.ask_for_stacks(job.process.pid, STACKS_S).rstrip())
                heartbeats.end()
                job.kill(heartbeats.alive())
            if placement is not None:
                placement.settle(bool(heartbeats.runs), heartbeats.ranks, heartbeats.codes)
            if self._returned is not None:
                self._returned.end()
            if job.process.returncode and job.left():
                time.sleep(segments.YOUNG_S)  # until it is certain that no process uses them
            segments.clean()  # killed ranks may leave segments behind
            code, seconds = job.process.returncode, time.monotonic() - begin
            codes = heartbeats.codes.values()
            if not trouble and len(codes) == ranks and not any(codes):
                code = Exit.DONE
            elif not trouble and code and step.trouble() == slurm.OUT_OF_MEMORY:
                trouble = slurm.OUT_OF_MEMORY
            elif not trouble and placement is not None and code == 0 and not any(codes):
                trouble = "mpirun has lost ranks"  # Open MPI's mpirun does so when a host is lost
            return self._result(code, trouble, seconds, heartbeats)

    def _launcher(self) -> tuple[int, Sequence[str]]:
        """Return the number of ranks to start, and the launcher with its options."""
        order, placement = self._order, self._placement
        if placement is None:
            return order.ranks, self._ft_launcher or order.launcher
        words = self._ft_launcher or list(order.launcher or default_launcher(hosts=True))
        unseen = (a for a in self._attempts if not (a.begun or a.refusal))
        by_plugin = any(attempt.trouble != slurm.OUT_OF_MEMORY for attempt in unseen)
        if by_plugin and slurm.Step(words).is_by_pmi2:
            words = slurm.other_launcher()
            _say(f"no rank got as far as to begin: starting by {words[0]}")
        return placement.ranks, launcher_words(words, placement.used, placement.remote.agent)

    def _words(self) -> list[str]:
        """Return Python's arguments on each rank."""
        if self._order.is_program:
            return list(self._order.words)
        again = ["--out", str(self._run.out), "--resume", "auto"] if self._run else []
        return ["-m", "mpips.train", *self._order.words, *again, *self._changes]

    def _watch(self, job: Running, heartbeats: Heartbeats, step: slurm.Step) -> str:
        """Wait until mpirun has ended, or the job hangs.

        Return what hangs, empty if nothing does. At the first signal, ask the ranks to save.
        """
        order, now, forwarded = self._order, time.monotonic(), False
        timeout_s = (order.timeout_s or UNWATCHED_S) if order.begins_run else math.inf
        gone = self._placement.remote.gone if self._placement is not None else {}
        watch = Watch(heartbeats, timeout_s, order.is_program, now, bool(self._ft_launcher), gone)
        every_s = min(LOOK_S, timeout_s / 10)
        due = now + every_s
        while job.process.poll() is None:
            time.sleep(POLL_S)
            if signals.count(signal.SIGINT) > 1:
                return AT_ONCE
            if signals.received() and not forwarded:
                forwarded = True
                _say(f"{signals.received()}: asking the ranks to save")
                # Open MPI's mpirun kills its ranks if another signal follows soon.
                job.process.send_signal(signal.SIGUSR1)
            if time.monotonic() >= due:
                trouble = watch.look(time.monotonic())
                if not (trouble or heartbeats.runs or heartbeats.codes):
                    trouble = step.trouble()
                if not trouble and self._placement is not None and order.begins_run:
                    trouble = self._placement.look(watch.quiet_s, time.monotonic())
                if trouble:
                    return trouble
                if self._returned is not None and order.begins_run and not forwarded:
                    run = heartbeats.runs[-1] if heartbeats.runs else None
                    _say(self._returned.look(run, time.monotonic()))
                    if self._returned.asked:
                        forwarded = True
                        job.process.send_signal(signal.SIGUSR1)
                for rank in watch.hung:  # the run continues once the rank is dead
                    _say(f"{rank} is stopped: ending it")
                    send_signal(rank.pid)
                watch.hung.clear()
                due = time.monotonic() + every_s
        return ""

    def _result(self, code: int, trouble: str, seconds: float, heartbeats: Heartbeats) -> Attempt:
        """Return the result of an attempt."""
        if not trouble and heartbeats.codes:
            codes = sorted(c for c in heartbeats.codes.values() if c)  # none of ranks that died
            code = codes[0] if codes else code
        if not heartbeats.runs:
            step = saved_step(self._run.out) if self._run else -1
            return Attempt(code, seconds, trouble, step=step, reported=bool(heartbeats.codes))
        if self._run:
            self._run.close()
        self._run = run = heartbeats.runs.pop()
        told_step, reason = run.last()
        complete = run.is_done and (code == 0 or not self._order.is_program)
        resumes = run.resumes or not self._order.is_program
        step, runs = saved_step(run.out), len(heartbeats.runs) + 1
        moved = self._returned is not None and self._returned.asked
        return Attempt(
            code, seconds, trouble, runs, complete, reason, step, told_step, resumes,
            asked_to_move=moved,
        )  # fmt: skip


def _wait(seconds: float) -> Verdict | None:
    """Wait between attempts. Return a verdict if a signal arrives meanwhile."""
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
