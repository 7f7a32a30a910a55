"""Order of a job: the program, its ranks and hosts, and limits."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpips.config.command_line import load, parse_command_line
from mpips.errors import UserError
from mpips.launch.hosts import Host


def is_program(words: Sequence[str]) -> bool:
    """Return whether words are a user's program with its options, and not options of a job."""
    return bool(words) and (words[0].endswith(".py") or (words[0] == "-m" and len(words) > 1))


@dataclass(frozen=True)
class Order:
    """A job to run, with its ranks, hosts and limits.

    Attributes:
        ranks: Number of ranks; with `hosts`, the number if no host is missing.
        words: Options of mpips.train, or a program or ``-m MODULE`` with its own options.
        launcher: Launcher with its options; empty for mpirun.
        restarts: Largest number of restarts.
        timeout_s: Seconds without progress after which the job is ended; 0 to let its ranks decide.
        survives: Whether ranks of a program continue when others die.
        hosts: Hosts, with the largest number of ranks of each; empty for this host, or for hosts
            that the launcher's options name.
        least: Smallest number of ranks with which the job continues when hosts are lost.
        remote: Remote command; empty for ssh, or for srun if `slurm`.
        slurm: Whether the hosts are nodes of a SLURM allocation.
        again: Returns the current hosts; None if they never change.
        grows: Whether the job uses all ranks of the hosts that `again` returns.
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
        """Whether the job may use other hosts."""
        return bool(self.hosts or self.launcher)

    @property
    def is_program(self) -> bool:
        """Whether the words are a user's program."""
        return is_program(self.words)

    @property
    def goes_on(self) -> bool:
        """Whether the mode and the options let the job continue when a rank dies."""
        if self.is_program:
            return self.survives  # its modes are unknown before it runs
        with contextlib.suppress(UserError):  # the ranks print the error
            config = load(self.words)
            return config.mode in ("async", "ssp") or config.on_death == "shrink"
        return False

    @functools.cached_property
    def begins_run(self) -> bool:
        """Whether the job begins a run to watch.

        An evaluation, ``--explain`` and the doctor begin none.

        Raises:
            UserError: If an option is not valid, or asks for a text that needs no ranks.
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
        with contextlib.suppress(UserError):  # the ranks print the error
            return not load(self.words).eval_only
        return True
