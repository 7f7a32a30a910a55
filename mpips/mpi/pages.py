"""Pages of memory: large ones, and their return to the kernel.

A read of a table's row usually misses the processor's cache of page addresses (TLB). The walk
through the page tables then takes longer than the read. A page of 2 MB replaces 512 small ones. By
default, shared memory has small pages. A process may ask the kernel to collapse some of them into a
large page (madvise(2), MADV_COLLAPSE, Linux 6.1). For this, address and file offset must be equal
modulo the size of a large page, and an MPI maps windows at any address. So `Remapped` makes a
second mapping.
"""

import contextlib
import ctypes
import errno
import math
import mmap
import os
import platform
import resource
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np

from mpips.mpi.process import mappings

LARGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MADV_REMOVE, MADV_COLLAPSE = 9, 25  # Linux's values, which Python does not define
MAP_NORESERVE = 0x4000  # reserve no memory: a page takes memory when it is first written
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
# Numbers of the system call. UCX before 1.15 replaces the C library's function by its own, which
# ignores the new address (https://github.com/openucx/ucx/issues/8820).
SYS_MREMAP = {"x86_64": 25, "aarch64": 216, "riscv64": 216, "ppc64le": 163, "s390x": 163}
KEPT_BYTES = (1 << 25) - (1 << 16)  # a little less than glibc's DEFAULT_MMAP_THRESHOLD_MAX
FULL, FULL_OF = 7, 8  # a page is collapsed if 7/8 of it are in use, so it adds at most a seventh
# Most pages collapsed at once, since the kernel waits for all cores before each. And the pause
# after that, as a multiple of the time taken.
MOST_AT_ONCE, REST = 8, 1
LEAST_WAIT_S, MOST_WAIT_S, WAIT = 0.01, 60.0, 10  # pause before all pages are checked again


@cache
def _library() -> ctypes.CDLL:
    library, address, size = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t
    number = ctypes.c_int
    library.mmap.restype, library.syscall.restype = address, ctypes.c_long
    library.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
    library.syscall.argtypes = (ctypes.c_long, address, size, size, ctypes.c_long, address)
    library.munmap.argtypes = (address, size)
    library.madvise.argtypes = (address, size, number)
    library.mincore.argtypes = (address, size, address)
    return library


def _advise(begin: int, size: int, advice: int) -> bool:
    """Call madvise(2); return whether it succeeded."""
    return not _library().madvise(begin, size, advice)


