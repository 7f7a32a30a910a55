"""A process as a rank: before MPI starts, its name, its memory, its signals."""

import contextlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, python

from mpips.launch.mpirun import Running, default_launcher, is_open_mpi, trial
from mpips.mpi import process, start

PROMISED = 32767  # MPI-4.1, 9.1.2: the least value that MPI_TAG_UB may have
APART = ["unshare", "--user", "--map-root-user"]
COPIES = """
import mpips.mpi.world
import numpy as np
from mpi4py import MPI

MPI.COMM_WORLD.Bcast(np.zeros(100_000))
"""


@pytest.mark.launch
def test_ranks_in_containers_of_their_own() -> None:
    """MPICH died as it started, as the kernel lets no rank read the memory of another one."""
    if subprocess.run([*APART, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    for wrapper in (APART, []):
        done = trial([*default_launcher(), "-n", "4", *wrapper, sys.executable, "-c", COPIES])
        assert done.returncode == 0, done.stderr
        told = f"mpips: {start.COPIES}=0 is set, as MPICH cannot copy between containers; if"
        assert done.stderr.count(told) == (bool(wrapper) and not is_open_mpi())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "^ofi"),  # a process by itself
        ({"PMIX_RANK": "0"}, None),  # srun, which tells no size
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "^ofi"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ({"OMPI_MCA_btl": "self,sm"}, "self,sm"),  # the user's choice
    ],
)
def test_a_world_of_one_host_leaves_the_network_out(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str | None
) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_btl", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with start.unused_networks_left_out():
        assert os.environ.get(start.BTL) == expected
    assert os.environ.get(start.BTL) == variables.get(start.BTL)


YIELDS = "OMPI_MCA_mpi_yield_when_idle", "MPIR_CVAR_ENABLE_HEAVY_YIELD"
BOUND = f"""
import os, time
from pathlib import Path
from mpips.mpi.process import rank_in
Path(str(rank_in(os.environ))).touch()
while len(os.listdir()) < 2:
    time.sleep(0.01)
for name in {YIELDS}:
    os.environ.pop(name, None)
import mpips.mpi.start
os.write(1, f"yields {{[name in os.environ for name in {YIELDS}]}}\\n".encode())
"""


@pytest.mark.launch
@pytest.mark.skipif(process.cores() < 2, reason="needs a core for each of two ranks")
@pytest.mark.parametrize(("ranks", "binding"), [(2, "core"), (process.cores() + 1, "none")])
def test_ranks_with_cores_of_their_own_outnumber_none(
    ranks: int, binding: str, tmp_path: Path
) -> None:
    """As job scripts bind them: each may run on fewer cores than there are ranks."""
    bind = "--bind-to" if is_open_mpi() else "-bind-to"
    launcher = [*default_launcher(), bind, binding]
    with Running(ranks, ["-c", BOUND], tmp_path, launcher=launcher) as job:
        told = job.wait(60).output
    assert told.count(f"yields {[binding == 'none'] * 2}\n") == ranks, told


def test_tags_are_legal_and_differ_from_each_other() -> None:
    known = [value for name, value in vars(start).items() if name.startswith("TAG_")]
    kinds = (start.HEADERS, start.BODIES, start.REPLIES)
    shards = [start.tag_of(k, kind) for k in range(start.SHARDS_MAX) for kind in kinds]
    known += shards[1:]  # the first is TAG_SHARD
    assert len(set(known)) == len(known)
    assert 0 < min(known) <= max(known) <= PROMISED


def test_a_process_name_that_is_cut_inside_a_letter() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"programm-gr\xc3")
    with process.named(process.MEETS):
        assert name.read_bytes() == b"mpips-meets\n"
    assert name.read_bytes() == b"programm-gr\xc3\n"
    name.write_bytes(before)


