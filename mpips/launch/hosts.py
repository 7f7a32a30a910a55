"""The hosts of a job: how they are given, which ranks each has, what mpirun is told of them."""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpips.errors import UserError
from mpips.launch.mpirun import is_open_mpi

SLURM = "slurm"  # for hosts: those of the allocation
SCONTROL_S = 60.0
LINE = re.compile(r"(?P<name>[^\s:=,]+)(?:(?::|\s+slots\s*=\s*)(?P<ranks>[1-9]\d{0,6}))?")
TASKS = re.compile(r"(?P<tasks>\d+)(?:\(x(?P<nodes>\d+)\))?")  # of SLURM, for nodes in a row
FORM = "names with numbers of ranks, such as a:4,b:4"


class Host(NamedTuple):
    """A host, and how many ranks it has, or may have.

    Attributes:
        name: By which it is reached.
        ranks: At least 1; 0 where that is not said.
    """

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.name}:{self.ranks}"


def find_hosts(text: str, ranks: int | None) -> tuple[Host, ...]:
    """Return the hosts that are asked for, each with the number of ranks that it takes.

    Args:
        text: Names with numbers, such as ``a:4,b:4``; names alone, for as many ranks on each; the
            path of a file with a host on each line, as either MPI reads it; or ``slurm`` for the
            allocation that this process is in.
        ranks: Of the job, or None if that is not said.

    Raises:
        UserError: If the text, the file or the numbers cannot be meant, or there is no allocation.
    """
    if text == SLURM:
        found = _allocation(os.environ)
    else:
        found = [_host(word, text) for word in _words(text)]
    if not found:
        raise UserError(f"--hosts {text!r} without a host", FORM)
    named = dict.fromkeys(host.name for host in found)
    numbers = {host.ranks > 0 for host in found}
    if len(numbers) > 1:
        raise UserError(f"--hosts {text} with numbers on some", "a number on each, or on none")
    if numbers == {True}:  # a host that is named twice has both
        counts = {name: sum(h.ranks for h in found if h.name == name) for name in named}
    elif ranks is None:
        raise UserError(f"--hosts {text} without numbers of ranks", FORM, "or give -n")
    else:
        counts = dict.fromkeys(named, -(-ranks // len(named)))
    total = sum(counts.values())
    if ranks is not None and ranks > total:
        raise UserError(f"-n {ranks} on hosts of {total} ranks", f"-n <= {total}")
    return tuple(Host(*item) for item in counts.items())


def _words(text: str) -> list[str]:
    """Return what is said of each host."""
    path = Path(text)
    if not path.is_file():
        return [word for word in text.split(",") if word]
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"--hosts {text}: {problem}", "a text file") from None
    bare = (line.partition("#")[0].strip() for line in lines)
    return [line for line in bare if line]


def _host(word: str, text: str) -> Host:
    match = LINE.fullmatch(word)
    if match is None:
        raise UserError(f"{word!r} in --hosts {text}", FORM)
    return Host(match["name"], int(match["ranks"] or 0))


def _allocation(variables: Mapping[str, str]) -> list[Host]:
    """Return the nodes of this process's allocation by SLURM, with the tasks of each."""
    nodes = variables.get("SLURM_JOB_NODELIST")
    tasks = variables.get("SLURM_TASKS_PER_NODE", "")
    if nodes is None:
        raise UserError("--hosts slurm outside a job", "an allocation", "by salloc or sbatch")
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        told = subprocess.check_output(command, text=True, timeout=SCONTROL_S).split()
    except (OSError, subprocess.SubprocessError) as problem:
        raise UserError(f"scontrol: {problem}", "the nodes of this job") from None
    found = TASKS.finditer(tasks)
    counts = [int(each["tasks"]) for each in found for _ in range(int(each["nodes"] or 1))]
    if len(counts) != len(told):
        raise UserError(f"SLURM_TASKS_PER_NODE {tasks!r} of {len(told)} nodes", "tasks of each")
    return list(map(Host, told, counts))


def placed(hosts: Iterable[Host], ranks: int) -> list[Host]:
    """Return the hosts that so many ranks are on, filled one after the other, at most all."""
    found: list[Host] = []
    for host in hosts:
        count = min(host.ranks, ranks)
        ranks -= count
        if count:
            found.append(Host(host.name, count))
    return found


def launcher_words(hosts: Sequence[Host], agent: Path, program: str) -> list[str]:
    """Return what a launcher is told of its hosts.

    Args:
        hosts: With the ranks of each.
        agent: A program that runs a command on a host, called as ssh is.
        program: MPICH's or Open MPI's mpirun, or srun.
    """
    names = ",".join(map(str, hosts))
    if is_srun(program):
        each = ",".join(host.name for host in hosts for _ in range(host.ranks))
        where = [f"--nodes={len(hosts)}", f"--nodelist={each}", "--distribution=arbitrary"]
        return [*where, "--overlap"]  # a step with a node that has failed may hold its resources
    if not is_open_mpi(program):
        return ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", names]
    options = {
        "plm": "ssh",
        "plm_ssh_agent": str(agent),
        "plm_ssh_no_tree_spawn": "1",  # other hosts need not have the agent
        "ras": "^slurm,pbs,lsf,gridengine",  # the hosts are said
    }
    words = [word for name, value in options.items() for word in ("--prtemca", name, value)]
    words += ["--leave-session-attached"]  # srun ends what it leaves behind
    return [*words, "-x", "PYTHONPATH", "-x", "PYTHONUNBUFFERED", "--host", names]


def is_srun(program: str) -> bool:
    """Whether a launcher is SLURM's."""
    return Path(program).name == "srun"
