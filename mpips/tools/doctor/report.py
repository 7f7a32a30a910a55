"""Report of a doctor: findings with remedies, options, and time limits."""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
    """What to examine.

    Attributes:
        node_size: Treat so many consecutive ranks as a node; 0 for the real nodes.
        out: Folder that runs go to; empty for the default.
        json: File for the findings, or None.
        limit_s: Seconds that a check may take.
        parameters: Of the model that windows and checkpoints are to be large enough for.
    """

    node_size: int = 0
    out: str = ""
    json: Path | None = None
    limit_s: float = 30.0
    parameters: int = 10_000_000

    @property
    def start_s(self) -> float:
        """Seconds that loading the packages and starting MPI may take."""
        return max(self.limit_s, START_S)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of that model, with the two slots of Adam."""
        return self.parameters * 4 * (1 + 2)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: What was looked at.
        verdict: "ok"; "warn": mpips runs, but slower or less safely than it might; "fail": it
            does not run, or it was not found out whether it does.
        found: What was found.
        remedy: What to do about it; empty if all is well.
        figures: What was measured, by name with the unit at its end.
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
    """Make the line of a check where nothing is to be changed."""
    return Finding(check, OK, found, figures=figures)


def warn(check: str, found: str, remedy: str, **figures: float) -> Finding:
    """Make the line of a check that finds less than mpips could have."""
    return Finding(check, WARN, found, remedy, figures)


def warn_if(bad: bool, check: str, found: str, remedy: str, **figures: float) -> Finding:
    """Make the line of a check that warns if what it finds is bad."""
    return Finding(check, WARN if bad else OK, found, remedy if bad else "", figures)


def fail(check: str, found: str, remedy: str, **figures: float) -> Finding:
    """Make the line of a check that finds that mpips will not run."""
    return Finding(check, FAIL, found, remedy, figures)


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst verdict."""
    found = {f.verdict for f in findings}
    return next((verdict for verdict in (FAIL, WARN) if verdict in found), OK)


def lines(findings: Sequence[Finding]) -> str:
    """Return the table: a line each, and the remedy on the next."""
    width = max((len(f.check) for f in findings), default=0)
    out = []
    for f in findings:
        out.append(f"{f.verdict:<4}  {f.check:<{width}}  {f.found}")
        if f.remedy:
            out.append(f"{'':<4}  {'':<{width}}  -> {f.remedy}")
    return "\n".join(out)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line: how many there are of each verdict."""
    counts = {v: sum(f.verdict == v for f in findings) for v in EXIT_CODES}
    return ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)


T = TypeVar("T")


def per_host(
    parts: Mapping[str, T], judge: Callable[[T], Finding | Iterable[Finding]]
) -> list[Finding]:
    """Judge what each host has; hosts of which the same is said share a line.

    Args:
        parts: By host name.
        judge: Returns what is found, without the host's name.
    """
    groups: dict[tuple[str, str, str, str], tuple[list[str], Finding]] = {}
    for host, part in parts.items():
        found = judge(part)
        for one in [found] if isinstance(found, Finding) else found:
            key = one.check, one.verdict, one.found, one.remedy
            groups.setdefault(key, ([], one))[0].append(host)
    return [
        Finding(f.check, f.verdict, f"{listed(hosts, HOSTS_SHOWN)}: {f.found}", f.remedy, f.figures)
        for hosts, f in groups.values()
    ]


class Report:
    """What has been found so far.

    Args:
        title: First line, such as ``8 ranks on 2 nodes``.
        path: File for the findings as JSON, or None.
        shown: Whether this process prints and writes it.
    """

    def __init__(self, title: str, path: Path | None, shown: bool = True) -> None:
        self.title, self.shown = title, shown
        self.findings: list[Finding] = []
        self._path, self._started = path, time.perf_counter()

    def add(self, findings: Iterable[Finding]) -> None:
        """Add the findings of a check."""
        self.findings += findings

    def expire(self, check: str, limit_s: float) -> None:
        """Add that a check did not end, and end the report with it."""
        text = f"not over after {limit_s:g} s, and so ended; what comes after it was left out"
        self.add([fail(check, text, "mend what is said above it, or raise --limit")])
        self.end()

    def end(self) -> int:
        """Print the table, write the file; returns the exit code."""
        if not self.shown:
            return EXIT_CODES[worst(self.findings)]
        seconds = time.perf_counter() - self._started
        print(f"mpips {__version__}, doctor: {self.title}")
        print(lines(self.findings))
        print(f"{summary(self.findings)}; {seconds:.1f} s", flush=True)
        if self._path is not None:
            try:
                write_json(self._path, self.to_json(seconds))
            except OSError as error:
                complain(f"--json {self._path}: {error.strerror}")
                return Exit.FAILED
        return EXIT_CODES[worst(self.findings)]

    def to_json(self, seconds: float) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "mpips": __version__, "world": self.title, "verdict": worst(self.findings),
            "seconds": seconds, "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip


class Watch:
    """Watches over what may hang inside MPI or a file system, where nothing else gets a word in.

    Args:
        limit_s: Seconds that a check may take.
        expired: Called from a thread with the check's name and its limit when it is over. The
            process ends with code 1 when it returns, or half of `GRACE_S` later if it does not.
    """

    def __init__(self, limit_s: float, expired: Callable[[str, float], None]) -> None:
        self._limit_s, self._expired = limit_s, expired
        self._then: Callable[[str], object] = str

    def then(self, end: Callable[[str], object]) -> None:
        """Have `end` called with a message after `expired`, to take the other ranks along."""
        self._then = end

    @contextlib.contextmanager
    def over(self, check: str, least_s: float = 0.0) -> Iterator[None]:
        """Watch over what is done within a ``with`` block, for `least_s` at least."""
        limit_s = max(self._limit_s, least_s)
        timer = threading.Timer(limit_s, self._expire, [check, limit_s])
        timer.daemon = True
        timer.start()
        # Needs no Python: the last resort where the interpreter's lock is held for ever.
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
            self._then(f"doctor: {check} is not over after {limit_s:g} s")
        finally:
            os._exit(Exit.FAILED)
