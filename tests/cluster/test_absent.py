"""Ranks of this host that have not come to a run."""

import subprocess
import sys

from launch import environment

NAMES = """
from pathlib import Path
from mpips.cluster import absent
comm = Path("/proc/self/comm")
comm.write_bytes(b"programm-gr\\xc3")
with absent.named(absent.MEETS):
    print(comm.read_bytes())
print(comm.read_bytes(), absent.ranks_here())
"""


def test_a_process_name_that_is_cut_inside_a_letter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NAMES], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "b'mpips-meets\\n'\nb'programm-gr\\xc3\\n' {}\n", done.stderr
