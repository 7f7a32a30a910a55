"""Whole jobs with header words that refuse to be touched by anything but publish and observe.

The check of the source (`tests/test_imports.py`) goes by names; this one goes by the memory.
"""

import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from verdict import check

from mpips.config.command_line import parse_command_line
from mpips.kernels import atomics
from mpips.mpi.window import Window
from mpips.mpi.world import Cluster
from mpips.session import run as session

pytestmark = [pytest.mark.mpi, pytest.mark.world(max_size=3)]

HEADERS = {"header", "applied", "granted_reads", "wants", "reads", "pushed", "taken", "carried"}
HELD = HEADERS - {"carried"}
LOCAL = HELD - {"granted_reads", "wants", "reads"}
GRANTS_DATA = 8  # first word of a worker's line of grants that is data; word 0 is published


class Guarded(np.ndarray):
    """Words that nothing may read or write: `publish` and `observe` are given the plain view."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise AssertionError(f"a header word was touched: {args} {kwargs}")

    __setitem__ = __getitem__ = __iter__ = __array_ufunc__ = __array_function__ = _refuse
    tolist = item = copy = fill = sum = max = min = astype = all = any = _refuse  # type: ignore[assignment]


class GuardedGrants(np.ndarray):
    """The coordinator's grants: a line a worker, guarded up to its data."""

    def __getitem__(self, index: Any) -> np.ndarray:
        if self.ndim == 2:
            assert isinstance(index, int)
            return super().__getitem__(index)
        assert isinstance(index, slice)
        assert index.start >= GRANTS_DATA, index
        return super().__getitem__(index).view(np.ndarray)

    def __setitem__(self, index: Any, value: Any) -> None:
        assert self.ndim == 1
        assert isinstance(index, slice)
        assert index.start >= GRANTS_DATA, index
        super().__setitem__(index, value)


def _find_ahead(*args: Any) -> int:
    *arrays, first = args
    return atomics.find_ahead(*(array.view(np.ndarray) for array in arrays), first)


GUARDED = tuple(f"mpips.{room}." for room in ("snapshot", "ps", "tables", "failover", "transport"))
GUARDS: dict[str, Callable[..., Any]] = {
    "publish": lambda w, i, v: atomics.publish(w.view(np.ndarray), i, v),
    "observe": lambda w, i: atomics.observe(w.view(np.ndarray), i),
    "find_ahead": _find_ahead,
}


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hand out guarded views from now on; returns the names of the fields assigned."""
    plain, seen = Window.view, list[str]()

    def view(window: Window, rank: int, name: str) -> np.ndarray:
        seen.append(name)
        found = plain(window, rank, name)
        if name == "grants":
            return found.view(GuardedGrants)
        return found.view(Guarded) if name in HEADERS else found

    monkeypatch.setattr(Window, "view", view)
    for late in ("ps.first_n", "strategies.async_sgd"):  # imported by jobs that need them
        importlib.import_module(f"mpips.{late}")
    for name, module in list(sys.modules.items()):
        if name.startswith(GUARDED):
            for what in GUARDS.keys() & vars(module).keys():
                monkeypatch.setattr(module, what, GUARDS[what])
    return seen


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        pytest.param("--mode=async --read=consistent", HELD, marks=pytest.mark.mpi(min_size=2)),
        pytest.param("--mode=ssp --node-aggregation", LOCAL, marks=pytest.mark.mpi(min_size=2)),
        pytest.param("--mode=easgd --tau=2", LOCAL | {"grants"}, marks=pytest.mark.mpi(min_size=2)),
        pytest.param(
            "--mode=sync --servers=1 --backup-workers=1", LOCAL, marks=pytest.mark.mpi(min_size=3)
        ),
        ("--mode=sync", {"header"}),
    ],
)
def test_jobs_touch_no_header_word(
    cluster: Cluster, node_size: int, options: str, fields: set[str], guarded: list[str]
) -> None:
    folder = cluster.comm.bcast(tempfile.mkdtemp() if cluster.rank == 0 else None)
    where = Path(folder)
    words = f"{options} --epochs=1 --batch-size=200 --hidden=8 --quiet --node-size={node_size}"
    line = parse_command_line([*words.split(), f"--out={where / 'run'}", "--eval-every=0"])
    code = session.run(line, time.perf_counter())
    check(cluster.comm, code == 0, code)
    seen = set().union(*cluster.comm.allgather(set(guarded)))
    if cluster.nodes == 1:  # what is near is viewed
        check(cluster.comm, fields <= seen, fields - seen)
    if "aggregation" in options and cluster.nodes == 2 and cluster.world == 4:
        check(cluster.comm, "carried" in seen, seen)
    if cluster.rank == 0:
        summary = json.loads((where / "run" / "summary.json").read_text())
        shutil.rmtree(where)
        assert summary["epochs"] == 1
        assert summary["pushes_sent"] == summary["pushes_applied"] > 0


def test_guarded_words_refuse() -> None:
    words = np.zeros(8, "i8").view(Guarded)
    for touch in (
        lambda: words[0],
        lambda: words.__setitem__(0, 1),
        lambda: words + 1,
        lambda: np.copyto(np.zeros(8, "i8"), words),
        lambda: words.tolist(),
        lambda: list(words),
    ):
        with pytest.raises(AssertionError, match="touched"):
            touch()
