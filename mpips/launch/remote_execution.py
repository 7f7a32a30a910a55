"""Remote execution on other hosts, by one command; both sides of it.

Hosts are asked all at once, each within a deadline: a host that is gone holds up nobody. What
answers there is ``python -m mpips.launch.remote_execution FOLDER [PID:STARTED ...]``: that it has
Python with mpips and sees the supervisor's folder; that ranks which are left of earlier attempts
there end, and leave no shared memory; and which ranks of the current one have died there.
"""

import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from mpips.errors import Exit
from mpips.launch.folders import OwnFolder
from mpips.launch.heartbeat import CURRENT
from mpips.launch.hosts import Host
from mpips.launch.mpirun import environment
from mpips.mpi import segments
from mpips.mpi.process import GONE, ancestors, kill, trouble

# An ssh that asks for a password would wait for ever.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# A step of SLURM on one node, beside what runs there: a daemon of mpirun needs all of the node.
SRUN = (
    *("srun", "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--mpi=none", "--cpu-bind=none"),
    *("--kill-on-bad-exit=0", "--input=none", "--quiet"),
)
AS_SSH = '#!/bin/sh\nexec {words} "$@"\n'
AS_SRUN = """\
#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do shift; done
host=$1 group=
shift
case $host in {groups}*) ;; esac
unset SRUN_CPUS_PER_TASK  # by which a daemon would get the cores of one rank
exec {words} $group --nodelist="$host" /bin/sh -c "$*"
"""
ANSWER_S = 20.0  # within which a host answers: a login, and Python from a disk that all share
ENDS_S = 2.0  # for a remote command that is told to end, before it is killed
POLL_S = 0.05
ANSWER = "mpips host"  # the line of the answer, in front of what the host calls itself
DAEMONS = ("hydra_", "prted", "orted")  # a rank's parent, of the launcher
GONE_S, SEEN_S = 5.0, 10.0  # a file system may show what another host has made some seconds later


