"""One run: a job is started under its supervisor, disturbed as planned, and judged in the end."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpips.errors import UserError
from mpips.launch.order import Order as JobOrder
from tests.chaos import builtin
from tests.chaos.counting import held_by
from tests.chaos.exact import check_counts, check_run, check_same
from tests.chaos.follow import SHRUNK, Follower, Moment, strike
from tests.chaos.hosts import RSH
from tests.chaos.job import Job
from tests.chaos.plan import SAVING, STARTING, Fault, draw
from tests.chaos.rank import InjectedFault
from tests.chaos.serial import check_serial

RESTARTS = 3  # more than faults: a fault may come while the ranks of another one's restart start


@dataclass(frozen=True)
class Order:
    """What is to be run, and what is to be done to it."""

    job: JobOrder
    faults: Sequence[str]
    most: int
    limit_s: float
    same_as: Path | None = None
    hosts: Sequence[str] = ()


@dataclass
class Struck:
    """A fault that has come."""

    fault: Fault
    at: Moment
    step: int
    hit: list[str]
    seconds: float | None = None


@dataclass
class Result:
    """What came of a run."""

    seed: int
    mode: str
    plan: list[Fault]
    struck: list[Struck] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    wrong: list[str] = field(default_factory=list)
    is_known: bool = False

    @property
    def verdict(self) -> str:
        """``exact`` where the parameters are right, ``balanced`` where only accounts are known."""
        if self.wrong:
            return "WRONG"
        return "exact" if self.is_known else "balanced"


def run(order: Order, seed: int, mode: str, folder: Path) -> Result:
    """Run a job, and do to it what is drawn from the seed."""
    result = Result(seed, mode, draw(seed, order.faults, order.most))
    given, out = order.job, folder / "out"
    if mode:
        words = builtin.job(mode, given.ranks, result.plan, given.timeout_s, bool(order.hosts))
        survives = mode.startswith(builtin.PROGRAM)
        given = dataclasses.replace(given, words=words, survives=survives)
    try:
        folder.mkdir(parents=True)
        if mode:
            held_by(out).touch()
    except OSError as problem:
        raise UserError(f"{folder}: {problem.strerror}", "a new folder", "see --folder") from None
    options = [*_options(given, result.plan), *_places(order.hosts, folder)]
    words = _command(list(given.words), given.is_program, result.plan, out)
    with (
        Job(folder, given.ranks, words, options, Path.cwd()) as job,
        contextlib.closing(Follower(job, result.begun + order.limit_s)) as follower,
    ):
        try:
            _disturb(follower, result)
            held_by(out).unlink(missing_ok=True)
            follower.wait(lambda: False)
            result.wrong += _judge(follower, result, order.same_as)
        except TimeoutError:
            result.wrong.append(f"not over after {order.limit_s:g} s")
        result.attempts = job.output.count("mpips.launch: starting again ") + 1
    result.seconds = time.monotonic() - result.begun
    return result


def _options(job: JobOrder, plan: Sequence[Fault]) -> list[str]:
    """Return the supervisor's options for a job; one that goes on without ranks does so here."""
    options = ["--restarts", f"{len(plan) + RESTARTS}", "--timeout", f"{job.timeout_s:g}"]
    if job.survives or (_raises(plan) and job.goes_on):
        options += ["--ft"]  # which the supervisor does not know of a program
    return options


def _places(hosts: Sequence[str], folder: Path) -> list[str]:
    """Return the supervisor's options for other hosts, where the ranks are to be on some."""
    if not hosts:
        return []
    rsh = folder / "rsh"
    rsh.write_text(RSH)
    rsh.chmod(0o700)
    return ["--hosts", ",".join(hosts), "--rsh", str(rsh)]


def _command(words: list[str], is_program: bool, plan: Sequence[Fault], out: Path) -> list[str]:
    """Return what the supervisor is given; a run that is made to raise is a program to it."""
    raises = _raises(plan)
    if is_program:
        words = [word.replace(builtin.OUT, str(out)) for word in words]
    else:
        words = [*words, "--out", str(out)]
        if not raises:
            return words
        words = ["-m", "mpips.train", *words, "--resume", "auto"]
    return ["-m", "tests.chaos.rank", *words] if raises else words


def _raises(plan: Sequence[Fault]) -> bool:
    """Whether a rank is made to raise."""
    return any(fault.action == "exception" for fault in plan)


def _disturb(follower: Follower, result: Result) -> None:
    """Let the faults come one after the other, as far as the job lasts."""
    for fault in result.plan:
        if not _reach(follower, fault, result.struck[-1:]):
            return
        follower.look()
        at, step = follower.now, follower.step
        hit = strike(follower, fault)
        if not fault.ends_job:
            at = follower.now._replace(time=at.time)
        result.struck.append(Struck(fault, at, step, hit))
    if result.struck:
        follower.wait(lambda: _progress(follower, result.struck[-1]) is not None)


def _reach(follower: Follower, fault: Fault, last: Sequence[Struck]) -> bool:
    """Wait for a fault's moment; returns whether it comes before the job is over."""
    before = last[0].at if last else Moment(0.0, 0, 0)
    anew = not last or last[0].fault.ends_job
    if fault.moment == STARTING:
        reached = follower.wait(
            lambda: follower.starts_again(before) and bool(follower.ranks(fault.role))
        )
    else:
        reached = follower.wait(lambda: follower.saves(before, anew) >= fault.saves)
        if reached and fault.moment == SAVING:
            reached = follower.wait_for_saving()
    end = time.monotonic() + fault.delay_s
    return reached and follower.wait(lambda: time.monotonic() >= end)


def _progress(follower: Follower, struck: Struck) -> float | None:
    """Return the seconds from a fault to the first sign that the job got on after it, or None."""
    for row in follower.rows[struck.at.rows :]:
        if row.kind == SHRUNK:  # a round was made without it
            return row.seen - struck.at.time
    signs = ("train", "checkpoint") if struck.fault.ends_job else ("checkpoint",)
    for row in follower.since(struck.at, struck.fault.ends_job):
        if row.kind in signs:
            return row.seen - struck.at.time
    return None


def _judge(follower: Follower, result: Result, same_as: Path | None) -> list[str]:
    """Return what is wrong with a job that is over."""
    job, wrong = follower.job, []
    for struck in result.struck:
        struck.seconds = _progress(follower, struck)
        if not struck.hit:
            wrong.append(f"{struck.fault.name} hit nobody")
    missed = [fault.name for fault in result.plan[len(result.struck) :]]
    if missed:
        wrong.append(f"over before {', '.join(missed)}: a longer job is needed")
    raised = sum(struck.fault.action == "exception" for struck in result.struck)
    shown = job.output.count(f"{InjectedFault.__name__}: ")
    if shown < raised:
        wrong.append(f"{raised} exceptions, of which {shown} were shown")
    if job.process.returncode:
        wrong.append(f"exit code {job.process.returncode}")
    if follower.out is None:
        return [*wrong, "no run began"]
    wrong += check_run(follower.out)
    result.is_known = bool(same_as or (result.mode and result.mode not in builtin.INVARIANT))
    if result.mode in builtin.SHRUNK and not wrong:
        wrong += check_serial(follower.out, follower.job.size)
    elif result.mode and not wrong:
        wrong += check_counts(follower.out)
    if same_as and not wrong:
        wrong += check_same(follower.out, same_as)
    return [*wrong, *(f"left: {what}" for what in job.left())]
