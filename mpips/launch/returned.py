"""Moves of a job to hosts that answer again, or are new.

A move saves the run, ends the attempt and starts the next one on all hosts that answer, so that no
step is made twice. It is made where the rest of the run gets shorter by more than it costs.

Environment:
    SLURM_JOB_NODELIST: Set to all nodes of an allocation of SLURM that has grown.
"""

import contextlib
import os
import subprocess
from collections.abc import Sequence

from mpips.errors import UserError, counted
from mpips.launch import slurm
from mpips.launch.hosts import SLURM, Host, find_hosts
from mpips.launch.placement import NONE_BEGUN, Placement
from mpips.launch.remote_execution import Question
from mpips.launch.watch import Run

ASK_S = 15.0  # between two questions to hosts that the attempt lacks


def find_again(text: str, ranks: int | None, known: Sequence[Host]) -> Sequence[Host]:
    """Return the hosts of a job as they are by now: those of a file, or of an allocation.

    Args:
        text: As for `find_hosts`.
        ranks: Likewise.
        known: That were found at first; they stay where nothing else can be read.
    """
    if text == SLURM:
        return _grown(known)
    with contextlib.suppress(UserError):  # a file that is being written
        return find_hosts(text, ranks)
    return known


def _grown(known: Sequence[Host]) -> Sequence[Host]:
    """Return the nodes of an allocation, with those that it did not have at first.

    Each of these has as many ranks as the largest of the others. A heterogeneous job has none. An
    srun takes the nodes of its allocation from the environment, so that they are set there.
    """
    nodes = slurm.shown(os.environ.get("SLURM_JOB_ID", ""), "NodeList")
    if not nodes or any(host.component >= 0 for host in known):
        return known
    names = slurm.ask("scontrol", "show", "hostnames", nodes, stderr=subprocess.DEVNULL).split()
    most, there = max(host.ranks for host in known), {host.name for host in known}
    new = [Host(name, most) for name in names if name not in there]
    if new:
        os.environ["SLURM_JOB_NODELIST"] = nodes
    return [*known, *new]


class Returned:
    """Decides whether a job moves to hosts that are back.

    The gain is estimated as if speed grew with the ranks. The cost is what the last start took, up
    to its first epochs; after a move, with the time to save.

    Args:
        place: Chooses the hosts.

    Attributes:
        asked: Whether the attempt is to save and end for a move.
    """

    def __init__(self, place: Placement) -> None:
        self._place, self.asked = place, False
        self._begin = self._cost_s = 0.0
        self._judged: list[str] = []  # hosts that were said to be back in this attempt
        self._question: Question | None = None
        self._asked_at, self._names = 0.0, set[str]()  # whom it asks
        self._answered: set[str] = set()  # those who have answered the last time

    def begin(self, now: float) -> None:
        """Note that an attempt begins.

        Args:
            now: Seconds on a clock that the looks go by.
        """
        if not self.asked:
            self._begin = now
        self.asked, self._cost_s, self._judged, self._answered = False, 0.0, [], set()

    def look(self, run: Run | None, now: float) -> str:
        """Look whether hosts are back, and wait for nothing; returns what is decided, if anything.

        Args:
            run: Of the attempt; None where none has begun.
            now: Likewise.
        """
        rest_s = run.rest_s() if run is not None else None
        if rest_s is None or self.asked:
            return ""
        self._cost_s = self._cost_s or now - self._begin
        back = self.back(now)
        ranks, more = self._place.ranks, self._place.ranks_with(back)
        if not back or back == self._judged or more <= ranks:
            return ""
        self._judged = back
        gain_s = rest_s * (1 - ranks / more)
        self.asked = gain_s > self._cost_s
        if self.asked:
            self._begin = now
        what = "saving to move there" if self.asked else "staying"
        where = f"on {counted(more, 'rank')} instead of {ranks}"
        gain = f"the run would end about {gain_s:.0f} s earlier"
        cost = f"a restart costs {self._cost_s:.0f} s"
        return f"answering again: {', '.join(back)}; {where} {gain}, {cost}: {what}"

    def back(self, now: float) -> list[str]:
        """Ask hosts that the attempt lacks, and wait for nothing; returns those that are back.

        These have answered twice, one time after the other. A host where no rank has begun is not
        asked: it has answered.

        Args:
            now: Likewise.
        """
        place = self._place
        if self._question is None:
            if now - self._asked_at >= ASK_S:
                self._asked_at = now
                place.find_again()
                silent = {k for k, text in place.trouble.items() if text.startswith(NONE_BEGUN)}
                known = silent.union(host.name for host in place.used)
                self._names = {host.name for host in place.hosts} - known
                if place.ranks < place.wanted and self._names:
                    self._question = place.reach.begin(self._names)
            return []
        if self._question.is_open():
            return []
        answered = self._names - set(place.reach.end(self._question))
        found, self._question, self._answered = answered & self._answered, None, answered
        return sorted(found)

    def end(self) -> None:
        """Wait for no answer any longer."""
        if self._question is not None:
            self._place.reach.end(self._question)
        self._question = None
