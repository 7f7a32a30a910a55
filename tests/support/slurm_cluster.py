"""A real SLURM on this machine: munged, slurmctld and a slurmd a node, gone when the tests are.

Debian's slurmd runs several times on one host. Each runs in namespaces of its own, so that every
node has its host name, its /etc/hosts and its /dev/shm; nothing outside them is changed. State,
ports and keys are the cluster's own. Needs root, and the packages slurm-wlm, munge and libpmix2.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from launch import environment, until

from mpips.launch.mpirun import when_orphaned
from mpips.mpi.process import ids, running, send_signal
from tests.chaos.hosts import UNSHARE, give_an_address
from tests.chaos.hosts import missing as no_namespaces

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol", "unshare")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
NODES = 3
UP_S, GONE_S, ASK_S = 40, 10, 20
# Of /usr/lib/*/pmix2: SLURM's plugin opens lib/libpmix.so, which only Debian's libpmix-dev has.
PMIX = "pmix2/lib"
IDLE = ("idle", "mix", "alloc")
PAST = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")

CONF = """\
ClusterName=mpips
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket,cred_expire=5
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
TmpFS={at}/tmp-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=256
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
EnforcePartLimits=ALL
JobRequeue=1
KillWait=5
SlurmdTimeout=10
MinJobAge=3600
CompleteWait=0
SchedulerParameters=permit_job_expansion,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 DefaultTime=10 PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=1-0 DefaultTime=10 PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 " + (
    "RealMemory=8000 Feature={kind}\n"  # neither of which the machine needs to have
)
# Arguments: name, hosts file, PMIx libraries and where they belong (or two empty), the command.
ENTER = """\
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs -o mode=1777 shm /dev/shm || exit 1
if [ -n "$3" ]; then mount --bind "$3" "$4" || exit 1; fi
shift 4
exec "$@"
"""


def missing() -> str:
    """Return why no SLURM can be started here, or an empty text."""
    names = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if names:
        packages = "apt-get install --no-install-recommends slurm-wlm munge libpmix2"
        return f"SLURM is not installed (no {', '.join(names)}): {packages}"
    return "each node needs namespaces of its own: run as root" if no_namespaces() else ""


