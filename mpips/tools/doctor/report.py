"""Report of the doctor: findings with remedies, options and time limits."""

import contextlib
import faulthandler
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from mpips import __version__
from mpips.errors import Exit, complain, listed
from mpips.session.metrics import write_json

START_S = 180.0
OK, WARN, FAIL = "ok", "warn", "fail"
EXIT_CODES = {OK: Exit.DONE, WARN: Exit.WARNED, FAIL: Exit.FAILED}
HOSTS_SHOWN = 3
GRACE_S = 10.0


@dataclass(frozen=True)
class Options:
    """Options of an examination.

    Attributes:
        node_size: Number of consecutive ranks that count as a node; 0 for the real nodes.
        out: Folder for runs; empty for the default.
        json: File for the findings, or None.
        limit_s: Time limit of a check in seconds.
        parameters: Parameters of the model for which to judge windows and checkpoints.
    """

    node_size: int = 0
    out: str = ""
    json: Path | None = None
    limit_s: float = 30.0
    parameters: int = 10_000_000

    @property
    def start_s(self) -> float:
        """Time limit for loading packages and starting MPI, in seconds."""
        return max(self.limit_s, START_S)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint of the model with the two slots of Adam, in bytes."""
        return self.parameters * 4 * (1 + 2)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: Name of the check.
        verdict: "ok"; "warn" if mpips runs, but slower or less safely than possible; "fail" if
            mpips does not run, or the check failed.
        found: Result of the check, as text.
        remedy: Remedy; empty for the verdict "ok".
        figures: Measured values, by name with the unit at its end.
    """

    check: str
    verdict: str
    found: str
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.verdict in EXIT_CODES, self.verdict
        assert self.verdict == OK or self.remedy, f"{self.check}: no remedy"


def ok(check: str, found: str, **figures: float) -> Finding:
    """Return a finding with the verdict "ok"."""
    return Finding(check, OK, found, figures=figures)


def warn(check: str, found: str, remedy: str, **figures: float) -> Finding:
    """Return a finding with the verdict "warn"."""
    return Finding(check, WARN, found, remedy, figures)


def warn_if(bad: bool, check: str, found: str, remedy: str, **figures: float) -> Finding:
    """Return a finding with the verdict "warn" if `bad`, else "ok" without the remedy."""
    return Finding(check, WARN if bad else OK, found, remedy if bad else "", figures)


def fail(check: str, found: str, remedy: str, **figures: float) -> Finding:
    """Return a finding with the verdict "fail"."""
    return Finding(check, FAIL, found, remedy, figures)


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst verdict of some findings; "ok" without any."""
    verdicts = {f.verdict for f in findings}
    return next((verdict for verdict in (FAIL, WARN) if verdict in verdicts), OK)


def lines(findings: Sequence[Finding]) -> str:
    """Return findings as text, one per line, with its remedy on the next line."""
    width = max((len(f.check) for f in findings), default=0)
    out = []
    for f in findings:
        out.append(f"{f.verdict:<4}  {f.check:<{width}}  {f.found}")
        if f.remedy:
            out.append(f"{'':<4}  {'':<{width}}  -> {f.remedy}")
    return "\n".join(out)


T = TypeVar("T")


def per_host(
    parts: Mapping[str, T], judge: Callable[[T], Finding | Iterable[Finding]]
) -> list[Finding]:
    """Judge each host; hosts with the same finding share a line.

    Args:
        parts: Facts by host name.
        judge: Function that returns the findings of one host, without its name.
    """
    groups: dict[tuple[str, str, str, str], tuple[list[str], Finding]] = {}
    for host, part in parts.items():
        findings = judge(part)
        for f in [findings] if isinstance(findings, Finding) else findings:
            key = f.check, f.verdict, f.found, f.remedy
            groups.setdefault(key, ([], f))[0].append(host)
    return [
        Finding(f.check, f.verdict, f"{listed(hosts, HOSTS_SHOWN)}: {f.found}", f.remedy, f.figures)
        for hosts, f in groups.values()
    ]


class Report:
    """Findings so far.

    Args:
        title: First line, such as ``8 ranks on 2 nodes``.
        path: File for the findings as JSON, or None.
        shown: Whether this process prints and writes the report.
    """

    def __init__(self, title: str, path: Path | None, shown: bool = True) -> None:
        self.title, self.shown = title, shown
        self.findings: list[Finding] = []
        self._path, self._started = path, time.perf_counter()

    def add(self, findings: Iterable[Finding]) -> None:
        """Add the findings of a check."""
        self.findings += findings

    def expire(self, check: str, limit_s: float) -> None:
        """Add a failure because a check exceeded its time limit, and end the report."""
        text = f"not over after {limit_s:g} s, and so ended; what comes after it was left out"
        self.add([fail(check, text, "mend what is said above it, or raise --limit")])
        self.end()

    def end(self) -> int:
        """Print the findings and write the file; returns the exit code."""
        verdict = worst(self.findings)
        if not self.shown:
            return EXIT_CODES[verdict]
        seconds = time.perf_counter() - self._started
        counts = Counter(finding.verdict for finding in self.findings)
        summary = ", ".join(f"{counts[name]} {name}" for name in EXIT_CODES if counts[name])
        print(f"mpips {__version__}, doctor: {self.title}")
        print(lines(self.findings))
        print(f"{summary}; {seconds:.1f} s", flush=True)
        if self._path is not None:
            values = {
                "mpips": __version__, "world": self.title, "verdict": verdict,
                "seconds": seconds, "findings": [asdict(finding) for finding in self.findings],
            }  # fmt: skip
            try:
                write_json(self._path, values)
            except OSError as error:
                complain(f"--json {self._path}: {error.strerror}")
                return Exit.FAILED
        return EXIT_CODES[verdict]


class Watch:
    """Time limit of checks, which also ends a process that hangs inside MPI or a file system.

    Args:
        limit_s: Time limit of a check in seconds.
        expired: Function that a thread calls with the check's name and limit when the limit has
            passed. The process ends with exit code 1 when the function returns, or `GRACE_S` / 2
            after it was called.

    Attributes:
        then: Function that is called with a message after `expired`, to end the other ranks.
    """

    def __init__(self, limit_s: float, expired: Callable[[str, float], None]) -> None:
        self._limit_s, self._expired = limit_s, expired
        self.then: Callable[[str], object] = str

    @contextlib.contextmanager
    def over(self, check: str, least_s: float = 0.0) -> Iterator[None]:
        """Limit the time of a ``with`` block, to `least_s` at least."""
        limit_s = max(self._limit_s, least_s)
        timer = threading.Timer(limit_s, self._expire, [check, limit_s])
        timer.daemon = True
        timer.start()
        # Works even if the hanging call holds the GIL, when the timer's thread cannot run.
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True)
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _expire(self, check: str, limit_s: float) -> None:
        last = threading.Timer(GRACE_S / 2, os._exit, [Exit.FAILED])
        last.daemon = True
        last.start()
        try:
            self._expired(check, limit_s)
            self.then(f"doctor: {check} is not over after {limit_s:g} s")
        finally:
            os._exit(Exit.FAILED)
