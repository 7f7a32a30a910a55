"""Findings of checks (ok, warn, fail) with remedies, and their table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

OK, WARN, FAIL = "ok", "warn", "fail"
EXIT_CODES = {OK: 0, WARN: 3, FAIL: 1}
HOSTS_SHOWN = 3


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


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if all is well, 3 if something is to be warned of, 1 if something fails."""
    return EXIT_CODES[worst(findings)]


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


def name_hosts(hosts: Sequence[str]) -> str:
    """Return host names, shortened where there are many."""
    shown = ", ".join(hosts[:HOSTS_SHOWN])
    more = len(hosts) - HOSTS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


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
        Finding(f.check, f.verdict, f"{name_hosts(hosts)}: {f.found}", f.remedy, f.figures)
        for hosts, f in groups.values()
    ]
