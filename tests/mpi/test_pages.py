"""Memory that is mapped a second time, put into large pages, and given back."""

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpips.mpi import pages
from mpips.mpi.pages import LargePages, Remapped, give_back, large_page, shared_page

LARGE = large_page() or 1 << 21
FULL, MOST, HALF, NONE = LARGE, LARGE * 15 // 16, LARGE // 2, 0


def file_memory(size: int, skip: int = 0) -> np.ndarray:
    """Return shared memory of a file, at an address that is in no large page as it is there."""
    number = os.memfd_create("pages")
    os.ftruncate(number, size + skip)
    memory = mmap.mmap(number, size, offset=skip)
    os.close(number)
    return np.frombuffer(memory, np.uint8)


def remapped_rooms() -> int:
    """Return how many mappings this process has of such files."""
    return Path("/proc/self/maps").read_text().count("/memfd:pages")


def in_large_pages() -> int:
    """Return the bytes of shared memory that this process has mapped in large pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.partition("ShmemPmdMapped:")[2].split()[0]) * 1024


@pytest.fixture
def remapped() -> Iterator[Remapped]:
    given = Remapped(file_memory(4 * LARGE))
    yield given
    given.free()


@pytest.fixture(scope="module")
def puts_together() -> bool:
    """Whether this kernel does it at once where it is asked to."""
    return shared_page() > 0


@pytest.mark.parametrize("skip", [0, 3 * mmap.PAGESIZE])
def test_the_second_mapping_is_of_the_same_memory(skip: int) -> None:
    memory = file_memory(3 * LARGE + mmap.PAGESIZE, skip)[40:-100]
    before = remapped_rooms()
    remapped = Remapped(memory)
    other = remapped.memory
    assert remapped_rooms() == before + 1
    assert other.shape == memory.shape
    assert other.ctypes.data != memory.ctypes.data
    assert (other.ctypes.data - skip - 40) % LARGE == 0
    other[[0, LARGE, -1]] = 1, 2, 3
    memory[1] = 4
    assert memory[[0, LARGE, -1]].tolist() == [1, 2, 3]
    assert other[1] == 4
    remapped.free()
    remapped.free()
    assert remapped_rooms() == before
    assert memory[LARGE] == 2


def test_memory_that_stays_in_its_first_mapping() -> None:
    """That of one process, too little of it, and where there is a limit of addresses."""
    private = np.frombuffer(mmap.mmap(-1, 2 * LARGE, mmap.MAP_PRIVATE), np.uint8)
    shared, (soft, hard) = file_memory(64 * LARGE), resource.getrlimit(resource.RLIMIT_AS)
    rooms = remapped_rooms()
    for memory in (private, np.zeros(2 * LARGE, np.uint8), shared[: LARGE - 1]):
        assert Remapped(memory).memory is memory
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + 1024 * LARGE, hard))
    try:
        assert Remapped(shared).memory is shared
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert remapped_rooms() == rooms


def test_what_is_in_use_is_put_into_large_pages(remapped: Remapped, puts_together: bool) -> None:
    memory, filled = remapped.memory, (FULL, HALF, MOST, NONE)
    for k, size in enumerate(filled):
        memory[k * LARGE : k * LARGE + size] = k + 1
    before, small = memory_in_use(memory), in_large_pages()
    large = LargePages(lambda: [memory])
    large.look()
    assert large.nbytes == 2 * LARGE or not puts_together
    added = memory_in_use(memory) - before
    assert added == (LARGE - MOST if puts_together else 0)
    for k, size in enumerate(filled):
        part = memory[k * LARGE : (k + 1) * LARGE]
        assert (part[:size] == k + 1).all()
        assert not part[size:].any()
    assert in_large_pages() - small == (2 * LARGE if puts_together else 0)


def memory_in_use(memory: np.ndarray) -> int:
    """Return the bytes of the pages that are there."""
    here = np.zeros(memory.nbytes // mmap.PAGESIZE, np.uint8)
    mincore, address, size = ctypes.CDLL(None).mincore, ctypes.c_void_p, ctypes.c_size_t
    mincore.argtypes = (address, size, address)
    assert not mincore(memory.ctypes.data, memory.nbytes, here.ctypes.data)
    return int((here & 1).sum()) * mmap.PAGESIZE


def test_what_fills_later_is_found_and_what_is_given_back_is_forgotten(
    remapped: Remapped, puts_together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, count = [0.0], [1]
    monkeypatch.setattr(pages, "perf_counter", lambda: now[0])
    large = LargePages(lambda: [remapped.memory[: count[0] * LARGE]])

    def look() -> int:
        now[0] += 1000
        large.look()
        return large.nbytes if puts_together else expected

    for part in range(4):
        count[0], expected = part + 1, (part + 1) * LARGE
        remapped.memory[part * LARGE : expected] = 1
        assert look() == expected
    count[0], expected = 2, 2 * LARGE
    assert give_back(remapped.memory[2 * LARGE :])
    assert look() == expected
    count[0] = 3
    assert look() == expected, "what is empty"
    remapped.memory[2 * LARGE : 3 * LARGE] = 1
    expected = 3 * LARGE
    assert look() == expected
    assert remapped.memory[: 3 * LARGE].all()


def test_what_is_tried_leaves_nothing(puts_together: bool) -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    files = len(os.listdir("/proc/self/fd"))
    assert {shared_page() for _ in range(5)} == {LARGE if puts_together else 0}
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 1
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("kind", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_memory_is_given_back(kind: int) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 64 * mmap.PAGESIZE, kind), "u1")
    memory[:] = 1
    inside = memory[100:-100]
    assert give_back(inside)
    assert not memory[mmap.PAGESIZE : -mmap.PAGESIZE].any()
    assert memory[: mmap.PAGESIZE].all()
    assert memory[-mmap.PAGESIZE :].all()
    assert not give_back(memory[10:100])