class SlurmCluster:
    """Nodes n1, ... of 4 CPUs; n1 is ``big``; ``urgent`` preempts ``main`` after 30 s of grace."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mpips-slurm-"))  # a socket's path is short
        self.folder.chmod(0o755)
        self.names = [f"n{k + 1}" for k in range(NODES)]
        self.env = {**environment(), "PATH": PATH, "SLURM_CONF": f"{self.folder / 'slurm.conf'}"}
        self.env["OMPI_MCA_osc"] = "^ucx"  # noise of Open MPI's wheel
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._pmix = ("", "")

    def __enter__(self) -> "SlurmCluster":
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit clears up as well
        try:
            give_an_address()
            self._configure()
            self._start_controller()
            for name in self.names:
                self._start_node(name)
            self.wait_idle()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ports = free_ports(1 + NODES)
        text = CONF.format(host=host, at=self.folder, ports=ports)
        hosts = Path("/etc/hosts").read_text() + f"\n127.0.0.1 {host}\n"
        for k, name in enumerate(self.names):
            kind = "small" if k else "big"
            text += NODE.format(name=name, host=host, port=ports[k + 1], kind=kind)
            hosts += f"127.0.1.{k + 1} {name}\n"
            (self.folder / f"tmp-{name}").mkdir(mode=0o1777)
        (self.folder / "slurm.conf").write_text(text)
        # slurmd loads a cgroup plugin though nothing uses it, and v1's asks for nothing.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (self.folder / "hosts").write_text(hosts)
        (self.folder / "state").mkdir()
        for found in Path("/usr/lib").glob(f"*/{PMIX}"):
            shutil.copytree(found, self.folder / "pmix", symlinks=True)
            with contextlib.suppress(FileExistsError):
                (self.folder / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")
            self._pmix = (str(self.folder / "pmix"), str(found))

    def _start(self, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdout=out, stderr=out,
                stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=when_orphaned(signal.SIGKILL),
            )  # fmt: skip

    def _start_controller(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        at, sock = str(self.folder), self.folder / "munge.socket"
        files = [f"--{k}={at}/munge.{k[:-5]}" for k in ("pid-file", "log-file", "seed-file")]
        self._start(
            "munged",
            ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}", *files],
        )
        until(sock.exists, UP_S, self.logs)
        self._start("slurmctld", ["slurmctld", "-D", "-f", f"{at}/slurm.conf"])

    def _start_node(self, name: str) -> None:
        slurmd = ["slurmd", "-D", "-f", f"{self.folder}/slurm.conf", "-N", name]
        enter = ["sh", "-c", ENTER, "sh", name, f"{self.folder}/hosts", *self._pmix]
        self._start(name, [*UNSHARE, *enter, *slurmd])

    def wait_idle(self) -> None:
        """Wait until every node takes jobs; one that is down is started and resumed."""
        for name in self.names:
            if self._daemons[name].poll() is not None:
                self._start_node(name)

        def ready() -> bool:
            states = self.ask("sinfo", "-h", "-p", "main", "-N", "-o", "%N %t", check=False)
            found = dict(line.split() for line in states.splitlines() if len(line.split()) == 2)
            for name, state in found.items():
                if state.startswith(("down", "drain")) and "*" not in state:
                    self.ask("scontrol", "update", f"nodename={name}", "state=resume", check=False)
            return [found.get(name) in IDLE for name in self.names] == [True] * NODES

        until(ready, UP_S, self.logs)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        paths = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in paths)

    def ask(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """Run one of SLURM's commands; returns what it prints."""
        done = subprocess.run(
            command, env=self.env, cwd=cwd, timeout=ASK_S, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stdout}"
        return done.stdout

    def submit(self, *words: str, cwd: Path) -> str:
        """Run ``sbatch`` in `cwd`; returns the job's id."""
        return self.ask("sbatch", "--parsable", *words, cwd=cwd).strip().partition(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """Return what the controller says of a job; of an array or a het job, of its first."""
        line = self.ask("scontrol", "-o", "show", "job", job).splitlines()[0]
        return dict(w.split("=", 1) for w in line.split() if "=" in w)

    def wait(self, job: str, timeout_s: float = 120, told: Callable[[], str] = str) -> str:
        """Wait until a job has ended for good; returns its state."""

        def past() -> bool:
            return self.show(job)["JobState"] in PAST

        until(past, timeout_s, lambda: f"{self.show(job)}\n{told()}")
        return self.show(job)["JobState"]

    def grow(self, job: str, *words: str) -> None:
        """Give a running job the nodes of an allocation that is asked for with these words."""
        said = self.ask("salloc", "--no-shell", f"--dependency=expand:{job}", *words)
        self.ask("scontrol", "update", f"jobid={said.split()[-1]}", "NumNodes=0")

    def crash(self, name: str) -> None:
        """Kill a node, and tell so, which SLURM itself finds out later; `wait_idle` restarts it."""
        self._kill(name)
        self.ask("scontrol", "update", f"nodename={name}", "state=down", "reason=dead")

    def _kill(self, name: str) -> None:
        """Kill a node's slurmd and every process on it, ranks too."""
        space = namespace(self._daemons[name].pid)
        assert space != namespace(os.getpid()), "the node has no namespace of its own"

        def gone() -> bool:
            members = running(pid for pid in ids() if namespace(pid) == space)
            for pid in members:
                send_signal(pid)
            return not members

        until(gone, GONE_S, lambda: f"{name} lives")
        self._daemons[name].wait(GONE_S)

    def stop(self) -> None:
        """End all of it; may be called twice."""
        for name, daemon in self._daemons.items():
            if daemon.poll() is None and namespace(daemon.pid) != namespace(os.getpid()):
                self._kill(name)
            elif daemon.poll() is None:
                daemon.kill()
                daemon.wait(GONE_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def namespace(pid: int) -> str:
    """Return the UTS namespace of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/uts")
    return ""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in found]
