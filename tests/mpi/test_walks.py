"""Jobs whose call paths are those of the design page, and short."""

import shutil
import sys
import tempfile
import time

import pytest
from verdict import check
from walks import FEATURES, PACKAGE, Name, Walk, paths

from mpips.config.command_line import parse_command_line
from mpips.mpi.world import Cluster
from mpips.session import run as session
from mpips.strategies import async_sgd, sync_sgd

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=3)]

ASYNC = "--mode=async --far-read=reply --checkpoint-every=2steps"
SYNC = "--mode=sync"
HERE = {
    ASYNC: ("A push on a node", "A pull on a node", "A batch", "A snapshot"),
    SYNC: ("A synchronous step",),
}
BETWEEN = {ASYNC: ("A push between nodes", "A pull between nodes"), SYNC: ()}
STEP, PUSH = ("mpips/ps/worker.py", "AsyncWorker.step"), ("mpips/ps/steps.py", "GradientSteps.push")
TURN, APPLY = (
    ("mpips/ps/server.py", "AsyncServer.turn"),
    ("mpips/ps/shard.py", "Server.applied_all"),
)
LOADED = async_sgd, sync_sgd  # before, so that no import is taken for a call
MODEL = ("mpips/problems/", "mpips/datasets/")
MOST = 55  # functions of a worker's step, the model's left out, and of the turn that applies it
# What runs only where ranks may die, and only where the model has tables.
OFF = ("failover/", "tables/", "transport/acknowledged", "transport/rows", "transport/remote_rows")


def train(cluster: Cluster, options: str) -> Walk:
    """Train, and note what this rank enters. Collective: yes."""
    folder = cluster.comm.bcast(tempfile.mkdtemp() if cluster.rank == 0 else None)
    words = f"{options} --epochs=1 --batch-size=200 --hidden=8 --eval-every=0 --quiet"
    line = parse_command_line([*words.split(), f"--out={folder}/run"])
    with Walk() as walk:
        code = session.run(line, time.perf_counter())
    check(cluster.comm, code == 0, code)
    if cluster.rank == 0:
        shutil.rmtree(folder)
    return walk


def shortest(walk: Walk, within: Name, until: Name) -> set[Name]:
    """Return the fewest functions entered in calls of `within` up to one that enters `until`."""
    entered, found = set[Name](), list[set[Name]]()
    for names in walk.within(within):
        entered |= {name for name in names if not name[0].startswith(MODEL)}
        if until in entered:
            found.append(entered)
            entered = set()
    return min(found, key=len, default=set())


@pytest.mark.parametrize("options", HERE)
def test_jobs_follow_the_call_paths(
    cluster: Cluster, node_size: int, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of features that they do not use cannot be imported."""
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if name.startswith(FEATURES):
            monkeypatch.setitem(sys.modules, f"mpips.{name}", None)
    walk = train(cluster, f"{options} --node-size={node_size}")
    for heading in (HERE if cluster.nodes == 1 else BETWEEN)[options]:
        for number, path in enumerate(paths()[heading], 1):
            followed = any(cluster.comm.allgather(walk.follows(path)))
            check(cluster.comm, followed, (heading, number, path))
    if options == ASYNC:
        pushed, applied = shortest(walk, STEP, PUSH), shortest(walk, TURN, APPLY)
        both = set().union(*cluster.comm.allgather(pushed | applied))
        if cluster.nodes == 1:
            check(cluster.comm, len(both) <= MOST, (len(both), sorted(both)))
        files = {file.removeprefix("mpips/") for _, (file, _) in walk.entries}
        off = {file for file in files if file.startswith(OFF)}
        check(cluster.comm, not off, off)
