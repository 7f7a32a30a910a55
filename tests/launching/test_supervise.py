"""Jobs under a supervisor: ranks that die or hang, and what is left of them in the end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from launch import environment
from runs import counting, final, is_whole, samples_file, starts_of

from mpips.checkpoint import list_checkpoints
from mpips.cluster import segments
from mpips.launch import __main__ as command
from mpips.launch import mpirun

N = 230
FAULTY = Path(__file__).parent.parent / "problems" / "faulty.py"
COUNTS = Path(__file__).parent.parent / "library" / "programs" / "counts.py"
EVERY = ("--checkpoint-every", "5steps")


class Supervised:
    """A supervisor with its job, in a process of its own."""

    def __init__(self, folder: Path, ranks: int, words: Sequence[str], *options: str) -> None:
        self._log = folder / "output.txt"
        words = ["-m", "mpips.launch", "-n", str(ranks), *options, "--", *words]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words], cwd=folder, env=environment(), stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.seen: set[int] = set()
        self._before = segments.present()

    @property
    def output(self) -> str:
        """What was printed so far."""
        return self._log.read_text(errors="replace")

    def family(self) -> list[int]:
        """Return the processes of the job, mpirun's first."""
        found = mpirun.family(self.process.pid)[1:]
        self.seen.update(found)
        return found

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, by rank."""
        found = {mpirun.rank_of(pid): pid for pid in reversed(self.family())}
        return [found[rank] for rank in sorted(r for r in found if r is not None)]

    def wait_for(self, ready: Callable[[], bool], timeout_s: float = 60) -> None:
        """Wait while the job gets somewhere."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait_for_training(self, out: Path, starts: int) -> list[int]:
        """Wait until start number `starts` of a run has saved; returns the ranks by rank."""
        self.wait_for(lambda: starts_of(out) >= starts)
        newest = max(list_checkpoints(out), default=out)
        self.wait_for(lambda: any(is_whole(p) for p in list_checkpoints(out) if p > newest))
        return self.ranks()

    def wait(self, code: int, timeout_s: float = 60) -> str:
        """Wait for the end; returns what was printed. Nothing is left over."""
        assert self.process.wait(timeout_s) == code, self.output
        self.assert_nothing_left()
        return self.output

    def assert_nothing_left(self, within_s: float = 0.0) -> None:
        """Assert that no process and no segment is left that was seen."""
        deadline = time.monotonic() + within_s
        while mpirun.running(self.seen) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert mpirun.running(self.seen) == [], self.output
        new = segments.present() - self._before
        assert not [s for s in new if f"{os.getpid()}" in s.path.name], new


@contextlib.contextmanager
def supervised(*args: object, **options: object) -> Iterator[Supervised]:
    """Leave the block, and the supervisor is gone, and all that is below it."""
    job = Supervised(*args, **options)  # type: ignore[arg-type]
    try:
        yield job
    finally:
        for pid in [job.process.pid, *job.family()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.process.wait(10)
        print(job.output)


# Without ranks.


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--", "the following arguments are required: -n"),
        ("-n 3 --epochs 3", "unrecognized arguments: --epochs 3"),
        ("-n 3", "no --, expected -- before the options of mpips.train, or a program"),
        ("-n 0 --", "-n 0, expected an integer >= 1"),
        ("-n 3 --restarts -1 --", "--restarts -1, expected an integer >= 0"),
        ("-n 3 --timeout nan --", "--timeout nan, expected seconds >= 1"),
        ("-n 3 --mpirun mpirum --", "--mpirun 'mpirum', expected a program on PATH"),
        ("-n 3 -- --epoch 3", "unknown option --epoch, expected one of those that --help lists"),
        ("-n 3 -- --explain", "--explain starts no run, expected options of a run"),
        ("-n 3 -- --eval-only", "--eval-only starts no run, expected options of a run"),
    ],
)
def test_what_is_refused(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words.split()) == 2
    told = capsys.readouterr().err
    assert error in told
    assert told.startswith("mpips: ")


# With ranks.


MODES = {  # samples, epochs, problem, options
    "async": (N, 12, ("SlowCounting", "--servers 2 --batch-size 4")),
    "sync": (128, 60, ("MeanCounting", "--servers 1 --batch-size 8 --lr 32")),
}


@pytest.mark.launch
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_ranks_that_die_and_hang(mode: str, tmp_path: Path) -> None:
    """A worker is killed, a server is stopped; the run is complete and every batch counted once."""
    out, n, epochs, options = tmp_path / "out", *MODES[mode]
    words = [*counting(samples_file(tmp_path, n), kind=options[0]), *options[1].split(), *EVERY]
    words += ["--mode", mode, "--epochs", str(epochs), "--out", str(out)]
    with supervised(tmp_path, 4 + (mode == "sync"), words, "--timeout", "4") as job:
        os.kill(job.wait_for_training(out, 1)[-1], signal.SIGKILL)
        stopped = job.wait_for_training(out, 2)[0]
        os.kill(stopped, signal.SIGSTOP)
        told = job.wait(0)
    assert f"rank 0 (process {stopped} on " in told
    assert told.count("  is stopped\n") == 1
    assert "attempt 2: " in told
    assert starts_of(out) == 3
    counts = final(out).layout.views(final(out).read_params())["counts"]
    assert counts.tolist() == [epochs] * n
