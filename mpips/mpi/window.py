"""Memory of a node that every rank of the job can read.

Each rank allocates one segment of named fields. Ranks of its node see it as plain memory
(`MPI_Win_allocate_shared`). Ranks of other nodes read it by one-sided Get, through a second window
over the same memory (`MPI_Win_create`). Every field has one writer.

Only `publish` and `observe` (see `mpips.kernels`) may access header words.

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

Parts = tuple[tuple[int, int, int], ...]  # rank, begin and end of each part
TRANSFER_MAX_BYTES = 1 << 30
# Over TCP, a Get of more than 64 KiB by Open MPI also sends twice its payload to the owner.
GET_MAX_BYTES = 1 << 16 if is_open_mpi() else TRANSFER_MAX_BYTES


@dataclass(frozen=True)
class Field:
    """A named array in a segment.

    Attributes:
        name: Name of the field.
        dtype: dtype of its elements.
        shape: Shape of the array.
        sparse: Whether the array takes memory only where it is written. The system fills each page
            with zeros when it is first touched. Ranks of other nodes cannot `Window.get` it.
        parts: Ranges of a 1-D array that several ranks of the node write. Each rank fills its own
            range with zeros, so that its pages are on the rank's NUMA node. Without parts, the
            owner of the segment fills the array.
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
    """Fields of one rank's segment; each begins on a cache line, and sparse ones come last."""

    fields: tuple[Field, ...]

    @cached_property
    def offsets(self) -> Mapping[str, tuple[int, Field]]:
        """``{name: (offset in bytes, field)}``; cached, since every Get reads it."""
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

        A network with direct memory access may pin all these pages.
        """
        return _lines(field for field in self.fields if not field.sparse)


def _lines(fields: Iterable[Field]) -> int:
    return sum(-(-f.nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES for f in fields)


class Window:
    """One segment for each rank, read by loads on the node and by Get from other nodes.

    Fields are zero after construction.

    Args:
        cluster: The job's ranks.
        plans: Plan of each rank's segment, the same list on every rank.
        shared: Whether segments are shared within a node; if False, each node has one rank. A rank
            alone on its node has private memory in any case.
        remote_reads: Whether ranks of other nodes may `get`.

    Raises:
        UserError: If the shared memory of a host is too small.

    Collective: yes, construction and `free`.
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
        # Filled by the later writer, for first touch; the standard guarantees no zeros.
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
        memories = dict[int, np.ndarray]()
        for k, rank in enumerate(self._cluster.my_node):
            memory = np.asarray(self._local.Shared_query(k)[0])
            if any(field.sparse for field in self._plans[rank].fields):
                self._remapped.append(Remapped(memory))
                memory = self._remapped[-1].memory
            # All ranks skip the same bytes: mappings of a segment differ by whole pages.
            memories[rank] = _aligned(memory)
        return memories

    def make_visible(self) -> None:
        """Make earlier stores of all ranks visible to all. Collective: yes."""
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

        `out` may be read once all the requests are complete. For that the target must enter MPI
        (MPI-4.1, 12.7.3). Collective: no. Blocks: no.
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
        for window in (self._remote, self._local):  # first the one over the other's memory
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
    """Return the error if the segments of this host do not fit into its shared memory.

    When that memory is full, MPICH dies by SIGBUS and Open MPI hangs.
    """
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
    """Return zeros for a rank alone on its node; pages take memory when they are written."""
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
    """Divide a 1-D array into views of at most 1 GiB, the maximum of one transfer."""
    step = TRANSFER_MAX_BYTES // array.itemsize
    return [array[b : b + step] for b in range(0, array.size, step)]
