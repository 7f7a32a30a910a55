"""Counted tries of a job of SLURM, and their limit.

SLURM starts a requeued job under its old number: each start is a try. A try counts if the job ended
by itself and was not done, or if its ranks were asked to save as soon as it had begun. A try that
SLURM or a user has ended does not count: a preemption, a lost node, a signal.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpips.launch.verdict import no_further

MOST = 3  # tries that count, one after the other, before a job gives up


class Try(NamedTuple):
    """A try that counts.

    Attributes:
        job: As SLURM calls it, such as ``17`` or ``17_2``.
        restart: How often SLURM had started it again.
        step: Of the newest checkpoint at its end; -1 where there is none.
        hurried: Whether it was asked to save as soon as it had begun; else it ended by itself.
    """

    job: str
    restart: int
    step: int
    hurried: bool = False


def gets_no_further(tries: Sequence[Try]) -> bool:
    """Whether a job has ended by itself too often since it saved something that is newer.

    Args:
        tries: Tries that count, all of one job.
    """
    return no_further([one.step for one in tries if not one.hurried], MOST - 1)


def is_hurried(tries: Sequence[Try]) -> bool:
    """Whether a job was asked to save as soon as it had begun in each of its last starts.

    Args:
        tries: Tries that count, all of one job.
    """
    last = tries[-MOST:]
    if len(last) < MOST or not all(one.hurried for one in last):
        return False
    return [one.restart for one in last] == list(range(last[0].restart, last[0].restart + MOST))


def note(out: Path, one: Try) -> list[Try]:
    """Note a try beside the folder of its run; returns those of its job, this one last.

    Where it cannot be written, only this one is known.
    """
    path = _file(out)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(f"{json.dumps(one._asdict())}\n")
        return [known for known in _read(path) if known.job == one.job]
    return [one]


def forget(out: Path) -> None:
    """Remove what was noted of a run that is done."""
    with contextlib.suppress(OSError):  # the run is done, whatever is left
        _file(out).unlink()


def _file(out: Path) -> Path:
    """Return the file of a run's tries: its folder may not be there, and is to be empty then."""
    return Path(f"{out}.tries")


def _read(path: Path) -> list[Try]:
    found = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):  # a line of a disk that was full
            found.append(Try(**json.loads(line)))
    return found
