"""Report of findings, printed even if a later check hangs."""

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpips import __version__
from mpips.errors import complain
from mpips.session.metrics import write_json
from mpips.tools.doctor.finding import Finding, exit_code, fail, lines, summary, worst


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
        remedy = "mend what is said above it, or raise --limit"
        self.add([fail(check, text, remedy)])
        self.end()

    def end(self) -> int:
        """Print the table, write the file; returns the exit code."""
        if not self.shown:
            return exit_code(self.findings)
        seconds = time.perf_counter() - self._started
        print(f"mpips {__version__}, doctor: {self.title}")
        print(lines(self.findings))
        print(f"{summary(self.findings)}; {seconds:.1f} s", flush=True)
        if self._path is not None:
            try:
                write_json(self._path, self.to_json(seconds))
            except OSError as error:
                complain(f"--json {self._path}: {error.strerror}")
                return 1
        return exit_code(self.findings)

    def to_json(self, seconds: float) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "mpips": __version__, "world": self.title, "verdict": worst(self.findings),
            "seconds": seconds, "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip
