"""What is set in the environment before MPI starts."""

import os

import pytest

from mpips.cluster import start


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
