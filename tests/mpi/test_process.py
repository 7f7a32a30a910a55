"""Processes of this host: ranks that have not come to a run, and memory that is kept."""

import contextlib
import json
import platform
import subprocess
import sys

import pytest
from launch import environment, python

NAMES = """
from pathlib import Path
from mpips.mpi import process
comm = Path("/proc/self/comm")
comm.write_bytes(b"programm-gr\\xc3")
with process.named(process.MEETS):
    print(comm.read_bytes())
print(comm.read_bytes(), process.ranks_here())
"""


def test_a_process_name_that_is_cut_inside_a_letter() -> None:
    done = python("-c", NAMES)
    assert done.stdout == "b'mpips-meets\\n'\nb'programm-gr\\xc3\\n' {}\n", done.stderr


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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
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
        late = f"ranks 1 (process {one.pid}) and 2 (process {two.pid}) have not come to the run"
        assert found == [[0, f"{late} for 10 s", False], [6, f"{late} for 125 s", True]]
        zero.call("setattr(process, '_used', lambda pid, used=iter(range(9999)): next(used))")
        assert zero.call("told(0, [1, 2])") == [[0, f"{late} for 10 s", False]], "they are at work"
        one.call("process.set_name(process.MEETS)")
        assert zero.call("told(5, [1, 2])") == [], "rank 1 tells"
        assert zero.call("told(0, [3, 7])") == nobody, "rank 3 is of another job"
        assert zero.call("told(8, [3, 7])") == [], "the lowest tells"


STEPS = """
import resource
import sys
import numpy as np
from mpips.mpi.process import keep_freed_memory

def step():
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(8)]

if sys.argv[1] == "kept":
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
    faults = {}
    for how in ("kept", "given back"):
        faults[how] = int(python("-c", STEPS, how).stdout)
    assert faults["kept"] < 2048 < faults["given back"], faults
