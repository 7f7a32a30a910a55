"""SLURM's side of a job: launcher, controller, messages of steps.

Environment:
    LAUNCHER: ``srun`` or ``mpirun``, which starts the ranks of a job script. Default: ``srun``
        where it has the plugin for the MPI in use.
    LAUNCHER_FLAGS: More options of that launcher, such as ``--mpi=pmix_v4``.
    SLURM_HET_SIZE: Components of a heterogeneous job.
    I_MPI_PIN, I_MPI_PIN_DOMAIN: Set for the ranks of a job script, so that Intel MPI pins them only
        where all cores are theirs.
    OMP_PLACES, OMP_PROC_BIND: Set for the ranks of a job script where SLURM binds them to cores.

Messages:
    SLURM has killed ranks for memory: Give ``sbatch`` a larger ``--mem-per-cpu`` or ``--mem``. The
        script that ``mpips sbatch`` writes says how much a rank takes.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from mpips.checkpoint.run_folder import Tail
from mpips.errors import UserError
from mpips.launch.hosts import is_srun
from mpips.launch.mpirun import environment, mpirun
from mpips.mpi import signals

PMI2 = "--mpi=pmi2"
UNREAD = "SLURM's pmi2 plugin could not read the address of a rank"
OUT_OF_MEMORY = "SLURM has killed ranks for memory; give sbatch a larger --mem-per-cpu, or --mem"
SAID = {
    UNREAD: re.compile(rb"mpi/pmi2: invalid client request"),
    OUT_OF_MEMORY: re.compile(
        rb"^(slurmstepd|srun)\S*: error: .*(exceeded .*memory limit|oom[-_ ]kill|out of memory)",
        re.IGNORECASE,
    ),
}
LOG = Path("/dev/stderr")
PAUSES_S = 1.0, 10.0, 20.0, 0.0  # after attempts to reach the controller


class Step:
    """SLURM's messages about the ranks of one start.

    SLURM's pmi2 plugin reads 1,024 bytes of a rank's address message. The length of MPICH's message
    depends on uninitialised memory after the address. It sometimes exceeds the limit, and then
    ranks die or hang in MPI_Init.

    Args:
        launcher: Launcher with its options; the last ``--mpi`` option is in effect.

    Attributes:
        is_by_pmi2: Whether the launcher is srun with the pmi2 plugin.
    """

    def __init__(self, launcher: Sequence[str]) -> None:
        plugins = [word for word in launcher if word.startswith("--mpi=")]
        self.is_by_pmi2 = is_srun(*launcher[:1]) and plugins[-1:] == [PMI2]
        self._log: Tail | None = None
        self._found = set[str]()
        if "SLURM_JOB_ID" in os.environ and stat.S_ISREG(os.stat(LOG).st_mode):
            self._log = Tail(LOG, os.stat(LOG).st_size)

    def trouble(self) -> str:
        """Return why ranks cannot start, or were killed. It is known only if stderr is a file."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                for line in self._log.lines(LOG):
                    self._found |= {what for what, say in SAID.items() if say.search(line)}
        if OUT_OF_MEMORY in self._found:
            return OUT_OF_MEMORY
        return UNREAD if self.is_by_pmi2 and UNREAD in self._found else ""


def other_launcher() -> list[str]:
    """Return MPICH's launcher, which needs no plugin.

    Prefers mpiexec.hydra, as Intel MPI's mpirun is a script that dies of a signal.

    Raises:
        UserError: If there is none.
    """
    return [shutil.which("mpiexec.hydra", path=environment()["PATH"]) or mpirun()]


def shown(job: str, name: str) -> str:
    """Return a field of a job as SLURM shows it; empty if SLURM does not answer.

    Args:
        job: Id of the job.
        name: Name of the field.
    """
    found = re.search(rf"(?<!\S){name}=(\S*)", ask("scontrol", "-o", "show", "job", job))
    return found[1] if found else ""


def ask(*words: str, stderr: int = subprocess.STDOUT) -> str:
    """Return a command's output, by default with its stderr; empty if there is no such command."""
    with contextlib.suppress(OSError):
        return run(*words, stderr=stderr).stdout
    return ""


