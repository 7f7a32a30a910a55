import ctypes
import mmap
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from verdict import check

from mpips.mpi import window as windows
from mpips.mpi.collective_errors import CollectiveError
from mpips.mpi.pages import LargePages, large_page
from mpips.mpi.window import Field, Plan, Window
from mpips.mpi.world import Cluster

pytestmark = pytest.mark.mpi

MOVE_PAGES = {"x86_64": 279, "aarch64": 239}


def plan(rank: int) -> Plan:
    """A segment whose fields differ from rank to rank, and end off the cache line."""
    return Plan(
        (
            Field("bytes", "u1", (3 * rank + 1,)),
            Field("words", "i8", (2, 5 + rank)),
            Field("none", "f4", (0,)),
            Field("large", "f8", (20_000 + 7 * rank,)),  # more than 64 KiB
            Field("sparse", "i4", (50_000,), sparse=True),
            Field("small", "f4", (rank + 1,)),
        )
    )


def plans(cluster: Cluster) -> list[Plan]:
    return [plan(rank) for rank in range(cluster.world)]


def content(rank: int) -> np.ndarray:
    return np.arange(20_000 + 7 * rank) + 1e6 * rank


def fill(cluster: Cluster, window: Window) -> None:
    """Write this rank's fields, so that every element names its owner and its place."""
    rank = cluster.rank
    window.view(rank, "large")[:] = content(rank)
    window.view(rank, "words")[:] = 100 * rank + np.arange(2 * (5 + rank)).reshape(2, -1)
    window.view(rank, "bytes")[:] = rank + 1
    window.view(rank, "small")[:] = -rank
    cluster.barrier()


def read(cluster: Cluster, window: Window, *where: Any) -> None:
    requests = window.get(*where)
    cluster.wait(lambda: MPI.Request.Testall(requests))


