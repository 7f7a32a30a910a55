"""Memory of a node that every rank of the job can read.

Each rank allocates one segment of named fields. Ranks of its node see it as plain memory
(`MPI_Win_allocate_shared`); ranks of other nodes read it by one-sided Get through a second
window over the same memory (`MPI_Win_create`). Every field has one writer.

Header words are touched by `publish` and `observe` (see `mpips.kernels`) and by nothing else.

Messages:
    /dev/shm on H has X free: Its windows do not fit. Enlarge it (docker: ``--shm-size``), use more
        nodes, or ``--window private``.
"""

import contextlib
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpips.errors import UserError, human_bytes
from mpips.layout import CACHE_LINE_BYTES
from mpips.mpi import segments
from mpips.mpi.collective_errors import call_on_all
from mpips.mpi.pages import MAP_NORESERVE, Remapped
from mpips.mpi.segments import SHARED_MEMORY
from mpips.mpi.start import MPI, is_open_mpi
from mpips.mpi.world import Cluster

Parts = tuple[tuple[int, int, int], ...]  # each of a rank, from begin to end
TRANSFER_MAX_BYTES = 1 << 30
# Open MPI's Get of more than 64 KiB over TCP sends twice the payload upstream.
GET_MAX_BYTES = 1 << 16 if is_open_mpi() else TRANSFER_MAX_BYTES