def shared_zeros(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros that forked processes share; a page takes memory when it is first written."""
    count, flags = math.prod(shape), mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize), flags)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def text_of(path: Path) -> str:
    """Return the text of a file, without surrounding white space; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


@cache
def large_page() -> int:
    """Return the size of a large page in bytes; 0 if the kernel has none."""
    size = text_of(LARGE_SIZE)
    return int(size) if size.isdecimal() else 0


def shared_page() -> int:
    """Return the size of large pages of shared memory in bytes; 0 if the kernel makes none."""
    large = large_page()
    if not large:
        return 0
    file = os.memfd_create("mpips-pages", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, large)
        remapped = Remapped(np.frombuffer(mmap.mmap(file, large), np.uint8))
    finally:
        os.close(file)
    remapped.memory[:: mmap.PAGESIZE] = 1
    done = _advise(remapped.memory.ctypes.data, large, MADV_COLLAPSE)
    remapped.free()
    return large if done else 0


def give_back(array: np.ndarray) -> bool:
    """Return the pages within an array to the kernel; reads give zeros there afterwards.

    Returns:
        Whether the kernel took them. If not, as for other kinds of memory, the array does not
        change.
    """
    page = mmap.PAGESIZE
    begin = -(-array.ctypes.data // page) * page
    size = (array.ctypes.data + array.nbytes) // page * page - begin
    if size <= 0:
        return False
    # MADV_REMOVE makes a hole in the file of shared memory; MADV_DONTNEED is for private memory.
    return any(_advise(begin, size, advice) for advice in (MADV_REMOVE, mmap.MADV_DONTNEED))


def keep_freed_memory() -> None:
    """Have malloc keep freed arrays of up to 32 MiB each, at most 64 MiB in all.

    Otherwise, a step that allocates and frees such arrays returns their pages to the kernel, which
    clears them again for the next step. Freeing such a block raises the threshold for mmap of
    glibc's malloc (mallopt(3), M_MMAP_THRESHOLD). In other libraries this has no effect.
    """
    np.empty(KEPT_BYTES, np.uint8)


# A second mapping --------------------------------------------------------------------------------


class Remapped:
    """Second mapping of shared memory, at an address where it can have large pages.

    Args:
        given: The whole memory, shape (n,), dtype uint8.

    Attributes:
        memory: The memory to use: the second mapping, or `given` if there can be none.
    """

    def __init__(self, given: np.ndarray) -> None:
        self.memory, self._mapping = given, (0, 0)
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return  # addresses are limited: leave them to the program
        page, large, begin = mmap.PAGESIZE, large_page(), given.ctypes.data
        if not 0 < large <= given.nbytes:
            return
        first = begin // page * page
        size = -(-(begin + given.nbytes - first) // page) * page
        offset = _offset_in_file(first)
        at = None if offset is None else _map_again(first, size, offset % large)
        if at is not None:
            self._mapping = at, size
            found = (ctypes.c_ubyte * given.nbytes).from_address(at + begin - first)
            self.memory = np.ctypeslib.as_array(found)

    def free(self) -> None:
        """Unmap the memory; it must not be used afterwards. May be called twice."""
        at, size = self._mapping
        if size:
            _library().munmap(at, size)
        self._mapping = 0, 0


def _offset_in_file(address: int) -> int | None:
    """Return the offset of an address in its shared file; None if it has no such file."""
    for begin, end, permissions, offset, inode, _ in mappings():
        if begin <= address < end:
            return offset + address - begin if permissions.endswith("s") and inode else None
    return None


def _map_again(first: int, size: int, skip: int) -> int | None:
    """Map shared memory again, `skip` bytes after the beginning of a large page.

    Args:
        first: Address of the memory, at the beginning of a page.
        size: Size in bytes.
        skip: Offset in bytes.

    Returns:
        The address; None if the kernel refuses, for other kinds of memory or by a limit.
    """
    library, large, call = _library(), large_page(), SYS_MREMAP.get(platform.machine())
    if call is None:
        return None
    room, none = size + large, ctypes.c_void_p(-1).value
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    held = library.mmap(None, room, 0, flags, -1, 0)
    if held == none:
        return None
    at: int = held + (skip - held) % large
    # With old size 0, mremap(2) maps the same pages again, in place of the reserved addresses.
    found = library.syscall(call, first, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, at)
    for begin, end in ((held, at), (at + size if found == at else at, held + room)):
        if begin < end:
            library.munmap(begin, end - begin)
    return at if found == at else None


# Large pages -------------------------------------------------------------------------------------


class LargePages:
    """Collapses memory into large pages as it fills, a little at a time. Collective: no.

    A page of which less than 7/8 are in use keeps small pages. So at most a seventh is added to the
    memory in use.

    Args:
        used: Returns the arrays that are in use now.
    """

    def __init__(self, used: Callable[[], Iterable[np.ndarray]]) -> None:
        self._used, self._large = used, large_page()
        # Addresses of large pages: finished, and still to check.
        self._finished = self._unchecked = np.zeros(0, np.int64)
        self._next, self._wait, self._spent_s, self._collapsed = 0.0, LEAST_WAIT_S, 0.0, list[int]()
        self._resident = np.zeros(self._large // mmap.PAGESIZE, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes in pages that were collapsed, or left to the kernel."""
        return (len(self._finished) + len(self._collapsed)) * self._large

    def look(self) -> None:
        """Collapse some pages, if it is time to.

        Blocks: for some milliseconds. Other threads and ranks go on, unless they touch a page that
        the kernel moves just then.
        """
        start = perf_counter()
        if not self._large or start < self._next:
            return
        if not len(self._unchecked):
            self._begin()
        some, self._unchecked = self._unchecked[:MOST_AT_ONCE], self._unchecked[MOST_AT_ONCE:]
        full = np.array([at for at in some.tolist() if self._is_full(at)], np.int64)
        for run in np.split(full, np.flatnonzero(np.diff(full) != self._large) + 1):
            self._collapsed += self._collapse(run.tolist())
        end = perf_counter()
        self._spent_s += end - start
        self._next = end + REST * (end - start)
        if not len(self._unchecked):
            self._end(end)

    def _begin(self) -> None:
        """Find the pages in use that are not finished."""
        found, large = [np.zeros(0, np.int64)], self._large
        for array in self._used():
            begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
            found.append(np.arange(-(-begin // large), end // large) * large)
        used = np.unique(np.concatenate(found))
        self._finished = np.intersect1d(np.append(self._finished, self._collapsed), used)
        self._unchecked, self._collapsed = np.setdiff1d(used, self._finished), []

    def _end(self, now: float) -> None:
        """Set the next time to check, later each time that no page was collapsed."""
        self._wait = min(2 * self._wait, MOST_WAIT_S)
        self._next = now + max(self._wait, min(WAIT * self._spent_s, MOST_WAIT_S))
        if self._collapsed:
            self._wait, self._next = LEAST_WAIT_S, now + LEAST_WAIT_S
        self._spent_s = 0.0

    def _is_full(self, at: int) -> bool:
        """Return whether at least 7/8 of a large page are in memory."""
        if _library().mincore(at, self._large, self._resident.ctypes.data):
            return False
        return FULL_OF * int(np.count_nonzero(self._resident & 1)) >= FULL * self._resident.size

    def _collapse(self, pages: list[int]) -> list[int]:
        """Collapse consecutive pages, by their addresses.

        Returns:
            Addresses of the pages that were collapsed, or are left to the kernel.
        """
        size = len(pages) * self._large
        if not pages or _advise(pages[0], size, MADV_COLLAPSE):
            return pages
        if len(pages) > 1:
            return [at for page in pages for at in self._collapse([page])]
        # EINVAL: the memory is set to small pages, or the kernel only collapses by itself, later.
        if ctypes.get_errno() != errno.EINVAL or not _advise(pages[0], size, mmap.MADV_HUGEPAGE):
            return []
        done = _advise(pages[0], size, MADV_COLLAPSE) or ctypes.get_errno() == errno.EINVAL
        return pages if done else []
