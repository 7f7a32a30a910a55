"""Synchronous rounds of many ranks are one large batch: compared with a run without any MPI."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from references import TOLERANCE, serial_sync
from runs import Plan, assert_same_state, few_digits, final

from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import resolve

pytestmark = pytest.mark.launch

EPOCHS = 2
TWIN_EVERY = 8
JOB = "--mode sync --optimizer momentum --lr 0.05 --hidden 24 --eval-every 0 --checkpoint-every 0"
SAMPLES = 301


@dataclass(frozen=True)
class Case:
    """One synchronous job."""

    ranks: int
    servers: int
    node_size: int
    reduce: str
    dtype: str
    clip: float = 0.0

    @property
    def batch_size(self) -> int:
        """Samples of one worker's batch: a divisor of no epoch, whatever the workers are."""
        return 60 if self.workers == 1 else 23

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.ranks - self.servers

    def options(self, data: Sequence[str]) -> list[str]:
        """Return the command line, without the folder."""
        text = f"{JOB} --epochs {EPOCHS} --servers {self.servers} --node-size {self.node_size} "
        text += f"--reduce {self.reduce} --dtype {self.dtype} --batch-size {self.batch_size}"
        return [*text.split(), *data, *(["--clip", str(self.clip)] if self.clip else [])]

    def __str__(self) -> str:
        node = f"nodes of {self.node_size}" if self.node_size else "one node"
        name = f"{self.ranks} ranks, {self.servers} servers, {node}, {self.reduce}, {self.dtype}"
        return f"{name}, clipped" if self.clip else name


WORLDS = [(n, s) for n, s in itertools.product((1, 2, 3, 4, 8), (0, 1, 2)) if s < n]
# All worlds, node sizes and ways to reduce, with one dtype or the other.
EVERY = [
    Case(n, s, node, reduce, list(TOLERANCE)[(k + node + way) % 2])
    for k, (n, s) in enumerate(WORLDS)
    for node in (0, 1, 2)
    if node < n
    for way, reduce in enumerate(("shared", "allreduce"))
]
# A third of the worlds and node sizes under each way to reduce, so that every pair occurs.
SOME = [
    Case(n, s, node, ("auto", "shared", "allreduce")[(k + node) % 3], dtype, clip)
    for k, (n, s) in enumerate(WORLDS)
    for node in (0, 1, 2)
    if node < n
    for dtype in ("float32" if (k + node) % 2 else "float64",)
    for clip in (0.2 if (k + node) % 4 == 3 else 0.0,)
]


def distances(out: Path, case: Case, data: Sequence[str]) -> dict[str, float]:
    """Return ``|a - b| / |b|`` of each tensor of a finished run and of the serial one."""
    config = resolve(parse_command_line(case.options(data)).options)
    expected = serial_sync(config, case.workers)
    checkpoint = final(out)
    found = checkpoint.layout.views(checkpoint.read_params())
    assert found.keys() == expected.keys()
    norm = np.linalg.norm
    return {k: float(norm(found[k] - b) / norm(b)) for k, b in expected.items()}


def check_all(cases: list[Case], folder: Path, timeout_s: float) -> None:
    """Run all cases in one world, some twice; compare with the serial run and the twin."""
    plan, twins, data = Plan(folder), cases[::TWIN_EVERY], few_digits(folder, SAMPLES)
    for case in cases:
        plan.add(f"{case}", case.ranks, case.options(data))
        if case in twins:
            plan.add(f"{case}, again", case.ranks, case.options(data))
    plan.run(timeout_s)
    for case in cases:
        found = distances(plan.out(f"{case}"), case, data)
        assert max(found.values()) <= TOLERANCE[case.dtype], f"{case}: {found}"
    for case in twins:
        assert_same_state(final(plan.out(f"{case}")), final(plan.out(f"{case}, again")))


ONE_MPI, OTHER_MPI = pytest.mark.one_mpi, [pytest.mark.long, pytest.mark.other_mpi]


@pytest.mark.parametrize("part", [pytest.param(0, marks=ONE_MPI), pytest.param(1, marks=OTHER_MPI)])
def test_sync_equals_a_serial_run(part: int, tmp_path: Path) -> None:
    """Every world and node size, and every way to reduce; after two epochs."""
    cases = (SOME[::4], SOME[1::2])[part]
    assert {c.reduce for c in cases} == {"auto", "shared", "allreduce"}
    check_all(cases, tmp_path, 300)


@pytest.mark.long
@pytest.mark.one_mpi
def test_every_sync_run_equals_a_serial_run(tmp_path: Path) -> None:
    """The product of worlds, servers, node sizes, and ways to reduce; and what is left of some."""
    check_all(list(dict.fromkeys([*EVERY, *SOME[2::4]])), tmp_path, 1200)