def touched(view: np.ndarray) -> np.ndarray:
    """Return for each whole page of `view` whether this process has touched it (move_pages(2))."""
    first = -(-view.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = range(first, view.ctypes.data + view.nbytes - mmap.PAGESIZE + 1, mmap.PAGESIZE)
    n = len(pages)
    nodes, addresses = (ctypes.c_int * n)(), (ctypes.c_void_p * n)(*pages)
    number, count = ctypes.c_long(MOVE_PAGES[platform.machine()]), ctypes.c_ulong(n)
    libc, zero = ctypes.CDLL(None, use_errno=True), ctypes.c_long(0)
    if libc.syscall(number, zero, count, addresses, None, nodes, zero) < 0:
        raise OSError(ctypes.get_errno(), "move_pages")
    return np.array(nodes) >= 0


def need_move_pages() -> None:
    if platform.machine() not in MOVE_PAGES:
        pytest.skip("move_pages has another number here")
    try:
        touched(np.ones(1 << 14))
    except OSError as error:
        pytest.skip(f"the kernel forbids move_pages: {error}")


def check_shared_out(cluster: Cluster, view: np.ndarray, own: slice, breaks: int) -> None:
    """Check that one rank of the node touched each page, but for `breaks`, and this one `own`."""
    ranks = cluster.node.allreduce(touched(view).astype(int))
    several = int((ranks > 1).sum())
    check(cluster.comm, bool(ranks.all()) and several <= breaks < len(ranks) / 2, ranks.tolist())
    check(cluster.comm, bool(touched(view[own]).all()), own)


def test_a_segment_is_first_touched_by_its_owner(cluster: Cluster) -> None:
    need_move_pages()
    window = Window(cluster, plans(cluster))
    pages = {rank: touched(window.view(rank, "large")) for rank in cluster.my_node}
    own = pages.pop(cluster.rank)
    check(cluster.comm, len(own) > 30 and bool(own.all()), own)
    others = [rank for rank, found in pages.items() if found.any()]
    check(cluster.comm, not others, others)
    window.free()


def test_views_are_aligned_typed_and_zero(cluster: Cluster) -> None:
    for _ in range(2):  # the second time over, the memory may have been used before
        window = Window(cluster, plans(cluster))
        wrong = [
            (rank, field.name)
            for rank in cluster.my_node
            for field in plan(rank).fields
            for view in [window.view(rank, field.name)]
            if view.ctypes.data % 64
            or view.any()
            or view.shape != field.shape
            or view.dtype != np.dtype(field.dtype)
        ]
        check(cluster.comm, not wrong, wrong)
        cluster.barrier()
        for field in plan(cluster.rank).fields:
            window.view(cluster.rank, field.name).view("u1").fill(255)
        cluster.barrier()
        window.free()
        window.free()


def test_stores_are_seen_on_the_node_only(cluster: Cluster) -> None:
    window = Window(cluster, plans(cluster), remote_reads=False)
    fill(cluster, window)
    wrong = list[object]()
    for rank in cluster.my_node:
        views = [window.view(rank, name) for name in ("large", "words", "bytes", "small")]
        last = 100 * rank + 2 * (5 + rank) - 1
        good = np.array_equal(views[0], content(rank)) and views[1][1, -1] == last
        good = good and (views[2] == rank + 1).all() and (views[3] == -rank).all()
        wrong += [] if good else [(rank, views)]
    check(cluster.comm, not wrong, wrong)
    for rank in set(range(cluster.world)) - set(cluster.my_node):
        with pytest.raises(KeyError):
            window.view(rank, "words")
    with pytest.raises(KeyError):
        window.view(cluster.rank, "unknown")
    cluster.barrier()
    window.free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.world(max_size=4, min_nodes=2)
@pytest.mark.parametrize("piece_bytes", [None, 4096])
@pytest.mark.parametrize("shared", [True, False])
def test_get_reads_any_range_of_any_rank(
    cluster: Cluster, piece_bytes: int | None, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing outside a field; and what is stored later, also in private memory."""
    if piece_bytes:
        monkeypatch.setattr(windows, "GET_MAX_BYTES", piece_bytes)
    ranks = cluster if shared else Cluster(cluster.comm, node_size=1)
    window, wrong = Window(ranks, plans(ranks), shared=shared), list[object]()
    fill(ranks, window)
    for rank in range(ranks.world):
        whole = content(rank)
        n = len(whole)
        for begin, end in [(0, n), (0, 1), (n - 1, n), (5, 5), (n, n), (127, 128 * 65), (1, n)]:
            out = np.full(end - begin + 2, -1.0)
            read(ranks, window, rank, "large", out[1:-1], begin)
            if not np.array_equal(out, [-1, *whole[begin:end], -1]):
                wrong.append((rank, begin, end))
        words, small = np.zeros(2 * (5 + rank), "i8"), np.zeros(rank + 1, "f4")
        read(ranks, window, rank, "words", words)
        read(ranks, window, rank, "small", small)
        if (words != 100 * rank + np.arange(len(words))).any() or (small != -rank).any():
            wrong.append((rank, words, small))
    target = (ranks.rank + 1) % ranks.world
    n = len(content(target))
    outside = [("large", n + 1, 0), ("large", 1, n), ("large", 2, n - 1), ("small", 1, -1)]
    for name, size, begin in outside:
        with pytest.raises(IndexError):
            read(ranks, window, target, name, np.zeros(size, "f8"), begin)
    for turn in range(1, 6):
        ranks.barrier()
        window.view(ranks.rank, "large")[:] = 10 * turn + ranks.rank
        ranks.barrier()
        later = np.zeros(n)
        read(ranks, window, target, "large", later)
        if (later != 10 * turn + target).any():
            wrong.append((turn, np.unique(later)))
    check(ranks.comm, not wrong, wrong)
    window.free()
    if not shared:
        ranks.free()


def resident_bytes() -> int:
    """Return the memory that this process has written or read, apart from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return 1024 * sum(map(int, found))


def test_a_sparse_field_takes_what_is_written(cluster: Cluster) -> None:
    """Untouched it costs no memory, under either MPI."""
    fields = (Field("sparse", "f8", (1 << 26,), sparse=True),)
    free, held = windows.shared_bytes_free(), resident_bytes()
    window = Window(cluster, [Plan(fields)] * cluster.world)
    view = window.view(cluster.rank, "sparse")
    view[1 << 25] = 3
    touched = max(free - windows.shared_bytes_free(), resident_bytes() - held)
    wrong = view[(1 << 25) + 1] != 0 or touched > 1 << 27
    cluster.barrier()
    window.free()
    check(cluster.comm, not wrong, touched)


def large_bytes() -> int:
    """Return the memory that this process has mapped in large pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    names = ("AnonHugePages:", "ShmemPmdMapped:")
    return 1024 * sum(int(text.partition(name)[2].split()[0]) for name in names)


def test_sparse_fields_are_in_large_pages_for_all_who_read(cluster: Cluster) -> None:
    """Also a field behind others; who reads before sees the same after. No mapping is left."""
    fields = (Field("words", "i8", (777,)), Field("sparse", "i8", (1 << 20,), sparse=True))
    window = Window(cluster, [Plan(fields)] * cluster.world)
    mine = window.view(cluster.rank, "sparse")
    mine[:] = np.arange(mine.size) + cluster.rank
    cluster.barrier()
    total = int(mine.sum()) - mine.size * cluster.rank

    def wrong() -> list[int]:
        found = {rank: int(window.view(rank, "sparse").sum()) for rank in cluster.my_node}
        return [rank for rank, sums in found.items() if sums != total + mine.size * rank]

    first, small = wrong(), large_bytes()
    cluster.barrier()
    large = LargePages(lambda: [mine])
    large.look()
    cluster.barrier()
    second, added = wrong(), large_bytes() - small
    cluster.barrier()
    check(cluster.comm, not first + second, (first, second))
    everyone = sum(cluster.comm.allgather(large.nbytes))
    check(cluster.comm, added > 0 or not everyone, f"of {everyone} bytes none is mapped")
    if everyone:
        check(cluster.comm, added >= len(cluster.my_node) * (large.nbytes - large_page()), added)
    window.free()
    before = Path("/proc/self/maps").read_text().count("\n")
    for _ in range(3):
        window = Window(cluster, [Plan(fields)] * cluster.world)
        window.view(cluster.rank, "sparse")[:] = 1
        window.free()
    left = Path("/proc/self/maps").read_text().count("\n") - before
    check(cluster.comm, left < 3, left)


@pytest.mark.parametrize("lacking", [0, 1])
def test_too_little_shared_memory_is_refused_on_all_ranks(
    cluster: Cluster, lacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [cluster.node_of.count(node) > 1 for node in cluster.node_of]  # others need none
    needed = sum(p.nbytes for p, shares in zip(plans(cluster), several, strict=True) if shares)
    lacking = min(lacking, needed)
    if cluster.rank == cluster.world - 1:
        monkeypatch.setattr(windows, "shared_bytes_free", lambda: needed - lacking)
    message = ""
    try:
        Window(cluster, plans(cluster)).free()
    except CollectiveError as error:
        message = str(error)
    words = (f"{needed} bytes", f"{needed - 1}", "--window private") if lacking else ()
    check(cluster.comm, all(word in message for word in words), message)
    check(cluster.comm, bool(message) == bool(lacking), message)
    check(cluster.comm, len(set(cluster.comm.allgather(message))) == 1, message)
