"""Heartbeat of a rank to its supervisor.

Each rank has two files in a folder of the supervisor: lines that it tells, and the stacks of its
threads, which it writes at a signal. `mpips.launch.watch` reads them. Loads nothing heavy:
a rank begins with it, before it can note signals.
"""

import contextlib
import faulthandler
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from mpips.errors import UserError
from mpips.mpi.process import STARTED, stat_of

DUMP = signal.SIGUSR2  # which mpips does not use
DUMP_REMOTE = signal.SIGALRM  # of those that are left, the one that every mpirun hands on
LINES, STACKS = ".jsonl", ".stacks"
CURRENT = "current"  # there as long as the job of the folder may run: its terms
LOOK_S = 5.0

# What this rank tells, and its stacks, for the whole of its life; empty without a supervisor.
_files: list[IO[bytes]] = []


class Terms(NamedTuple):
    """What a supervisor does for a job.

    Attributes:
        timeout_s: After how long ranks that hang are ended from outside; 0 if they never are.
        restarts: How often the job may be started again.
        program: Whether it is a program of the user's.
        alone: Why MPI is not to let ranks go on where others die; empty if it is.
    """

    timeout_s: float = 300.0
    restarts: int = 0
    program: bool = False
    alone: str = ""


def begin(folder: Path, name: str) -> None:
    """Tell the supervisor of this process, and write the stacks of its threads at a signal.

    The handler is C: it works while the rank is stuck in MPI.

    Args:
        folder: The supervisor's.
        name: The rank, as the launcher calls it.

    Raises:
        UserError: If this host does not have the folder, or no space.
    """
    with _explained(folder):
        for end in (LINES, STACKS):
            _files.append(open(folder / f"{name}{end}", "ab", buffering=0))  # noqa: SIM115
        for number in (DUMP, DUMP_REMOTE):
            faulthandler.register(number, _files[1])
        pid = os.getpid()
        _tell(host=platform.node(), pid=pid, started=int(stat_of(pid)[STARTED]))


def end_when_over(folder: Path) -> None:
    """End this process as soon as its attempt is over for the supervisor.

    That may not reach this host, and the next attempt writes to the same run.
    """
    _end_if_over(folder / CURRENT)
    threading.Thread(target=watch_over, args=[folder / CURRENT], daemon=True).start()


def watch_over(current: Path) -> NoReturn:
    """End this process when a file is gone: what a thread of each rank does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    while True:
        time.sleep(LOOK_S)
        _end_if_over(current)


def _end_if_over(current: Path) -> None:
    try:
        os.close(os.open(current, os.O_RDONLY))  # NFS asks its server, as it does not for stat
    except (FileNotFoundError, NotADirectoryError):
        os.kill(os.getpid(), signal.SIGKILL)  # MPI may wait for hosts that are gone
    except OSError:
        return  # a file server that does not answer says nothing


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        got = f"{folder} on {platform.node()}: {problem.strerror}"
        remedy = "on several nodes start mpips.launch in a folder of all, with --hosts or --mpirun"
        raise UserError(got, "a folder that ranks can write", remedy) from None


def tell_run(out: Path, resume: str, log_every_s: float, spares: Sequence[int] = ()) -> None:
    """Tell the supervisor, if there is one, that this rank is the coordinator of a run that begins.

    Args:
        out: The run's folder.
        resume: The option.
        log_every_s: Seconds between lines of ``metrics.jsonl``, if there are steps.
        spares: Ranks that it goes on without if they die.

    Raises:
        UserError: If it cannot be told.
    """
    if _files:
        from mpips.checkpoint.run_folder import METRICS

        metrics = out / METRICS
        size = metrics.stat().st_size if metrics.exists() else 0
        with _explained(Path(_files[0].name).parent):
            known = {"resume": resume, "log_every_s": log_every_s, "spares": spares}
            _tell(run=str(out.absolute()), size=size, **known)


def terms() -> Terms | None:
    """Return what the supervisor does for this job; None without one."""
    if not _files:
        return None
    with contextlib.suppress(OSError):
        return Terms(**json.loads((Path(_files[0].name).parent / CURRENT).read_text()))
    return Terms()  # the attempt is over: it ends what is left


def timeout_s() -> float:
    """Return after how long a supervisor ends a job that hangs; 0 if there is none that does."""
    found = terms()
    return 0.0 if found is None else found.timeout_s


def beat() -> None:
    """Tell the supervisor, if there is one, that this rank has got on. Needs no space on a disk."""
    if _files:
        with contextlib.suppress(OSError):
            os.utime(_files[0].fileno())


def tell_end(code: int) -> None:
    """Tell the supervisor, if there is one, that this rank has come to its end, and its code."""
    if _files:
        with contextlib.suppress(OSError):  # mpirun's code will do
            _tell(code=code)


def another_failed() -> bool:
    """Return whether another rank has told a supervisor of an exit code that is not 0."""
    if not _files:
        return False
    mine = Path(_files[0].name)
    for path in mine.parent.glob(f"*{LINES}"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if path != mine and json.loads(path.read_text().splitlines()[-1]).get("code"):
                return True
    return False


def _tell(**values: Any) -> None:
    _files[0].write(json.dumps({**values, "time": time.time()}).encode() + b"\n")
