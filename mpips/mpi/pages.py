"""Pages of memory: large ones, and their return to the kernel.

Whoever reads rows of a table reads most of them from a page that the processor has not met lately,
and then it walks through the tables of pages, which takes longer than the row. A page of 2 MB holds
512 of the usual ones. Shared memory comes in small pages where nobody has set the system up
otherwise, but a process may have some of it put together (madvise(2), MADV_COLLAPSE, Linux 6.1).
It has to be mapped at an address that lies in a large page where it lies in the file, and an MPI
maps windows anywhere: `Remapped` is a second mapping.
"""

import ctypes
import errno
import mmap
import os
import platform
import resource
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np

from mpips.mpi.process import mappings

LARGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MADV_REMOVE, MADV_COLLAPSE = 9, 25  # of Linux, which Python does not name
MAP_NORESERVE = 0x4000  # memory is not set aside, but given where it is written
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
# Numbers of the call. The function of the C library is not it where UCX before 1.15 watches over
# memory: there the new address is lost (https://github.com/openucx/ucx/issues/8820).
SYS_MREMAP = {"x86_64": 25, "aarch64": 216, "riscv64": 216, "ppc64le": 163, "s390x": 163}
FULL, FULL_OF = 7, 8  # of a large page are in use: what it adds is less than a seventh
# Of large pages at once: the kernel waits for all cores before each. And how many times as long
# other work goes on behind it.
MOST, REST = 8, 1
LEAST_WAIT_S, MOST_WAIT_S, WAIT = 0.01, 60.0, 10  # until all is looked at again


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
    """Return whether the kernel has taken an advice (madvise(2))."""
    return not _library().madvise(begin, size, advice)


@cache
def large_page() -> int:
    """Return the bytes of a large page; 0 where the kernel has none."""
    try:
        return int(LARGE_SIZE.read_text())
    except (OSError, ValueError):
        return 0


def shared_page() -> int:
    """Return the bytes of the large pages that shared memory is put into here; 0 if it is not."""
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
    """Have the kernel take back the pages that lie in an array; what is read there then is zero.

    Returns:
        Whether it could: memory of another kind keeps what it holds, and stays.
    """
    page = mmap.PAGESIZE
    begin = -(-array.ctypes.data // page) * page
    size = (array.ctypes.data + array.nbytes) // page * page - begin
    if size <= 0:
        return False
    # Shared memory is the file's, which MADV_REMOVE makes a hole in; other memory knows the second.
    return any(_advise(begin, size, advice) for advice in (MADV_REMOVE, mmap.MADV_DONTNEED))


# A second mapping --------------------------------------------------------------------------------


class Remapped:
    """The same shared memory, mapped where it can be in large pages.

    Args:
        given: The memory, whole; shape (n,), dtype uint8.

    Attributes:
        memory: The memory to use: the second mapping, or `given` itself where there can be none.
    """

    def __init__(self, given: np.ndarray) -> None:
        self.memory, self._mapping = given, (0, 0)
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return  # who has a limit of addresses needs them for something else
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
        """Unmap it; `memory` must not be used afterwards. May be called twice."""
        at, size = self._mapping
        if size:
            _library().munmap(at, size)
        self._mapping = 0, 0


def _offset_in_file(address: int) -> int | None:
    """Return where in its file an address of this process lies; None where it is of none."""
    for begin, end, permissions, offset, inode, _ in mappings():
        if begin <= address < end:
            return offset + address - begin if permissions.endswith("s") and inode else None
    return None


def _map_again(first: int, size: int, skip: int) -> int | None:
    """Map shared memory once more, `skip` bytes behind the beginning of a large page.

    Returns:
        The address; None where the kernel does not: memory of another kind, or a limit.
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
    # Of size 0: a further mapping of the same pages (mremap(2)), in place of what is held there.
    found = library.syscall(call, first, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, at)
    for begin, end in ((held, at), (at + size if found == at else at, held + room)):
        if begin < end:
            library.munmap(begin, end - begin)
    return at if found == at else None


# Large pages -------------------------------------------------------------------------------------


class LargePages:
    """Has memory put into large pages as it fills, a little at a time. Collective: no.

    What is not written for the most part stays in small pages, so that less than a seventh is
    added to what is in use.

    Args:
        used: Returns the arrays that are in use now.
    """

    def __init__(self, used: Callable[[], Iterable[np.ndarray]]) -> None:
        self._used, self._large = used, large_page()
        self._done = self._rest = np.zeros(0, np.int64)  # addresses of large pages
        self._next, self._wait, self._took, self._made = 0.0, LEAST_WAIT_S, 0.0, list[int]()
        self._here = np.zeros(self._large // mmap.PAGESIZE, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that were put into large pages, or are left to the kernel."""
        return (len(self._done) + len(self._made)) * self._large

    def look(self) -> None:
        """Put some of it into large pages, if it is time for that.

        Blocks: for some milliseconds. Others go on; who touches what is moved just now waits.
        """
        start = perf_counter()
        if not self._large or start < self._next:
            return
        if not len(self._rest):
            self._begin()
        some, self._rest = self._rest[:MOST], self._rest[MOST:]
        full = [at for at in some.tolist() if self._is_full(at)]
        for first, count in _runs(full, self._large):
            self._made += self._collapse(first, count)
        end = perf_counter()
        self._took += end - start
        self._next = end + REST * (end - start)
        if not len(self._rest):
            self._end(end)

    def _begin(self) -> None:
        """Find what is in use, and no large page yet."""
        found, large = [np.zeros(0, np.int64)], self._large
        for array in self._used():
            begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
            found.append(np.arange(-(-begin // large), end // large) * large)
        used = np.unique(np.concatenate(found))
        self._done = np.intersect1d(np.append(self._done, self._made), used)
        self._rest, self._made = np.setdiff1d(used, self._done), []

    def _end(self, now: float) -> None:
        """All was looked at: wait, longer each time where there was nothing to do."""
        self._wait = min(2 * self._wait, MOST_WAIT_S)
        self._next = now + max(self._wait, min(WAIT * self._took, MOST_WAIT_S))
        if self._made:
            self._wait, self._next = LEAST_WAIT_S, now + LEAST_WAIT_S
        self._took = 0.0

    def _is_full(self, at: int) -> bool:
        """Return whether most of what would be a large page is in memory."""
        if _library().mincore(at, self._large, self._here.ctypes.data):
            return False
        return FULL_OF * int(np.count_nonzero(self._here & 1)) >= FULL * self._here.size

    def _collapse(self, first: int, count: int) -> list[int]:
        """Have so many be large pages; returns those that are, or are left to the kernel."""
        size, found = self._large, list(range(first, first + count * self._large, self._large))
        if _advise(first, count * size, MADV_COLLAPSE):
            return found
        if count > 1:
            return [at for each in found for at in self._collapse(each, 1)]
        # Memory that was to be of small pages; and kernels that do it by themselves, in a while.
        if ctypes.get_errno() != errno.EINVAL or not _advise(first, size, mmap.MADV_HUGEPAGE):
            return []
        done = _advise(first, size, MADV_COLLAPSE) or ctypes.get_errno() == errno.EINVAL
        return found if done else []


def _runs(addresses: list[int], step: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the number of those that lie one behind the other."""
    begin = 0
    for k in range(1, len(addresses) + 1):
        if k == len(addresses) or addresses[k] - addresses[k - 1] != step:
            yield addresses[begin], k - begin
            begin = k
