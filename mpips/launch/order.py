"""Order of a job: what is to be run, and how."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpips.config.command_line import load, parse_command_line
from mpips.errors import UserError
from mpips.launch.hosts import Host


@dataclass(frozen=True)
class Order:
    """What is to be run, and how.

    Attributes:
        ranks: How many; with `hosts`, as long as there are hosts for them.
        words: Options of mpips.train, or a program or ``-m MODULE`` with its own.
        launcher: The launcher with its options; empty for mpirun.
        restarts: How often the job may be started again.
        timeout_s: How long it may do nothing; 0 if its ranks are to judge that.
        survives: Whether ranks of a program, too, are to go on where others die.
        hosts: With the number of ranks that each may have; empty for this one, or for those that
            the launcher knows of.
        least: The number of ranks with which the job goes on, if hosts are gone.
        remote: The remote command; empty for ssh, or for srun with `slurm`.
        slurm: Whether the hosts are nodes of an allocation of SLURM.
        again: Returns the hosts as they are by now; None if they never change.
        grows: Whether the job is to have all ranks that they have then.
    """

    ranks: int
    words: Sequence[str]
    launcher: Sequence[str] = ()
    restarts: int = 5
    timeout_s: float = 300.0
    survives: bool = False
    hosts: Sequence[Host] = ()
    least: int = 1
    remote: Sequence[str] = ()
    slurm: bool = False
    again: Callable[[], Sequence[Host]] | None = None
    grows: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may have a part in the job."""
        return bool(self.hosts or self.launcher)

    @property
    def is_program(self) -> bool:
        """Whether the words name a program of the user's."""
        return bool(self.words) and (self.words[0] == "-m" or self.words[0].endswith(".py"))

    @property
    def goes_on(self) -> bool:
        """Whether the job may go on when a rank dies: without rounds, or as it is asked to."""
        if self.is_program:
            return self.survives  # nobody knows its modes before it runs
        try:
            config = load(self.words)
            return config.mode in ("async", "ssp") or config.on_death == "shrink"
        except UserError:
            return False  # the ranks say what is wrong

    @functools.cached_property
    def begins_run(self) -> bool:
        """Whether there is a run to watch over; if not, its ranks end it, and say how.

        There is none in an evaluation, in an explanation, in a doctor's.

        Raises:
            UserError: If an option is illegal, or asks for something that takes no ranks.
        """
        if self.is_program:
            return list(self.words[:3]) != ["-m", "mpips", "doctor"]
        flags = parse_command_line(self.words).flags
        for name in sorted(flags - {"explain"}):
            flag = "--" + name.replace("_", "-")
            remedy = f"give {flag} to mpips.train"
            raise UserError(f"{flag} starts no run", "options of a run", remedy)
        if flags:
            return False
        with contextlib.suppress(UserError):  # the ranks say what is wrong
            return not load(self.words).eval_only
        return True
