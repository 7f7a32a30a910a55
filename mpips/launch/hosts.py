"""Hosts of a job, their ranks, and the launcher's options for them.

Environment:
    SLURM_TASKS_PER_NODE, SLURM_CPUS_PER_TASK: Ranks of each node with ``--hosts slurm``, and cores
        of a rank. Component N of a heterogeneous job has variables with the suffix
        ``_HET_GROUP_N``.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mpips.errors import UserError, counted
from mpips.launch.mpirun import PART, is_open_mpi

SLURM = "slurm"  # value of --hosts for the nodes of the allocation
SCONTROL_S = 60.0
NUMBER = r"[1-9]\d{0,6}"
# The keys may have any order. Open MPI has slots and their limit, MPICH the network interface.
SLOTS, LIMIT = rf"slots\s*=\s*(?P<slots>{NUMBER})", rf"max[_-]slots\s*=\s*{NUMBER}"
INTERFACE = r"ifname\s*=\s*(?P<interface>[^\s=]+)"
LINE = re.compile(
    rf"(?P<name>[^\s:=,/\[\]]+)(?::(?P<ranks>{NUMBER}))?(?:\s+(?:{SLOTS}|{LIMIT}|{INTERFACE}))*"
)
TASKS = re.compile(r"(?P<tasks>\d+)(?:\(x(?P<nodes>\d+)\))?")  # of SLURM: nodes in a row
FORM = "names with numbers of ranks, such as a:4,b:4"


class Host(NamedTuple):
    """A host and its number of ranks.

    Attributes:
        name: Name by which the host is reached.
        ranks: Number of ranks, at least 1; 0 if the user has not given it.
        component: Component of a heterogeneous SLURM job, from 0; -1 if there are no components.
        interface: Network interface for MPICH; empty for MPICH's choice.
    """

    name: str
    ranks: int
    component: int = -1
    interface: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.ranks}"


def find_hosts(text: str, ranks: int | None) -> tuple[Host, ...]:
    """Return the hosts that ``--hosts`` names, each with its number of ranks.

    Args:
        text: Names with numbers, such as ``a:4,b:4``; names alone, for an equal number of ranks on
            each; the path of a host file of MPICH or Open MPI; or ``slurm`` for the nodes of this
            process's allocation.
        ranks: Ranks of the job; None if ``-n`` was not given.

    Raises:
        UserError: If the text, the file or a number is not valid, or there is no allocation.
    """
    found = _allocation() if text == SLURM else [_host(word, text) for word in _words(text)]
    if not found:
        raise UserError(f"--hosts {text!r} without a host", FORM)
    counts: dict[tuple[str, int], int] = {}  # the numbers of a host that is named twice add up
    for host in found:
        one = host.name, host.component
        counts[one] = counts.get(one, 0) + host.ranks
    numbers = {host.ranks > 0 for host in found}
    if len(numbers) > 1:
        raise UserError(f"--hosts {text} with numbers on some", "a number on each, or on none")
    if numbers == {False}:
        if ranks is None:
            raise UserError(f"--hosts {text} without numbers of ranks", FORM, "or give -n")
        counts = dict.fromkeys(counts, -(-ranks // len(counts)))
    total = sum(counts.values())
    if ranks is not None and ranks > total:
        raise UserError(f"-n {ranks} on hosts of {counted(total, 'rank')}", f"-n <= {total}")
    interfaces = {host.name: host.interface for host in found}
    return tuple(Host(name, n, group, interfaces[name]) for (name, group), n in counts.items())


def _words(text: str) -> list[str]:
    """Return the host entries of ``--hosts``, from the text or from a file."""
    if not os.path.isfile(text):  # Path.is_file raises OSError for a list of many hosts
        return [word for word in text.split(",") if word]
    bare = (line.partition("#")[0].strip() for line in lines_of("--hosts", text))
    return [line for line in bare if line]


def lines_of(option: str, path: str) -> list[str]:
    """Return the lines of a text file that an option names."""
    try:
        return Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{option} {path}: {problem}", "a text file") from None


def _host(word: str, text: str) -> Host:
    match = LINE.fullmatch(word)
    if match is None:
        raise UserError(f"{word!r} in --hosts {text}", FORM)
    ranks = int(match["ranks"] or match["slots"] or 0)
    return Host(match["name"], ranks, interface=match["interface"] or "")


def _allocation() -> list[Host]:
    """Return the nodes of this process's SLURM allocation, each with its tasks.

    For a heterogeneous job, return the nodes of all components, one component after the other.
    """
    if "SLURM_JOB_NODELIST" not in os.environ:
        raise UserError("--hosts slurm outside a job", "an allocation", "by salloc or sbatch")
    components = range(int(os.environ.get("SLURM_HET_SIZE", "0"))) or (-1,)
    return [host for component in components for host in _nodes(component)]


def _nodes(component: int) -> list[Host]:
    """Return the nodes of a component; for -1, of a job without components."""
    group = _of_group(component)
    name = f"SLURM_TASKS_PER_NODE{group}"
    tasks = os.environ.get(name, "")
    command = ["scontrol", "show", "hostnames", os.environ.get(f"SLURM_JOB_NODELIST{group}", "")]
    try:
        names = subprocess.check_output(command, text=True, timeout=SCONTROL_S).split()
    except (OSError, subprocess.SubprocessError) as problem:
        raise UserError(f"scontrol: {problem}", "the nodes of this job") from None
    found = TASKS.finditer(tasks)
    counts = [int(each["tasks"]) for each in found for _ in range(int(each["nodes"] or 1))]
    if len(counts) != len(names):
        raise UserError(f"{name} {tasks!r} of {len(names)} nodes", "tasks of each")
    return [Host(node, count, component) for node, count in zip(names, counts, strict=True)]


def _of_group(component: int) -> str:
    """Return the suffix of SLURM's variables for a component."""
    return f"_HET_GROUP_{component}" if component >= 0 else ""


