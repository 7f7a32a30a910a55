"""Remote execution of one command on other hosts; both sides of it.

The supervisor asks all hosts at the same time, with a deadline, so a lost host delays no other.
Each host runs ``python -m mpips.launch.remote_execution FOLDER [PID:STARTED ...]``. An answer shows
that the host has Python with mpips and sees the supervisor's folder. The command also ends the
given ranks of earlier attempts, and removes their shared memory. Its answer names the ranks of the
current attempt that have died on the host.
"""

import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from mpips.errors import Exit, UserError
from mpips.launch.folders import OwnFolder
from mpips.launch.heartbeat import CURRENT
from mpips.launch.hosts import Host
from mpips.launch.mpirun import environment
from mpips.mpi import segments
from mpips.mpi.process import GONE, ancestors, kill, trouble

# An ssh that asks for a password would wait for ever.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# Runs a SLURM step on one node, beside its other steps. Daemons of mpirun need the whole node.
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
unset SRUN_CPUS_PER_TASK  # with it, a daemon would get the cores of one rank
exec {words} $group --nodelist="$host" /bin/sh -c "$*"
"""
ANSWER_S = 20.0  # limit for an answer: a login, and a start of Python from a shared disk
ENDS_S = 2.0  # time for a remote command to end after SIGTERM, before SIGKILL
POLL_S = 0.05
ANSWER = "mpips host"  # prefix of the line with the answer; the host's name follows
DAEMONS = ("hydra_", "prted", "orted")  # the launcher's daemons, the parents of ranks
GONE_S, SEEN_S = 5.0, 10.0  # a file system may show other hosts' files some seconds later


class Question:
    """Question to hosts; a process of its own asks each of them.

    Args:
        commands: Command line for each host.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._deadline = time.monotonic() + ANSWER_S
        self._folder = OwnFolder()
        self._asked: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        for name, words in commands.items():
            path = Path(self._folder.name) / f"{len(self._asked)}"
            with path.open("wb") as answer:  # closed: there may be more hosts than descriptors
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=answer, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            self._asked[name] = process, path

    def is_open(self, doubtful: Collection[str] = ()) -> bool:
        """Return whether a host that is not doubtful may still answer."""
        sure = [process for name, (process, _) in self._asked.items() if name not in doubtful]
        return time.monotonic() < self._deadline and any(each.poll() is None for each in sure)

    def close(self) -> dict[str, str]:
        """End the processes without an answer; return each host's last line, by name."""
        pending = {name: each for name, (each, _) in self._asked.items() if each.poll() is None}
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in pending.values() if process.poll() is None]
            deadline = time.monotonic() + ENDS_S
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal_number)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        answers = {}
        for name, (_, answer) in self._asked.items():
            answers[name] = "no answer" if name in pending else _last_line(answer.read_bytes())
        self._folder.cleanup()
        return answers


def _last_line(answer: bytes) -> str:
    """Return the line with the answer; without one, the last line."""
    lines = answer.decode(errors="replace").strip().splitlines()
    answers = [line for line in lines if line.startswith(ANSWER)]
    return (answers or lines or ["nothing"])[-1]


class RemoteExecution:
    """Remote command for the hosts of a job, and the processes to end there.

    Args:
        words: Remote command, with ssh's arguments; empty for ssh, or for srun if `slurm`.
        slurm: Whether the hosts are nodes of a SLURM allocation.
        folder: The supervisor's folder, which the hosts share.
        hosts: Hosts, with their components in a heterogeneous SLURM job.

    Attributes:
        agent: Path of a program that runs the remote command.
        nodes: Name that each host reports for itself, for hosts that have answered.
        left: Processes left on each host, as ``PID:STARTED``.
        gone: Process ids of dead ranks, by the name that their host reports.

    Raises:
        UserError: If the folder for temporary files allows no programs.
    """

    def __init__(
        self, words: Sequence[str], slurm: bool, folder: Path, hosts: Iterable[Host] = ()
    ) -> None:
        self._folder = folder
        # In a folder of its own: Open MPI accepts no path with a space.
        self._own = OwnFolder()
        self.agent = Path(self._own.name) / "agent"
        text = AS_SRUN if slurm and not words else AS_SSH
        command = shlex.join(words or (SRUN if slurm else SSH))
        components = {host.name: host.component for host in hosts if host.component >= 0}
        groups = "".join(f"{name}) group=--het-group={k} ;; " for name, k in components.items())
        self.agent.write_text(text.format(words=command, groups=groups))
        self.agent.chmod(0o700)
        if not os.access(self.agent, os.X_OK):
            got = f"programs in {self._own.name}, which is mounted without them"
            raise UserError(got, "a folder for temporary files that allows them", "set TMPDIR")
        self.nodes: dict[str, str] = {}
        self.left: dict[str, list[str]] = {}
        self.gone: dict[str, set[int]] = {}

    def close(self) -> None:
        """Remove the program."""
        self._own.cleanup()

    def begin(self, names: Iterable[str]) -> Question:
        """Ask hosts, and return the open question.

        The hosts also end processes that are left there.
        """
        return Question({name: self._command(name) for name in names})

    def end(self, question: Question) -> dict[str, str]:
        """Close a question, and return the reason why a host cannot be used, for each such host."""
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
        """Ask hosts and wait. Return the same as `end`.

        Args:
            names: Names of the hosts.
            stop: Returns whether to stop waiting.
            doubtful: Hosts not to wait for, once all others have answered.
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
        """Record a process that the next question ends.

        Args:
            node: Name that the host reports for itself.
            pid: Process id.
            started: Start time of the process.
        """
        for name, answer in self.nodes.items():
            if answer == node:
                self.left.setdefault(name, []).append(f"{pid}:{started}")


def main(argv: Sequence[str]) -> int:
    """Answer a question on this host. Return the exit code, 0 if the host can be used."""
    folder, *left = argv
    noted = (word.split(":") for word in left)
    found = end([(int(pid), int(started)) for pid, started in noted])
    if left and segments.present():
        time.sleep(segments.YOUNG_S)  # until it is certain that no process uses them
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
        from mpips.launch.watch import Heartbeats  # only imported during an attempt

        job = Heartbeats(current.parent)
        job.read()
        local = [rank for rank in job.ranks if rank.is_here and rank.name not in job.codes]
        dead = [rank.pid for rank in local if rank.trouble == GONE]
        if len(dead) < len(local):  # if all seem dead, they may run in another container
            found += dead
    return found


def end(left: Iterable[tuple[int, int]]) -> list[int]:
    """Kill processes and their launcher's daemons; return the processes that did not end.

    Args:
        left: Process ids and start times. If the start time differs, another process has the id
            now.
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