@dataclass(frozen=True)
class Field:
    """A named array in a segment.

    Attributes:
        name: Of the field.
        dtype: Of its elements.
        shape: Of the array.
        sparse: Whether it takes memory only where it is written: nobody fills it with zeroes, but
            the system does with each page that is touched first. Ranks of other nodes cannot
            `Window.get` it.
        parts: The ranges of a 1-D array that several ranks of the node write. Each zeroes its own,
            so that these pages lie on its NUMA node; without any, the segment's owner zeroes all.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sparse: bool = False
    parts: Parts = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Plan:
    """What one rank's segment holds; each field begins on a cache line, sparse ones come last."""

    fields: tuple[Field, ...]

    @cached_property
    def offsets(self) -> Mapping[str, tuple[int, Field]]:
        """``{name: (offset in bytes, field)}``; every Get looks there."""
        out, at = {}, 0
        for field in sorted(self.fields, key=lambda field: field.sparse):
            out[field.name] = (at, field)
            at += -(-field.nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return _lines(self.fields)

    @property
    def remote_nbytes(self) -> int:
        """Bytes that ranks of other nodes may read: all but sparse fields.

        A network that reads memory by itself may want all its pages to be there.
        """
        return _lines(field for field in self.fields if not field.sparse)


def _lines(fields: Iterable[Field]) -> int:
    return sum(-(-f.nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES for f in fields)


class Window:
    """One segment a rank, read by loads on the node and by Get from other nodes.

    Collective: yes, construction and `free` both. Fields are zero after construction.

    Args:
        cluster: The job's ranks.
        plans: Segment of each rank, the same list on every rank.
        shared: Whether segments are node-shared; False wants every node to be of one rank. The
            memory of a rank alone on its node is its own either way.
        remote_reads: Whether ranks of other nodes may `get`.

    Raises:
        UserError: If the shared memory of a host is too small.
    """

    def __init__(
        self,
        cluster: Cluster,
        plans: Sequence[Plan],
        shared: bool = True,
        remote_reads: bool = True,
    ) -> None:
        self._cluster, self._plans = cluster, plans
        self._local: MPI.Win | None = None
        self._remote: MPI.Win | None = None
        self._remapped = list[Remapped]()
        if shared:
            call_on_all(cluster.comm, _too_small(cluster, plans))
        if len(cluster.my_node) > 1:
            segments = self._allocate_shared()
        else:
            segments = {cluster.rank: _own_memory(plans[cluster.rank])}
        self._views = {
            rank: _fields(plans[rank], memory[: plans[rank].nbytes])
            for rank, memory in segments.items()
        }
        own = segments[cluster.rank][: plans[cluster.rank].remote_nbytes]
        # By who writes it later: first touch, and the standard promises no zeroes.
        for rank, views in self._views.items():
            for field in plans[rank].fields:
                if rank == cluster.rank and not field.sparse and not field.parts:
                    views[field.name].fill(0)
                for writer, begin, end in field.parts:
                    if writer == cluster.rank:
                        views[field.name][begin:end] = 0
        if remote_reads and cluster.nodes > 1:
            self._remote = MPI.Win.Create(own, 1, comm=cluster.comm)
            self._remote.Lock_all(MPI.MODE_NOCHECK)
        self.make_visible()

    def _allocate_shared(self) -> dict[int, np.ndarray]:
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        size = self._plans[self._cluster.rank].nbytes + CACHE_LINE_BYTES
        with segments.noted():
            self._local = MPI.Win.Allocate_shared(size, 1, info, self._cluster.node)
        info.Free()
        self._local.Lock_all(MPI.MODE_NOCHECK)
        found = dict[int, np.ndarray]()
        for k, rank in enumerate(self._cluster.my_node):
            memory = np.asarray(self._local.Shared_query(k)[0])
            if any(field.sparse for field in self._plans[rank].fields):
                self._remapped.append(Remapped(memory))
                memory = self._remapped[-1].memory
            # Aligned by every reader alike: mappings of one segment differ by whole pages.
            found[rank] = _aligned(memory)
        return found

    def make_visible(self) -> None:
        """Let all ranks see what any has stored before. Collective: yes."""
        windows = [w for w in (self._local, self._remote) if w is not None]
        for w in windows:
            w.Sync()
        self._cluster.barrier()
        for w in windows:
            w.Sync()

    def view(self, rank: int, name: str) -> np.ndarray:
        """Return a field of a local rank's segment as an array, without a copy.

        Raises:
            KeyError: If `rank` is on another node or has no such field.
        """
        return self._views[rank][name]

    def get(self, rank: int, name: str, out: np.ndarray, begin: int = 0) -> list[MPI.Request]:
        """Begin to read ``field[begin : begin + out.size]`` of any rank into `out`, 1-D.

        `out` may be read when all the requests are complete, which needs the target to enter
        MPI (MPI-4.1, 12.7.3). Collective: no. Blocks: no.
        """
        offset, field = self._plans[rank].offsets[name]
        assert not field.sparse, f"{name} is not read from other nodes"
        items = math.prod(field.shape)
        if begin < 0 or begin + out.size > items:  # MPICH reads past the end of a window silently
            raise IndexError(f"items {begin} to {begin + out.size} of {name}, which has {items}")
        assert self._remote is not None, "get needs a job of several nodes"
        step = GET_MAX_BYTES // out.itemsize
        at = offset + begin * out.itemsize
        requests = []
        for b in range(0, out.size, step):
            part = out[b : b + step]
            target = (at + b * out.itemsize, part.nbytes, MPI.BYTE)
            requests.append(self._remote.Rget([part, MPI.BYTE], rank, target))
        return requests

    def free(self) -> None:
        """Free the windows; views must not be used afterwards. May be called twice.

        Collective: yes.
        """
        self._views = {}
        for window in (self._remote, self._local):  # the remote one lies on the local one's memory
            if window is not None:
                window.Unlock_all()
                window.Free()
        self._remote = self._local = None
        for each in self._remapped:
            each.free()


def shared_bytes_free() -> int:
    """Return the free bytes of the file system that holds shared memory."""
    stat = os.statvfs(SHARED_MEMORY)
    return stat.f_bavail * stat.f_frsize


def _too_small(cluster: Cluster, plans: Sequence[Plan]) -> UserError | None:
    """Check the host's sum: filling it up kills MPICH by SIGBUS and hangs Open MPI."""
    host, node_of = cluster.hosts[cluster.rank], cluster.node_of
    ranks = Counter(node_of)
    needed = sum(
        plan.nbytes
        for plan, other, node in zip(plans, cluster.hosts, node_of, strict=True)
        if other == host and ranks[node] > 1
    )
    free = shared_bytes_free()
    if needed <= free:
        return None
    has, wants = human_bytes(free), human_bytes(needed)
    if has == wants:
        has, wants = f"{free} bytes", f"{needed} bytes"
    return UserError(
        f"{SHARED_MEMORY} on {host} has {has} free",
        f"at least {wants} for the windows of its ranks",
        "enlarge it (docker: --shm-size), use more nodes, or --window private",
    )


def _own_memory(plan: Plan) -> np.ndarray:
    """Return zeroes for a rank alone on its node, which take memory as they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, plan.nbytes + CACHE_LINE_BYTES, flags)
    dense = -(-(plan.remote_nbytes + CACHE_LINE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # a kernel without large pages has small ones
        memory.madvise(mmap.MADV_HUGEPAGE, 0, min(dense, len(memory)))
        if dense < len(memory):  # one row should not cost 2 MB
            memory.madvise(mmap.MADV_NOHUGEPAGE, dense)
    return _aligned(np.frombuffer(memory, "u1"))


def _aligned(memory: np.ndarray) -> np.ndarray:
    skip = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[skip:]


def _fields(plan: Plan, memory: np.ndarray) -> Mapping[str, np.ndarray]:
    return {
        name: memory[at : at + f.nbytes].view(f.dtype).reshape(f.shape)
        for name, (at, f) in plan.offsets.items()
    }


def transfer_pieces(array: np.ndarray) -> list[np.ndarray]:
    """Cut a 1-D array into views of at most 1 GiB, the most that one transfer moves."""
    step = TRANSFER_MAX_BYTES // array.itemsize
    return [array[b : b + step] for b in range(0, array.size, step)]
