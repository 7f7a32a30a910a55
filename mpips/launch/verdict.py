"""Verdict on an attempt or a try of SLURM: restart or end.

A supervisor starts its job several times: these are attempts. SLURM starts a requeued job under its
old number: each start is a try, and counts if the job ended by itself and was not done, or if its
ranks were asked to save as soon as it had begun. A try that SLURM or a user has ended does not
count: a preemption, a lost node, a signal.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpips.errors import Exit

ATTEMPTS = 2  # that may get no further, one after the other
TRIES = 3  # of SLURM that count, one after the other, before a job gives up


@dataclass(frozen=True)
class Attempt:
    """What one start of a job has come to.

    Attributes:
        code: Exit code of the ranks, else of mpirun, negative if a signal ended that. It may tell
            what is to be done next, but never that a run is complete.
        seconds: How long it took.
        trouble: Why it was ended from outside; empty if it ended by itself.
        runs: How many runs began, one after the other; what follows is of the last.
        done: Whether it is complete, by its marker.
        reason: Why it ended, if it came to its end.
        step: Of its newest checkpoint; -1 where there is none.
        told_step: The last step that it told of.
        resumes: Whether the next attempt would go on with it.
        reported: Whether a rank came to its end and told of its exit code.
        asked_to_move: Whether it was asked to save, to go on where hosts are back.
    """

    code: int
    seconds: float = 0.0
    trouble: str = ""
    runs: int = 0
    done: bool = False
    reason: str = ""
    step: int = -1
    told_step: int = -1
    resumes: bool = True
    reported: bool = False
    asked_to_move: bool = False

    @property
    def moves(self) -> bool:
        """Whether it was saved to go on where hosts are back."""
        return self.asked_to_move and self.code == Exit.SAVED and not self.trouble

    @property
    def got(self) -> tuple[int, int]:
        """How far it got. To save the beginning is no more than to begin: it may come too late."""
        return self.runs, max(self.step, 0)

    @property
    def begun(self) -> bool:
        """Whether a run began."""
        return self.runs > 0

    @property
    def refusal(self) -> int:
        """The exit code by which mpips itself has failed; DONE if it was something else."""
        ours = self.code in (Exit.FAILED, Exit.REFUSED) and not self.trouble
        return self.code if ours else Exit.DONE

    def __str__(self) -> str:
        how = self.trouble or f"ended with code {self.code}"
        if not self.trouble and self.code < 0:
            how = f"mpirun was killed by signal {-self.code}"
        if not self.begun:
            return f"{self.seconds:.1f} s, {how}, no run began"
        saved = f"step {self.step} is saved" if self.step >= 0 else "nothing is saved"
        return f"{self.seconds:.1f} s, {how}; step {max(self.told_step, self.step)}, {saved}"


class Verdict(NamedTuple):
    """The end of a job.

    Attributes:
        code: Exit code.
        why: What to say about it; may be empty.
    """

    code: int
    why: str


def verdict(attempts: Sequence[Attempt], restarts: int, asked: str = "") -> Verdict | None:
    """Return how a job ends with the last of its attempts, or None to start it again.

    Args:
        attempts: So far, at least one.
        restarts: How often it may be started again.
        asked: What it was asked to end by; empty if it was not.
    """
    last = attempts[-1]
    if last.done:
        return Verdict(Exit.DONE, "")
    if last.moves and not asked:
        return None
    if last.reason.startswith("SIG") or (last.code == Exit.SAVED and not last.trouble):
        return Verdict(Exit.SAVED, "saved and not finished: the next start goes on from there")
    if asked and not last.begun:
        return Verdict(Exit.SAVED, f"{asked} before a run began: run it again")
    if asked:
        return Verdict(
            Exit.FAILED, f"{asked}, and it has not saved; step {last.step} was saved before"
        )
    if last.reason == "diverged":
        return Verdict(Exit.FAILED, "the loss is not finite, and would not be again")
    if last.refusal == Exit.REFUSED and not any(a.begun for a in attempts):
        return Verdict(Exit.REFUSED, "")
    if not last.begun and last.code == 0 and not last.trouble:
        return Verdict(
            Exit.FAILED, "it ended without a run of mpips: there is nothing to watch over"
        )
    code = last.refusal or Exit.FAILED
    if last.begun and not last.resumes:
        return Verdict(code, 'the program does not say resume="auto": it would begin anew')
    same = bool(last.refusal) and [a.refusal for a in attempts[-2:-1]] == [last.refusal]
    if without_progress([a.got for a in attempts]) >= (1 if same else ATTEMPTS):
        where = f"no further than step {last.step}" if last.step >= 0 else "nothing is saved"
        return Verdict(code, f"{where} in {2 if same else ATTEMPTS + 1} attempts: giving up")
    if len(attempts) - sum(a.moves for a in attempts) > restarts:
        return Verdict(code, f"started again {restarts} times: giving up")
    return None


def verdict_without_run(attempts: Sequence[Attempt], asked: str = "") -> Verdict | None:
    """Return `verdict` of a job that begins no run: what its ranks have told of.

    It is started once more if they have not got as far.
    """
    last = attempts[-1]
    if last.reported and not last.trouble:
        return Verdict(last.code, "")
    if asked:
        return Verdict(Exit.SAVED, f"{asked}: run it again")
    return Verdict(Exit.FAILED, f"{last}: giving up") if len(attempts) > 1 else None


def without_progress(got: Sequence[Any]) -> int:
    """Return how many of the last attempts or tries, but the first, have saved nothing newer.

    Args:
        got: How far each got.
    """
    newer = [k for k in range(1, len(got)) if got[k] > max(got[:k])]
    return len(got) - 1 - max(newer, default=0)


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
    """Return whether a job has ended by itself too often since it saved something that is newer.

    Args:
        tries: Tries that count, all of one job.
    """
    return without_progress([one.step for one in tries if not one.hurried]) >= TRIES - 1


def is_hurried(tries: Sequence[Try]) -> bool:
    """Return whether a job was asked to save as soon as it had begun in each of its last starts.

    Args:
        tries: Tries that count, all of one job.
    """
    last = [one.restart for one in tries[-TRIES:] if one.hurried]
    return len(last) == TRIES and last[-1] - last[0] == TRIES - 1


def note(out: Path, one: Try) -> list[Try]:
    """Note a try beside the folder of its run; returns those of its job, this one last.

    Where it cannot be written, only this one is known.
    """
    path, found = tries_file(out), list[Try]()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", errors="replace") as file:
            file.write(f"{json.dumps(one._asdict())}\n")
            file.seek(0)
            for line in file:
                with contextlib.suppress(ValueError, TypeError):  # of a disk that was full
                    found.append(Try(**json.loads(line)))
    except OSError:
        return [one]
    return [known for known in found if known.job == one.job]


def tries_file(out: Path) -> Path:
    """Return the file of a run's tries: its folder may not be there, and is to be empty then."""
    return Path(f"{out}.tries")
