"""How steps of rows grow with rows, batch, dim and servers, beside two processes with plain loops.

A step of each of two workers pulls rows and pushes gradients of them; see `row_workers`.
"""

from dataclasses import replace
from typing import Any

from mpips.bench.measure import Options, Row
from mpips.bench.row_workers import BESIDE, WORKERS, Case, beside_loops

BASE, QUICK = Case(1_000_000), Case(10_000)
VARIED: dict[str, tuple[int, ...]] = {
    "rows": (50_000_000, 200_000_000), "ids": (1024, 65_536), "dim": (4, 128), "servers": (2, 4),
}  # fmt: skip
QUICK_VARIED: dict[str, tuple[int, ...]] = {"ids": (1024,), "dim": (4,), "servers": (2,)}


def run(options: Options) -> list[Row]:
    """Compare a step of one case, and of others that differ in one number from it.

    Raises:
        Failed: If a job or a process fails.
    """
    base, varied = (QUICK, QUICK_VARIED) if options.quick else (BASE, VARIED)
    changes: list[dict[str, Any]] = [{}, *({k: n} for k, some in varied.items() for n in some)]
    return [_row(replace(base, **change), options) for change in changes]


def _row(case: Case, options: Options) -> Row:
    mine, other, ratio = beside_loops(case, options)
    step_ms = WORKERS * case.ids / 1e3
    return Row("row growth", f"{case}", step_ms / mine, "ms", BESIDE, step_ms / other, ratio)
