"""How a world of ranks runs tests together: one verdict for all, and never a hang.

Every rank runs the same tests in the same order. After each test the ranks exchange verdicts: a
failure on one is a failure on all, shown by rank 0, which alone prints. A rank that failed while
others wait for it inside the test, or a test that outlasts its limit, ends the whole world.
"""

import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn, TextIO

import pytest
from verdict import FailedTogetherError, check, together

from mpips.layout.roles import Roles
from mpips.mpi.start import MPI
from mpips.mpi.world import Cluster
from mpips.optim import make_rule, warm

LIMIT_S = 90.0  # a test, fixtures included
GRACE_S = 15.0  # in which the others must end a test in which this rank has failed
RULES = ("sgd", "momentum", "adam")


class World:
    """This process's part in running the tests of a world."""

    def __init__(self, config: pytest.Config) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank = self.comm.rank
        self.sound = True  # no test has failed, which might have left a message on its way
        self._ran = config.getoption("--ran") if self.rank == 0 else None
        self._stderr: TextIO = os.fdopen(os.dup(2), "w")  # not the one that pytest captures

    def note(self, what: str, items: Sequence[pytest.Item]) -> None:
        """Add lines to the report of this run, on rank 0; the size of nodes is left out."""
        if self._ran is not None:
            with open(self._ran, "a") as file:
                names = [re.sub(r"\[nodes\d+\]|nodes\d+-", "", item.nodeid) for item in items]
                file.writelines(f"{what} {name}\n" for name in names)

    def end(self, text: str) -> NoReturn:
        """Print `text` and end the world."""
        print(f"\nrank {self.rank}: {text}", file=self._stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
        os._exit(1)

    def _expire(self, name: str) -> None:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        where = "".join(traceback.format_stack(frame, limit=8))
        self.end(f"{name} is not over after {LIMIT_S} s, and is here:\n{where}")

    def watch(self, name: str) -> threading.Timer:
        """Start the time limit of a test; cancel what is returned at its end."""
        timer = threading.Timer(LIMIT_S, self._expire, [name])
        timer.daemon = True
        timer.start()
        faulthandler.dump_traceback_later(LIMIT_S + GRACE_S, exit=True)  # needs no Python
        return timer

    def agree(self, name: str, failure: str | None) -> None:
        """Exchange verdicts at the end of a test; fail on all ranks if it failed on any."""
        arrived = self.comm.Ibarrier()
        deadline = time.monotonic() + GRACE_S
        while not arrived.Test():
            time.sleep(0.001)
            if failure is not None and time.monotonic() > deadline:
                self.end(f"{name} failed here, and the others wait:\n{failure}")
        together(self.comm, failure)


WORLD = pytest.StashKey[World]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[WORLD] = World(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "node_size" in metafunc.fixturenames:
        sizes = [int(word) for word in metafunc.config.getoption("--node-size").split(",")]
        metafunc.parametrize("node_size", sizes, ids=[f"nodes{size}" for size in sizes])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("mpi") is None:
            raise pytest.UsageError(f"{item.nodeid} lacks the marker mpi")


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[WORLD].note("collected", session.items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    timer = item.config.stash[WORLD].watch(item.nodeid)
    try:
        return (yield)
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def told(error: Exception, item: pytest.Function) -> str:
    """Return an exception as text, from the test function on."""
    info = pytest.ExceptionInfo.from_exception(error)
    info.traceback = info.traceback.cut(path=item.path)
    return str(info.getrepr(style="short"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    world = pyfuncitem.config.stash[WORLD]
    failure: str | None = None
    try:
        try:
            result = yield
        except FailedTogetherError:
            raise
        except Exception as error:
            failure = told(error, pyfuncitem)
        world.agree(pyfuncitem.nodeid, failure)
    except FailedTogetherError:
        world.sound = False
        raise
    world.note("ran", [pyfuncitem])
    return result


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compile the loops on one rank; the others load them from the cache on disk."""
    for turn in range(2):
        if (MPI.COMM_WORLD.rank > 0) == turn:
            for name in RULES:
                for dtype in ("float32", "float64"):
                    warm(make_rule(name), dtype)
        done = MPI.COMM_WORLD.Ibarrier()
        while not done.Test():  # a first compilation takes a while, and the core
            time.sleep(0.01)


@pytest.fixture(scope="session")
def hosts() -> int:
    """Number of real nodes."""
    made = Cluster(MPI.COMM_WORLD)
    found = made.nodes
    for _ in range(2):  # it may be called twice
        made.free()
    return found


@pytest.fixture(scope="session")
def clusters(request: pytest.FixtureRequest) -> Iterator[dict[int, Cluster]]:
    """The world's ranks by the size of nodes, made when a test first asks for them."""
    made: dict[int, Cluster] = {}
    yield made
    if request.config.stash[WORLD].sound:
        for one in made.values():
            one.free()


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, node_size: int, hosts: int, clusters: dict[int, Cluster]
) -> Iterator[Cluster]:
    """The world's ranks, with nodes of each ``--node-size`` in turn, and nothing on its way."""
    needs = request.node.get_closest_marker("world")
    kwargs = needs.kwargs if needs else {}
    world, min_nodes = MPI.COMM_WORLD.size, kwargs.get("min_nodes", 1)
    if world > kwargs.get("max_size", world):
        pytest.skip(f"says nothing more in a world of {world}")
    if (-(-world // node_size) if node_size else hosts) < min_nodes:
        pytest.skip("needs several nodes")
    if node_size not in clusters:
        clusters[node_size] = Cluster(MPI.COMM_WORLD, node_size)
    found = clusters[node_size]
    found.roles = Roles((), tuple(range(found.world)))
    yield found
    if request.config.stash[WORLD].sound:
        found.barrier()
        left = found.poll()
        check(found.comm, not left, f"messages are left: {left}")
