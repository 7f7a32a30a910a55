"""One run: a job is started under its supervisor, disturbed as planned, and judged in the end."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpips.errors import UserError
from mpips.launch.order import Order as JobOrder
from tests.chaos import builtin
from tests.chaos.counting import held_by
from tests.chaos.exact import check_counts, check_run
from tests.chaos.follow import SHRUNK, Follower, Moment, strike
from tests.chaos.hosts import RSH
from tests.chaos.job import Job
from tests.chaos.plan import SAVING, STARTING, Fault, draw
from tests.chaos.rank import InjectedFault
from tests.chaos.serial import check_serial

RESTARTS = 3  # more than faults: a fault may come while the ranks of another one's restart start


@dataclass(frozen=True)
class Order:
    """What is to be done to jobs of so many ranks."""

    ranks: int
    timeout_s: float
    faults: Sequence[str]
    most: int
    limit_s: float
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

    @property
    def verdict(self) -> str:
        """``exact`` where the parameters are right, ``balanced`` where only accounts are known."""
        if self.wrong:
            return "WRONG"
        return "balanced" if self.mode in builtin.INVARIANT else "exact"


def run(order: Order, seed: int, mode: str, folder: Path) -> Result:
    """Run a job, and do to it what is drawn from the seed."""
    result = Result(seed, mode, draw(seed, order.faults, order.most))
    out, timeout_s = folder / "out", order.timeout_s
    try:
        folder.mkdir(parents=True)
    except OSError as problem:
        raise UserError(f"{folder}: {problem.strerror}", "a new folder", "see --folder") from None
    held_by(out).touch()
    words = builtin.job(mode, order.ranks, result.plan, timeout_s, out, bool(order.hosts))
    goes_on = JobOrder(order.ranks, words, survives=True).goes_on
    if any(fault.action == "exception" for fault in result.plan):
        words = _raising(words)
    options = ["--restarts", f"{len(result.plan) + RESTARTS}", "--timeout", f"{timeout_s:g}"]
    if words[0] == "-m" and goes_on:  # which the supervisor does not know of a program
        options += ["--ft"]
    options += _places(order.hosts, folder)
    with (
        Job(folder, order.ranks, words, options, Path.cwd()) as job,
        contextlib.closing(Follower(job, result.begun + order.limit_s)) as follower,
    ):
        try:
            _disturb(follower, result)
            held_by(out).unlink(missing_ok=True)
            follower.wait(lambda: False)
            result.wrong += _judge(follower, result)
        except TimeoutError:
            result.wrong.append(f"not over after {order.limit_s:g} s")
        result.attempts = job.output.count("mpips.launch: starting again ") + 1
    result.seconds = time.monotonic() - result.begun
    return result


def _places(hosts: Sequence[str], folder: Path) -> list[str]:
    """Return the supervisor's options for other hosts, where the ranks are to be on some."""
    if not hosts:
        return []
    rsh = folder / "rsh"
    rsh.write_text(RSH)
    rsh.chmod(0o700)
    return ["--hosts", ",".join(hosts), "--rsh", str(rsh)]


def _raising(words: list[str]) -> list[str]:
    """Return the words of a job whose ranks can be made to raise: a program to the supervisor."""
    program = words if words[0] == "-m" else ["-m", "mpips.train", *words, "--resume", "auto"]
    return ["-m", "tests.chaos.rank", *program]


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


def _judge(follower: Follower, result: Result) -> list[str]:
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
    if not wrong and result.mode in builtin.SHRUNK:
        wrong += check_serial(follower.out, follower.job.size)
    elif not wrong:
        wrong += check_counts(follower.out)
    return [*wrong, *(f"left: {what}" for what in job.left())]