def placed(hosts: Iterable[Host], ranks: int) -> list[Host]:
    """Return the hosts that the ranks occupy, each filled before the next, with the ranks of each.

    Args:
        hosts: Hosts, with the largest number of ranks of each.
        ranks: Number of ranks to place; if the hosts have fewer, all of those are used.
    """
    found: list[Host] = []
    for host in hosts:
        count = min(host.ranks, ranks)
        ranks -= count
        if count:
            found.append(host._replace(ranks=count))
    return found


def launcher_words(launcher: Sequence[str], hosts: Sequence[Host], agent: Path) -> list[str]:
    """Return a launcher's command line, with the options that name its hosts.

    Args:
        launcher: MPICH's or Open MPI's mpirun, or srun, with its options.
        hosts: Hosts, with the ranks of each.
        agent: Path of a program that runs a command on a host, with ssh's arguments.
    """
    program = launcher[0]
    if is_srun(program):
        return _srun_words(launcher, hosts)
    if not is_open_mpi(program):
        file = agent.with_name("hosts")
        more = [f" ifname={host.interface}" if host.interface else "" for host in hosts]
        file.write_text("".join(map("{}{}\n".format, hosts, more)))
        return [*launcher, "-launcher", "ssh", "-launcher-exec", str(agent), "-f", str(file)]
    words = ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", str(agent)]
    words += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]  # other hosts need no agent
    words += ["--prtemca", "ras", "^slurm,pbs,lsf,gridengine"]  # the hosts are given above
    words += ["--leave-session-attached"]  # srun kills processes that leave its session
    words += ["-x", "PYTHONPATH", "-x", "PYTHONUNBUFFERED"]
    return [*launcher, *words, "--host", ",".join(map(str, hosts))]


def _srun_words(launcher: Sequence[str], hosts: Sequence[Host]) -> list[str]:
    """Return srun's command line, with a part for each component of a heterogeneous job."""
    program, *options = launcher
    found: list[str] = []
    components = dict.fromkeys(host.component for host in hosts)
    for component in components:
        some = [host for host in hosts if host.component == component]
        ranks = sum(host.ranks for host in some)
        group = _of_group(component)
        cores = os.environ.get(f"SLURM_CPUS_PER_TASK{group}")
        found += [PART if found else program, *options]
        if group:
            found += [f"--het-group={component}", f"--cpus-per-task={cores or 1}"]
        is_whole = ranks == int(os.environ.get(f"SLURM_NTASKS{group}", "-1"))
        found += [f"--nodes={len(some)}", *_srun_places(some, is_whole)]
        # A step with a failed node may still hold resources. SLURM_NTASKS may be smaller.
        found += ["--overlap", f"--ntasks={ranks}"]
    return found


def _srun_places(hosts: Sequence[Host], is_whole: bool) -> list[str]:
    """Return srun's options that place the ranks.

    An arbitrary distribution is the last resort: with it, SLURM's pmi2 plugin treats each rank as a
    node of its own.

    Args:
        hosts: Hosts, with the ranks of each.
        is_whole: Whether the ranks are all tasks of the allocation.
    """
    numbers = {host.ranks for host in hosts}
    if len(numbers) == 1:
        names = ",".join(host.name for host in hosts)
        return [f"--nodelist={names}", f"--ntasks-per-node={numbers.pop()}"]
    if is_whole:
        return []
    each = ",".join(host.name for host in hosts for _ in range(host.ranks))
    return [f"--nodelist={each}", "--distribution=arbitrary"]


def is_srun(program: str = "") -> bool:
    """Return whether a launcher is srun."""
    return Path(program).name == "srun"
