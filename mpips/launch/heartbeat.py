"""Heartbeat of a rank to its supervisor.

Each rank has two files in a folder of the supervisor. It appends JSON lines to one of them, and at
a signal writes the stacks of its threads to the other. `mpips.launch.watch` reads both files. This
module imports nothing large: a rank imports it before it can handle signals.
"""

import contextlib
import errno
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

DUMP = signal.SIGUSR2  # mpips uses this signal for nothing else
DUMP_REMOTE = signal.SIGALRM  # of the other unused signals, the one that every mpirun forwards
LINES, STACKS = ".jsonl", ".stacks"
CURRENT = "current"  # exists as long as the attempt may run; contains its terms
LOOK_S = 5.0

# This rank's two files, open until the process ends; empty without a supervisor.
_files: list[IO[bytes]] = []


class Terms(NamedTuple):
    """Terms by which a supervisor runs a job.

    Attributes:
        timeout_s: Seconds after which the supervisor ends a job that hangs; 0 for never.
        restarts: Number of restarts left.
        program: Whether the job is a user's program.
        all_end: Why the death of a rank ends all ranks; empty if the others continue.
    """

    timeout_s: float = 300.0
    restarts: int = 0
    program: bool = False
    all_end: str = ""


def begin(folder: Path, name: str) -> None:
    """Report this process to the supervisor, and write the stacks of its threads at a signal.

    The signal handler is C code, so it works while the rank hangs in MPI.

    Args:
        folder: The supervisor's folder.
        name: Rank number as the launcher gives it.

    Raises:
        UserError: If the folder does not exist on this host, or has no space.
    """
    with explained(folder):
        for end in (LINES, STACKS):
            _files.append(open(folder / f"{name}{end}", "ab", buffering=0))  # noqa: SIM115
        for number in (DUMP, DUMP_REMOTE):
            faulthandler.register(number, _files[1])
        pid = os.getpid()
        _write(host=platform.node(), pid=pid, started=int(stat_of(pid)[STARTED]))


def end_when_over(folder: Path) -> None:
    """End this process as soon as the supervisor has ended its attempt.

    The supervisor may not reach this host, and the next attempt writes to the same run.
    """
    _end_if_over(folder / CURRENT)
    threading.Thread(target=watch_over, args=[folder / CURRENT], daemon=True).start()


def watch_over(current: Path) -> NoReturn:
    """Check a file every `LOOK_S` seconds, and end this process once it is gone.

    Each rank runs it in a thread.

    Args:
        current: Path of the file `CURRENT`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # left to the main thread
    while True:
        time.sleep(LOOK_S)
        _end_if_over(current)


def _end_if_over(current: Path) -> None:
    try:
        os.close(os.open(current, os.O_RDONLY))  # unlike stat, open asks the NFS server
    except (FileNotFoundError, NotADirectoryError):
        os.kill(os.getpid(), signal.SIGKILL)  # MPI may wait for lost hosts
    except OSError:
        return  # the file server does not answer, so the file may exist


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block into an error that a supervisor's folder cannot be used."""
    try:
        yield
    except OSError as problem:
        got = f"{folder} on {platform.node()}: {problem.strerror}"
        remedy = "on several nodes start mpips.launch in a folder of all, with --hosts or --mpirun"
        raise UserError(got, "a folder that ranks can write", remedy) from None


def report_run(out: Path, resume: str, log_every_s: float, spares: Sequence[int] = ()) -> None:
    """Report to the supervisor, if there is one, that a run begins. The coordinator calls it.

    Args:
        out: Folder of the run.
        resume: Option ``--resume``.
        log_every_s: Seconds between lines of ``metrics.jsonl``, as long as there are steps.
        spares: Ranks whose death the run survives.

    Raises:
        UserError: If the report cannot be written.
    """
    if _files:
        from mpips.checkpoint.run_folder import METRICS

        metrics = out / METRICS
        size = metrics.stat().st_size if metrics.exists() else 0
        with explained(Path(_files[0].name).parent):
            known = {"resume": resume, "log_every_s": log_every_s, "spares": spares}
            _write(run=str(out.absolute()), size=size, **known)


def terms() -> Terms | None:
    """Return the supervisor's terms; None without a supervisor."""
    if not _files:
        return None
    with contextlib.suppress(OSError):
        return Terms(**json.loads((Path(_files[0].name).parent / CURRENT).read_text()))
    return Terms()  # the attempt has ended, so the supervisor ends the remaining ranks


def timeout_s() -> float:
    """Return the seconds after which a supervisor ends a job that hangs; 0 if none does."""
    known = terms()
    return 0.0 if known is None else known.timeout_s


def beat() -> None:
    """Report progress to the supervisor, if there is one. It needs no disk space."""
    if _files:
        with contextlib.suppress(OSError):
            os.utime(_files[0].fileno())


def report_exit(code: int) -> None:
    """Report this rank's exit code to the supervisor, if there is one."""
    if _files:
        with contextlib.suppress(OSError):  # the supervisor then uses mpirun's exit code
            _write(code=code)


def another_failed() -> bool:
    """Return whether another rank has reported an exit code other than 0."""
    if not _files:
        return False
    mine = Path(_files[0].name)
    for path in sorted(mine.parent.glob(f"*{LINES}")):  # rank 0 prints first
        with contextlib.suppress(OSError, ValueError, IndexError):
            if path != mine and json.loads(path.read_text().splitlines()[-1]).get("code"):
                return True
    return False


def _write(**values: Any) -> None:
    line = json.dumps({**values, "time": time.time()}).encode() + b"\n"
    if _files[0].write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
