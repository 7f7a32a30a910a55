"""Verdict on an attempt or a try of SLURM: restart or end.

A supervisor starts its job several times; each start is an attempt. SLURM starts a requeued job
under its old number; each start is a try. A try counts if the job ended by itself and was not done,
or if it had to save soon after it began. A try that SLURM or a user has ended does not count: a
preemption, a lost node, a signal.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpips.errors import Exit

ATTEMPTS = 2  # largest number of attempts in a row without progress
TRIES = 3  # largest number of tries in a row that count and make no progress


@dataclass(frozen=True)
class Attempt:
    """Result of one start of a job.

    Attributes:
        code: Exit code of the ranks, else of mpirun; negative if a signal ended mpirun. It never
            proves that a run is complete.
        seconds: Duration.
        trouble: Why the supervisor ended it; empty if it ended by itself.
        runs: Number of runs that began. The following attributes describe the last one.
        done: Whether the run is complete, as its file DONE says.
        reason: Why the run ended; empty if it did not report its end.
        step: Step of its newest checkpoint; -1 if there is none.
        told_step: Last step that it reported.
        resumes: Whether the next attempt would continue it.
        reported: Whether a rank reported its exit code.
        asked_to_move: Whether the supervisor asked it to save, in order to move to other hosts.
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
        """Whether it was saved in order to move to other hosts."""
        return self.asked_to_move and self.code == Exit.SAVED and not self.trouble

    @property
    def got(self) -> tuple[int, int]:
        """Progress that compares.

        A checkpoint of step 0 is none: the run may never reach the next one.
        """
        return self.runs, max(self.step, 0)

    @property
    def begun(self) -> bool:
        """Whether a run began."""
        return self.runs > 0

    @property
    def refusal(self) -> int:
        """Exit code of a failure in mpips itself; DONE for other ends."""
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
    """End of a job.

    Attributes:
        code: Exit code.
        why: Message for the user; may be empty.
    """

    code: int
    why: str


def verdict(attempts: Sequence[Attempt], restarts: int, asked: str = "") -> Verdict | None:
    """Return how a job ends after its last attempt, or None to start it again.

    Args:
        attempts: All attempts so far, at least one.
        restarts: Largest number of restarts.
        asked: Signal that asked the job to end; empty for none.
    """
    last = attempts[-1]
    if last.done:
        return Verdict(Exit.DONE, "")
    if last.moves and not asked:
        return None
    stopped = last.reason.startswith("SIG") and (asked or not last.asked_to_move)
    saved = last.code == Exit.SAVED and not last.trouble
    if saved or (stopped and last.step >= last.told_step):
        return Verdict(Exit.SAVED, "saved and not finished: the next start goes on from there")
    if asked and not last.begun:
        return Verdict(Exit.SAVED, f"{asked} before a run began: run it again")
    if stopped or asked:
        why = f"{asked or last.reason}, and it has not saved; step {last.step} was saved before"
        return Verdict(Exit.FAILED, why)
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
    """Return the verdict on a job that begins no run: the exit code that its ranks reported.

    If no rank has reported one, the job is started once more.
    """
    last = attempts[-1]
    if last.reported and not last.trouble:
        return Verdict(last.code, "")
    if asked:
        return Verdict(Exit.SAVED, f"{asked}: run it again")
    return Verdict(Exit.FAILED, f"{last}: giving up") if len(attempts) > 1 else None


def without_progress(got: Sequence[Any]) -> int:
    """Return how many attempts or tries in a row, up to the last, made no progress.

    The first one does not count.

    Args:
        got: Progress of each.
    """
    newer = [k for k in range(1, len(got)) if got[k] > max(got[:k])]
    return len(got) - 1 - max(newer, default=0)


class Try(NamedTuple):
    """A try that counts.

    Attributes:
        job: SLURM's name of the job, such as ``17`` or ``17_2``.
        restart: Number of earlier starts of the job by SLURM.
        step: Step of the newest checkpoint at its end; -1 if there is none.
        hurried: Whether it had to save soon after it began; else it ended by itself.
    """

    job: str
    restart: int
    step: int
    hurried: bool = False


def gets_no_further(tries: Sequence[Try]) -> bool:
    """Return whether a job has ended by itself too often without a newer checkpoint.

    Args:
        tries: Tries that count, all of one job.
    """
    return without_progress([each.step for each in tries if not each.hurried]) >= TRIES - 1


def is_hurried(tries: Sequence[Try]) -> bool:
    """Return whether each of a job's last starts had to save soon after it began.

    Args:
        tries: Tries that count, all of one job.
    """
    last = [each.restart for each in tries[-TRIES:] if each.hurried]
    return len(last) == TRIES and last[-1] - last[0] == TRIES - 1


def note(out: Path, this: Try) -> list[Try]:
    """Append a try to the file beside its run's folder.

    Return the tries of its job, this one last.

    If the file cannot be written, return only this one.
    """
    path, tries = tries_file(out), list[Try]()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", errors="replace") as file:
            file.write(f"{json.dumps(this._asdict())}\n")
            file.seek(0)
            for line in file:
                with contextlib.suppress(ValueError, TypeError):  # a line cut off by a full disk
                    tries.append(Try(**json.loads(line)))
    except OSError:
        return [this]
    return [known for known in tries if known.job == this.job]


def tries_file(out: Path) -> Path:
    """Return the path of the file with a run's tries.

    It is beside the run's folder, which does not exist or is empty before the run.
    """
    return Path(f"{out}.tries")