def run(*words: str, stderr: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its stdout. By default its stderr is this process's.

    The command ignores signals that SLURM sends to all processes of the job.
    """
    with signals.blocked():
        return subprocess.run(  # names in SLURM's output may have any bytes
            words, stdout=subprocess.PIPE, stderr=stderr, errors="replace", check=False
        )


def requeue(job: str) -> bool:
    """Requeue a job; return whether SLURM did so. Ask again if the controller does not answer."""
    for pause_s in PAUSES_S:
        done = run("scontrol", "requeue", job, stderr=subprocess.STDOUT)
        print(done.stdout, end="", flush=True)
        if not re.search("Unable to contact|timed out|Unexpected message", done.stdout):
            break
        time.sleep(pause_s)
    return done.returncode == 0


def pick_launcher(library: str) -> list[str]:
    """Return the launcher of a job's ranks, with its options.

    With a wrong --mpi, srun starts N worlds of one rank each. Ranks are pinned if SLURM pins them,
    or if they use all cores of this process's mask. In other cases mpirun would pin them to cores
    of other jobs.

    The environment of this process, set by SLURM and the site, gets further variables for the
    ranks.

    Args:
        library: Name of the MPI library that Python uses.

    Raises:
        UserError: If the library is unknown and LAUNCHER empty, or this names another launcher.
    """
    variables = os.environ
    plugins = {"Open MPI": "pmix", "MPICH": "pmi2", "MVAPICH": "pmi2", "Intel": "pmi2"}
    plugin = next((plugin for name, plugin in plugins.items() if name in library), "")
    program = variables.get("LAUNCHER")
    if not (plugin or (library and program)):
        remedy = "set LAUNCHER and LAUNCHER_FLAGS in slurm/site.sh"
        raise UserError(f"MPI library {library!r}", "MPICH, Open MPI or one of their kind", remedy)
    is_intel = "Intel" in library  # it pins ranks by default
    if not program:
        listed = re.search(rf"\b{plugin}\b", ask("srun", "--mpi=list"))
        program = "srun" if listed else "mpirun"
    if program == "srun":
        words = _srun(plugin)
        if is_intel:
            variables["I_MPI_PIN"] = "off"
    elif program == "mpirun":
        cores = variables.get("OMP_NUM_THREADS", "1")
        pinned = int(variables.get("SLURM_NTASKS_PER_NODE", "1")) * int(cores)
        is_whole = "SLURM_HET_SIZE" not in variables and pinned == len(os.sched_getaffinity(0))
        if is_intel:
            words = ["mpiexec.hydra"]  # Intel MPI's mpirun is a script that dies of USR1
            pinning = ("I_MPI_PIN_DOMAIN", cores) if is_whole else ("I_MPI_PIN", "off")
            variables.update([pinning])
        elif plugin == "pmix":
            binding = ["--map-by", f"slot:PE={cores}", "--bind-to", "core"]
            words = ["mpirun", *(binding if is_whole else ["--bind-to", "none"])]
        else:
            words = ["mpirun", *(["-bind-to", f"core:{cores}"] if is_whole and plugin else [])]
    else:
        raise UserError(f"LAUNCHER {program!r}", "srun or mpirun")
    return [*words, *variables.get("LAUNCHER_FLAGS", "").split()]


def _srun(plugin: str) -> list[str]:
    """Return srun with its options; without a plugin, SLURM or LAUNCHER_FLAGS choose one.

    With --kill-on-bad-exit, an srun of several components may wait for ever at the first rank's end
    (Open MPI). With --wait, srun kills the remaining ranks some time after a rank has ended.
    """
    words = ["srun", *([f"--mpi={plugin}"] if plugin else []), "--kill-on-bad-exit=0", "--wait=15"]
    if re.search("^TaskPlugin .*affinity", ask("scontrol", "show", "config"), re.MULTILINE):
        words += ["--cpu-bind=cores"]
        os.environ.update(OMP_PLACES="cores", OMP_PROC_BIND="close")
    return words
