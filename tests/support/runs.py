"""What a run leaves, judged from outside: its checkpoints, its summary, its marker."""

import itertools
import json
import os
import random
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import Running, run

from mpips.checkpoint import Checkpoint, list_checkpoints, newest_whole
from mpips.checkpoint.files import folder_step
from mpips.config import Config
from mpips.config.names import SERVED
from mpips.datasets import open_dataset
from tests.chaos.exact import expected_counts, wrong_rows

HERE = Path(__file__).parents[1]
COUNTING = f"{HERE / 'problems' / 'counting.py'}"
MODELS = f"{HERE / 'problems' / 'models.py'}"
SAVED = 85
ENDLESS = 1_000_000  # epochs; the stopping problems ask for a stop there
COUNT = ("--dtype", "float64", "--optimizer", "sgd", "--lr", "1")


def samples_file(path: Path, n: int, features: int = 1) -> str:
    """Write `n` training samples and 4 held-out ones; returns the options that name them."""
    rng = np.random.default_rng(n)
    for name, size in (("train", n), ("test", 4)):
        x = rng.normal(size=(size, features)).astype("f4")
        np.savez(path / f"{name}-{n}.npz", x=x, y=rng.normal(size=size).astype("f4"))
    return str(path / f"train-{n}.npz")


def few_digits(path: Path, n: int) -> list[str]:
    """Write the first `n` digits, all of them to train on; returns the options that name them."""
    with open_dataset(Config()) as digits:
        x, y = digits.train.load(0, n, np.dtype("f8"))
    np.savez(path / f"digits-{n}.npz", x=x, y=y)
    return ["--dataset", str(path / f"digits-{n}.npz"), "--test-dataset", "digits"]


def counting(data: str, *, kind: str = "Counting") -> list[str]:
    """Return the options of a counting job over the file `data`."""
    test = data.replace("train-", "test-")
    files = ["--dataset", data, "--test-dataset", test]
    return ["--problem", f"{COUNTING}:{kind}", *files, *COUNT]


def cases(text: str) -> dict[str, tuple[int, str]]:
    """Return jobs by their names, from lines of ``name: ranks options``."""
    lines = (line.partition(":") for line in text.strip().splitlines())
    jobs = {name.strip(): job.split(maxsplit=1) for name, _, job in lines}
    return {name: (int(ranks), options) for name, (ranks, options) in jobs.items()}


SECONDS: list[tuple[float, str]] = []  # of what shares a world with others, and what it is
AGAIN: list[str] = []  # commands that run again what the test under way has looked at


def thinned(
    names: Iterable[Any], quick: Collection[Any], both: Collection[Any] | None = None
) -> Any:
    """Return parameters: `quick` ones run with each MPI, or those in `both`.

    The others are long, and the MPIs take turns with them.
    """
    found, each = list(names), quick if both is None else both
    assert set(each) <= set(quick) <= set(found), (each, set(quick) - set(found))
    turns = itertools.cycle([pytest.mark.one_mpi, pytest.mark.other_mpi])

    def marks(name: Any) -> list[pytest.MarkDecorator]:
        if name in quick:
            return [] if name in each else [pytest.mark.one_mpi]
        return [pytest.mark.long, next(turns)]

    return [pytest.param(name, marks=marks(name)) for name in found]


def names_asked(request: pytest.FixtureRequest) -> set[str]:
    """Return the tests of this module that are to be run, and each ``name`` they are run with."""
    items = [item for item in request.session.items if item.path == request.path]
    given = {item.callspec.params.get("name", "") for item in items if hasattr(item, "callspec")}
    return given | {item.name.partition("[")[0] for item in items}


class Plan:
    """Jobs for one world, and where each of them leaves its run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: list[str] = []
        self._jobs: list[tuple[int, list[str]]] = []
        self._codes: list[int] = []
        self._outputs: list[str] = []

    def out(self, name: str) -> Path:
        AGAIN.extend(self._command(k) for k, other in enumerate(self._names) if other == name)
        return self.folder / name.replace(" ", "-")

    def _command(self, job: int) -> str:
        ranks, words = self._jobs[job]
        return f"mpirun -n {ranks} python -m mpips.train {shlex.join(words)}"

    def names(self, begin: str) -> list[str]:
        """Return the names of runs that begin so, in their order."""
        return list(dict.fromkeys(name for name in self._names if name.startswith(begin)))

    def outputs(self, name: str) -> list[str]:
        """Return what each job of a run has printed."""
        return [text for k, text in zip(self._names, self._outputs, strict=True) if k == name]

    def errors(self) -> list[str]:
        """Return what any job has printed as ours, lines; those on stderr may come a job late."""
        return [k for text in self._outputs for k in text.splitlines() if k.startswith("mpips: ")]

    def add(
        self, name: str, ranks: int, options: Sequence[str], code: int = 0, quiet: bool = True
    ) -> None:
        """Add a job that should end with `code`: a run's first part, or one that resumes it."""
        words = [*options, "--out", str(self.out(name)), *["--quiet"] * quiet]
        self._names.append(name)
        self._jobs.append((ranks, words))
        self._codes.append(code)

    def run(self, timeout_s: float, cwd: Path | None = None) -> None:
        """Run all of them in one world, one after the other, each on as many ranks as it says."""
        file, world = self.folder / "jobs.json", max(ranks for ranks, _ in self._jobs)
        file.write_text(json.dumps(self._jobs))
        script = [str(HERE / "jobs" / "several.py"), str(file)]
        done = run(world, script, cwd or self.folder, timeout_s)
        print(done.output)
        self._outputs = re.split(r"^== job$", done.output, flags=re.MULTILINE)[1:]
        if done.code and self._outputs:
            AGAIN[:] = [self._command(len(self._outputs) - 1)]
        done.check()
        ended: list[tuple[int, float]] = json.loads(file.with_name("ended.json").read_text())
        module = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
        for name, (ranks, _), (_, seconds) in zip(self._names, self._jobs, ended, strict=True):
            SECONDS.append((seconds, f"{module}: {name}, {ranks} ranks"))
        codes = [code for code, _ in ended]
        pairs = enumerate(zip(codes, self._codes, strict=True))
        wrong = [k for k, (code, expected) in pairs if code != expected]
        AGAIN[:] = [self._command(k) for k in wrong]
        assert not wrong, [(self._names[k], codes[k], self._codes[k]) for k in wrong]


