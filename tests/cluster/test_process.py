"""What a process keeps of the memory that it frees."""

import platform
import subprocess
import sys

import pytest

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
        command = [sys.executable, "-c", STEPS, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        faults[how] = int(done.stdout)
    assert faults["kept"] < 2048 < faults["given back"], faults