class Question:
    """Hosts that have been asked, each by a process of its own.

    Args:
        commands: Of each host.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._deadline = time.monotonic() + ANSWER_S
        self._asked: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        for name, words in commands.items():
            answer = tempfile.TemporaryFile()  # noqa: SIM115  (until `close`)
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=answer, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            self._asked[name] = process, answer

    def is_open(self, doubtful: Collection[str] = ()) -> bool:
        """Return whether an answer may still come from a host that is not doubtful."""
        if time.monotonic() >= self._deadline:
            return False
        sure = [answer for name, answer in self._asked.items() if name not in doubtful]
        return any(process.poll() is None for process, _ in sure)

    def close(self) -> dict[str, str]:
        """End what has not answered; returns what each host has said, its last line."""
        late = {name: one for name, (one, _) in self._asked.items() if one.poll() is None}
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [process for process in late.values() if process.poll() is None]
            deadline = time.monotonic() + ENDS_S
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        found = {}
        for name, (_, answer) in self._asked.items():
            found[name] = "no answer" if name in late else _last_line(answer)
            answer.close()
        return found


def _last_line(answer: IO[bytes]) -> str:
    """Return the line that is an answer, else the last one."""
    answer.seek(0)
    lines = answer.read().decode(errors="replace").strip().splitlines()
    answers = [line for line in lines if line.startswith(ANSWER)]
    return (answers or lines or ["nothing"])[-1]


class RemoteExecution:
    """The way to other hosts, and what is to be ended on them as soon as they answer.

    Args:
        words: The remote command, called as ssh is; empty for ssh, or for srun with `slurm`.
        slurm: Whether the hosts are nodes of an allocation of SLURM.
        folder: The supervisor's, which they see.
        hosts: Of which those of a heterogeneous job of SLURM have components.

    Attributes:
        agent: A program that is the remote command.
        nodes: What hosts call themselves, of those who have answered.
        left: Processes that are left on a host, as ``PID:STARTED``.
        gone: Process ids of ranks that have died, by what their host calls itself.
    """

    def __init__(
        self, words: Sequence[str], slurm: bool, folder: Path, hosts: Iterable[Host] = ()
    ) -> None:
        self._folder = folder
        # Open MPI takes no path with a space in it.
        self._own = OwnFolder()
        self.agent = Path(self._own.name) / "agent"
        text = AS_SRUN if slurm and not words else AS_SSH
        command = shlex.join(words or (SRUN if slurm else SSH))
        components = {host.name: host.component for host in hosts if host.component >= 0}
        groups = "".join(f"{name}) group=--het-group={k} ;; " for name, k in components.items())
        self.agent.write_text(text.format(words=command, groups=groups))
        self.agent.chmod(0o700)
        self.nodes: dict[str, str] = {}
        self.left: dict[str, list[str]] = {}
        self.gone: dict[str, set[int]] = {}

    def close(self) -> None:
        """Remove the program."""
        self._own.cleanup()

    def begin(self, names: Iterable[str]) -> Question:
        """Ask hosts, which end what is left there."""
        return Question({name: self._command(name) for name in names})

    def end(self, question: Question) -> dict[str, str]:
        """Return why hosts that were asked cannot be used, by name; those that can are left out."""
        trouble = {}
        for name, answer in question.close().items():
            if answer.startswith(ANSWER):
                node, *gone = answer.removeprefix(ANSWER).split()
                self.nodes[name], self.gone[node] = node, set(map(int, gone))
                self.left.pop(name, None)
            else:
                trouble[name] = answer
        return trouble

    def ask(
        self,
        names: Iterable[str],
        stop: Callable[[], object] = bool,
        doubtful: Collection[str] = (),
    ) -> dict[str, str]:
        """Ask hosts and wait; returns as `end` does.

        Args:
            names: Of the hosts.
            stop: Whether to wait no longer.
            doubtful: Hosts that are not waited for when the others have answered.
        """
        question = self.begin(names)
        while question.is_open(doubtful) and not stop():
            time.sleep(POLL_S)
        return self.end(question)

    def _command(self, name: str) -> list[str]:
        """Return the command line that asks a host."""
        module = [sys.executable, "-m", "mpips.launch.remote_execution", str(self._folder)]
        path = f"PYTHONPATH={environment()['PYTHONPATH']}"
        words = shlex.join(["env", path, *module, *self.left.get(name, [])])
        return [str(self.agent), name, f"cd {shlex.quote(str(Path.cwd()))} && {words}"]

    def leave(self, node: str, pid: int, started: int) -> None:
        """Note a process that is to be ended on a host, by what that calls itself."""
        for name, answer in self.nodes.items():
            if answer == node:
                self.left.setdefault(name, []).append(f"{pid}:{started}")


def main(argv: Sequence[str]) -> int:
    """Answer on a host that is asked; returns the exit code, 0 if it can be used."""
    folder, *left = argv
    noted = (word.split(":") for word in left)
    found = end([(int(pid), int(started)) for pid, started in noted])
    if left and segments.present():
        time.sleep(segments.YOUNG_S)  # until it is clear that they are nobody's
    segments.clean()
    deadline = time.monotonic() + SEEN_S
    while not Path(folder).is_dir():
        if time.monotonic() > deadline:
            what = "expected one that all hosts share; start mpips.launch there"
            print(f"no folder {folder} on {platform.node()}, {what}", file=sys.stderr)
            return Exit.REFUSED
        time.sleep(0.2)
    if found:
        print(f"process {', '.join(map(str, found))} of an earlier attempt did not end")
        return Exit.FAILED
    print(ANSWER, platform.node(), *_gone(Path(folder)))
    return Exit.DONE


def _gone(folder: Path) -> list[int]:
    """Return the process ids of the current attempt's ranks that have died on this host."""
    found = list[int]()
    for current in folder.glob(f"*/{CURRENT}"):
        from mpips.launch.watch import Heartbeats  # a question before a start needs less

        told = Heartbeats(current.parent)
        told.read()
        here = [rank for rank in told.ranks if rank.is_here and rank.name not in told.codes]
        gone = [rank.pid for rank in here if rank.trouble == GONE]
        if len(gone) < len(here):  # else their container alone may see them
            found += gone
    return found


def end(left: Iterable[tuple[int, int]]) -> list[int]:
    """Kill processes, and their launcher's daemons; returns those that are still there then.

    Args:
        left: Process ids, each with when it started: it may be another one's by now.
    """
    ranks = [pid for pid, started in left if trouble(pid, started) != GONE]
    mapped = {segment for pid in ranks for segment in segments.mapped(pid)}
    above = [next(ancestors(pid), (0, "")) for pid in ranks]
    daemons = {pid for pid, name in above if name.startswith(DAEMONS)}
    found = kill(sorted(daemons) + ranks, GONE_S)
    segments.remove(mapped)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
