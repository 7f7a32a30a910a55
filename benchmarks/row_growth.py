"""Growth of row steps with rows, batch, dim and servers, beside two processes with plain loops.

In a step, each of two workers pulls rows and pushes their gradients; see `row_workers`.
"""

from dataclasses import replace
from typing import Any

from benchmarks.row_workers import WORKERS, Case, beside_loops
from mpips.tools.bench.measure import Options, Row

BASE, QUICK = Case(1_000_000), Case(10_000)
VARIED: dict[str, tuple[int, ...]] = {
    "rows": (50_000_000, 200_000_000), "ids": (1024, 65_536), "dim": (4, 128), "servers": (2, 4),
}  # fmt: skip
QUICK_VARIED: dict[str, tuple[int, ...]] = {"ids": (1024,), "dim": (4,), "servers": (2,)}


def run(options: Options) -> list[Row]:
    """Compare a step of one case with steps of other cases that differ in one number.

    Raises:
        Failed: If a job or a process fails.
    """
    base, varied = (QUICK, QUICK_VARIED) if options.quick else (BASE, VARIED)
    changes: list[dict[str, Any]] = [{}, *({k: n} for k, some in varied.items() for n in some)]
    cases = [replace(base, **change) for change in changes]
    return [row for case in cases for row in _rows(case, options)]


def _rows(case: Case, options: Options) -> list[Row]:
    step_ms, found = WORKERS * case.ids / 1e3, beside_loops(case, options)
    return [
        Row("row growth", f"{case}", step_ms / mine, "ms", beside, step_ms / other, ratio)
        for beside, (mine, other, ratio) in found.items()
    ]