def printed_by(programs: Path, out: Path, request: pytest.FixtureRequest) -> str:
    """Return what programs print, those of the tests to be run, all in one world of three."""
    asked = [item for item in request.session.items if item.path == request.path]
    lines = [mark.args[0] for item in asked if (mark := item.get_closest_marker("program"))]
    script = [str(HERE / "jobs" / "programs.py"), str(programs), str(out), *lines]
    return run(3, script, out, 600).check().output


def newest(out: Path) -> Checkpoint:
    """Return the newest whole checkpoint of a run; no newer one may be damaged."""
    found, complaints = newest_whole(out)
    assert found is not None, complaints
    assert not [c for c in complaints if "never committed" not in c], complaints
    return found


def final(out: Path) -> Checkpoint:
    """Return the last checkpoint of a run that says it is done."""
    assert (out / "DONE").is_file(), "no DONE"
    found = newest(out)
    assert found.step == summary(out)["global_step"]
    return found


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def state(checkpoint: Checkpoint) -> tuple[np.ndarray, ...]:
    """Return parameters and slots as flat vectors, in the order of their names."""
    slots = (checkpoint.read_slot(name) for name in checkpoint.slot_names)
    return (checkpoint.read_params(), *slots)


def assert_same_state(a: Checkpoint, b: Checkpoint) -> None:
    """Assert that two checkpoints hold the same step and the same bits."""
    assert (a.step, a.slot_names) == (b.step, b.slot_names)
    for name, x, y in zip(("params", *a.slot_names), state(a), state(b), strict=True):
        differing = int(np.count_nonzero(x.view(f"u{x.itemsize}") != y.view(f"u{y.itemsize}")))
        assert differing == 0, f"{differing} of {x.size} elements of {name} differ"


def assert_counts(checkpoint: Checkpoint, n: int, epochs: int | None = None) -> None:
    """Assert that what the sample allocator calls applied was applied once on every shard."""
    arrays = checkpoint.layout.views(checkpoint.read_params())
    expected = expected_counts(checkpoint, n)
    if epochs is not None:
        assert np.array_equal(expected, np.full(n, float(epochs))), "the run is not over"
    np.testing.assert_array_equal(arrays["counts"], expected)
    assert wrong_rows(checkpoint, expected) == []
    assert checkpoint.state["samples"] == expected.sum()
    if checkpoint.state["mode"] in SERVED:
        np.testing.assert_array_equal(arrays["updates"], float(checkpoint.step))
        assert sum(checkpoint.state["allocator"]["clocks"]) == checkpoint.step


def starts_of(out: Path) -> int:
    """Return how often a run has begun to train."""
    path = out / "metrics.jsonl"
    return path.read_text().count('"kind": "start"') if path.is_file() else 0


def wait_for(job: Running, ready: Callable[[], bool], timeout_s: float = 90) -> None:
    """Wait while a job gets somewhere."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert job.process.poll() is None, job.output()
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.005)


def wait_until_training(job: Running, out: Path, starts: int) -> None:
    """Wait until the start number `starts` of the run in `out` has led to some steps."""
    wait_for(job, lambda: starts_of(out) >= starts)
    path = out / "metrics.jsonl"
    wait_for(job, lambda: '"kind": "train"' in path.read_text().rpartition('"kind": "start"')[2])


def is_whole(folder: Path) -> bool:
    return (folder / "index.h5").exists()


def newest_step(out: Path) -> int:
    """Return the step of the newest checkpoint that is whole; 0 without any."""
    return max((folder_step(p) or 0 for p in list_checkpoints(out) if is_whole(p)), default=0)


def kill_once(out: Path, ranks: int, options: Sequence[str], when: str) -> bool:
    """Start or resume a run, and kill all of it by SIGKILL at a random moment.

    That is some time after the ``start`` or the ``training`` begins, or, when it has saved once, in
    the ``write`` of a checkpoint. Returns whether one was being written.
    """
    starts, before = starts_of(out) + 1, set(list_checkpoints(out))
    with Running(ranks, ["-m", "mpips.train", *options], out.parent) as job:
        if when != "start":
            wait_for(job, lambda: starts_of(out) >= starts)
        if when == "write":
            wait_for(job, lambda: any(map(is_whole, set(list_checkpoints(out)) - before)))
            wait_for(job, lambda: bool(open_folders(out) - before))
        time.sleep(random.uniform(0, 0.03 if when == "write" else 1))
        assert job.process.poll() is None, job.output()
        job.kill()
    return bool(open_folders(out))


def open_folders(out: Path) -> set[Path]:
    """Return the checkpoints that are not committed."""
    return {folder for folder in list_checkpoints(out) if not is_whole(folder)}
