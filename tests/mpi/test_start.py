"""The environment before MPI starts, and the table of tags."""

import os
import subprocess
import sys

import pytest

from mpips.launch.mpirun import default_launcher, is_open_mpi, trial
from mpips.mpi import start

PROMISED = 32767  # MPI-4.1, 9.1.2: the least value that MPI_TAG_UB may have
APART = ["unshare", "--user", "--map-root-user"]
COPIES = """
import mpips.mpi.world
import numpy as np
from mpi4py import MPI

MPI.COMM_WORLD.Bcast(np.zeros(100_000))
"""


@pytest.mark.launch
def test_ranks_in_containers_of_their_own():
    """MPICH died as it started, as the kernel lets no rank read the memory of another one."""
    if subprocess.run([*APART, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    for wrapper in (APART, []):
        done = trial([*default_launcher(), "-n", "4", *wrapper, sys.executable, "-c", COPIES])
        assert done.returncode == 0, done.stderr
        told = f"mpips: {start.COPIES}=0 is set, as MPICH cannot copy between containers; if"
        assert done.stderr.count(told) == (bool(wrapper) and not is_open_mpi())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "^ofi"),  # a process by itself
        ({"PMIX_RANK": "0"}, None),  # srun, which tells no size
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "^ofi"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ({"OMPI_MCA_btl": "self,sm"}, "self,sm"),  # the user's choice
    ],
)
def test_a_world_of_one_host_leaves_the_network_out(monkeypatch, environment, expected):
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_btl", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with start.unused_networks_left_out():
        assert os.environ.get(start.BTL) == expected
    assert os.environ.get(start.BTL) == environment.get(start.BTL)


def test_tags_are_legal_and_differ_from_each_other():
    known = [value for name, value in vars(start).items() if name.startswith("TAG_")]
    kinds = (start.HEADERS, start.BODIES, start.REPLIES)
    shards = [start.tag_of(k, kind) for k in range(start.SHARDS_MAX) for kind in kinds]
    known += shards[1:]  # the first is TAG_SHARD
    assert len(set(known)) == len(known)
    assert 0 < min(known) <= max(known) <= PROMISED