RANK = """
import json, sys
from mpips.mpi import process

class Clock:
    now = 0.0
    def monotonic(self):
        return self.now

def told(rank, others):
    process.time = clock = Clock()
    absents, found = process.Absent(rank, others, 10.0), []
    while clock.now < 400:
        clock.now += 0.5
        got, never = absents.look()
        if got:
            found.append([clock.now // 20, got, never])
        if never:
            break
    return found

for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


class Rank(contextlib.AbstractContextManager["Rank"]):
    """A process that the launcher, this one, has started as a rank; it waits for statements."""

    def __init__(self, rank: int, job: str) -> None:
        env = {**environment(), "PMI_RANK": f"{rank}", "PMI_JOBID": job}
        pipe = subprocess.PIPE
        args = [sys.executable, "-c", RANK]
        self._process = subprocess.Popen(args, env=env, stdin=pipe, stdout=pipe, text=True)
        self.pid = self._process.pid

    def call(self, expression: str) -> object:
        self._process.stdin.write(f"{expression}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)


def test_who_is_told_of() -> None:
    """Ranks of this job by name; they end it if one has ended, or where none is at work."""
    with Rank(0, "a") as zero, Rank(1, "a") as one, Rank(2, "a") as two, Rank(3, "b") as other:
        assert one.call("process.set_name(process.LEFT)") is None
        assert other.call("process.set_name(process.LEFT)") is None
        nobody = [[0, "a rank has not come to the run for 10 s", False]]
        assert zero.call("told(0, [1])") == nobody, "its own name cannot be given, as it seems"
        zero.call("process.set_name(process.MEETS)")
        left = "rank 1 ended before the run began, and rank 0 waits for it"
        assert zero.call("told(0, [1, 2])") == [[0, left, True]]
        one.call("process.set_name('late')")
        found = zero.call("told(0, [1, 2])")
        late = f"ranks 1 (process {one.pid}), 2 (process {two.pid}) have not come to the run"
        assert found == [[0, f"{late} for 10 s", False], [6, f"{late} for 125 s", True]]
        zero.call("setattr(process, '_used', lambda pid, used=iter(range(9999)): next(used))")
        assert zero.call("told(0, [1, 2])") == [[0, f"{late} for 10 s", False]], "they are at work"
        one.call("process.set_name(process.MEETS)")
        assert zero.call("told(5, [1, 2])") == [], "rank 1 tells"
        assert zero.call("told(0, [3, 7])") == nobody, "rank 3 is of another job"
        assert zero.call("told(8, [3, 7])") == [], "the lowest tells"


STEPS = """
import resource
import numpy as np
from mpips.mpi.pages import keep_freed_memory

def step():
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(8)]

keep_freed_memory()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that can be told so")
def test_what_a_step_frees_is_not_cleared_again_by_the_kernel() -> None:
    """Eight arrays of 1 MiB are 2,048 pages a step."""
    assert int(python("-c", STEPS).stdout) < 2048


INTERRUPTS = """
import ctypes, os, sys, threading
from mpips.mpi import signals
if sys.argv[1] != "nobody":
    signals.install()
if sys.argv[1] != "itself":
    signals.divert()
number = signals.SIGNALS[int(sys.argv[2])]
if sys.argv[1] != "nobody":
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
slept = ctypes.CDLL(None).usleep(400_000)
print(slept, signals.received(), threading.active_count())
"""


@pytest.mark.parametrize(
    ("notes", "number", "printed"),
    [("itself", "0", "-1 SIGUSR1 1"), ("a thread", "2", "0 SIGINT 2"), ("nobody", "0", "0 None 1")],
)
def test_who_notes_a_signal(notes: str, number: str, printed: str) -> None:
    """A call of C is interrupted, unless a thread of its own takes what comes."""
    assert python("-c", INTERRUPTS, notes, number).stdout == f"{printed}\n"


AGAIN = """
import os
from mpips.mpi import signals

def sent(name, now):
    os.kill(os.getpid(), getattr(signals.signal, name))
    return signals.again(now)

assert signals.again(0.0) is None
signals.install()
assert [sent("SIGTERM", 10.0), sent("SIGTERM", 11.0), sent("SIGUSR1", 20.0)] == [None] * 3
if not os.fork():
    sent("SIGTERM", 20.0)
    os._exit(0)
os.wait()
assert signals.again(20.0) is None
print(sent("SIGINT", 20.0))
with signals.noted():
    print(sent("SIGTERM", 30.0), sent("SIGTERM", 40.0))
    os.kill(os.getpid(), signals.signal.SIGINT)  # nobody reads it in this block
with signals.noted():
    print(signals.again(50.0), sent("SIGTERM", 60.0))
before = signals.signal.getsignal(signals.signal.SIGTERM)
ends = os.pipe()
os.set_blocking(ends[1], False)
signals.signal.set_wakeup_fd(ends[1])
with signals.noted():
    os.close(ends[1])
assert signals.signal.getsignal(signals.signal.SIGTERM) is before
"""


def test_a_signal_that_comes_again() -> None:
    """Not one that follows at once, nor SIGUSR1, nor that of another process."""
    assert python("-c", AGAIN).stdout == "SIGINT\nNone SIGTERM\nNone None\n"
