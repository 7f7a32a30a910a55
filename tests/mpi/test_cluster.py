import pytest
from mpips.cluster import Cluster
from mpi4py import MPI
from verdict import check
pytestmark = pytest.mark.mpi

def test_nodes(cluster):
    check(cluster.comm, cluster.rank >= 0)

@pytest.mark.mpi(min_size=3)
def test_three(cluster):
    check(cluster.comm, cluster.world >= 3)
