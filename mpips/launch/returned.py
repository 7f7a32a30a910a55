"""Moves of a job to hosts that answer again, or are new.

A move saves the run, ends the attempt and starts the next one on all hosts that answer. So no step
is repeated. A job moves if it then ends earlier, despite the restart.

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

ASK_S = 15.0  # between two questions to hosts that the attempt does not use


def find_again(text: str, ranks: int | None, known: Sequence[Host]) -> Sequence[Host]:
    """Return the current hosts of a job, from a file or from SLURM.

    Args:
        text: See `find_hosts`.
        ranks: See `find_hosts`.
        known: Hosts found first; returned if the current ones cannot be read.
    """
    if text == SLURM:
        return _grown(known)
    with contextlib.suppress(UserError):  # the file may be incomplete at this time
        return find_hosts(text, ranks)
    return known


def _grown(known: Sequence[Host]) -> Sequence[Host]:
    """Return the nodes of an allocation, with nodes that joined it later.

    Each new node has as many ranks as the largest known one. A heterogeneous job cannot grow. srun
    reads the nodes of its allocation from the environment, so this function sets the variable.
    """
    nodes = slurm.shown(os.environ.get("SLURM_JOB_ID", ""), "NodeList")
    if not nodes or any(host.component >= 0 for host in known):
        return known
    names = slurm.ask("scontrol", "show", "hostnames", nodes, stderr=subprocess.DEVNULL).split()
    largest, known_names = max(host.ranks for host in known), {host.name for host in known}
    new = [Host(name, largest) for name in names if name not in known_names]
    if new:
        os.environ["SLURM_JOB_NODELIST"] = nodes
    return [*known, *new]


class HostReturn:
    """Decides whether a job moves to hosts that are back.

    The estimated gain assumes that speed is proportional to the number of ranks. The cost is the
    duration of the last start, until progress is first reported. After a move, it includes the time
    to save.

    Args:
        placement: Hosts of the job.

    Attributes:
        asked: Whether the attempt has to save and end for a move.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement, self.asked = placement, False
        self._begin = self._cost_s = 0.0
        self._judged: list[str] = []  # hosts back at the last decision of this attempt
        self._question: Question | None = None
        self._asked_at, self._names = 0.0, set[str]()  # time of the question, and its hosts
        self._answered: set[str] = set()  # hosts that answered the last question

    def begin(self, now: float) -> None:
        """Record that an attempt begins.

        Args:
            now: Seconds on the clock of all calls.
        """
        if not self.asked:
            self._begin = now
        self.asked, self._cost_s, self._judged, self._answered = False, 0.0, [], set()

    def look(self, run: Run | None, now: float) -> str:
        """Check whether hosts are back, without waiting.

        Return the decision as text, empty for none.

        Args:
            run: Run of the attempt; None if none has begun.
            now: See `begin`.
        """
        rest_s = run.rest_s() if run is not None else None
        if rest_s is None or self.asked:
            return ""
        self._cost_s = self._cost_s or now - self._begin
        back = self.back(now)
        ranks, more = self._placement.ranks, self._placement.ranks_with(back)
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
        """Ask hosts that the attempt does not use, and do not wait. Return the hosts that are back.

        A host is back if it has answered two questions in a row. A host that answers, but on which
        no rank began, is not asked.

        Args:
            now: See `begin`.
        """
        placement = self._placement
        if self._question is None:
            if now - self._asked_at >= ASK_S:
                self._asked_at = now
                placement.find_again()
                silent = {k for k, text in placement.trouble.items() if text.startswith(NONE_BEGUN)}
                known = silent.union(host.name for host in placement.used)
                self._names = {host.name for host in placement.hosts} - known
                if placement.ranks < placement.wanted and self._names:
                    self._question = placement.remote.begin(self._names)
            return []
        if self._question.is_open():
            return []
        answered = self._names - set(placement.remote.end(self._question))
        twice, self._question, self._answered = answered & self._answered, None, answered
        return sorted(twice)

    def end(self) -> None:
        """Stop waiting for answers."""
        if self._question is not None:
            self._placement.remote.end(self._question)
        self._question = None
