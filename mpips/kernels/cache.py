"""Cache of compiled loops on disk.

Each variant of a loop has a file. Each kind of job also has a **bundle**, one file with all loops
that it loads: a shared file system takes long to open a file. If the bundle does not exist or lacks
a loop, a rank reads the loop's own file. One rank then writes the bundle for the next job.

Environment:
    XDG_CACHE_HOME: Folder for compiled loops, in ``mpips``. Default: ``~/.cache``.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

DIGEST_BYTES = 16
LOCKED_S = 0.02
COMPILER = "0307647e717e2db1"  # digest of its sources: a test names the new one where they change
HEAD_BYTES = 8  # head of a bundle: the length of its table of contents, which follows


class _Compilation:
    """Lock in the cache folder: one process compiles missing loops, and the others wait for it.

    Args:
        tell: See `compiling`.
        keeps: Whether to keep the lock until `release`. A process that waits for another rank
            before then must not keep it: the other rank may wait for the lock.
        bundle: Path of the job's bundle; None for no bundle.

    Attributes:
        used: Machine code of the loops loaded so far, by file name.
        bundled: Machine code in the bundle, by file name.
    """

    def __init__(self, tell: Callable[[], object], keeps: bool, bundle: Path | None = None) -> None:
        self.tell, self._keeps, self._bundle = tell, keeps, bundle
        self._lock: BinaryIO | None = None
        self.used: dict[str, bytes] = {}
        self.bundled = _unbundled(bundle)

    @contextlib.contextmanager
    def alone(self, path: Path) -> Iterator[None]:
        """Hold the lock within this block; without one if the file system lacks locks or room."""
        try:
            if self._lock is None:
                self._wait(path)
            yield
        finally:
            if not self._keeps:
                self.release()

    def _wait(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # it cannot be made, as on a full disk
            self._lock = path.open("ab")
        while self._lock is not None and not _locked(self._lock):
            self.tell()
            time.sleep(LOCKED_S)

    def release(self) -> None:
        """Release the lock, so that other processes can compile."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def note(self, name: str, code: bytes) -> None:
        """Note machine code that was loaded, for the bundle."""
        if self._bundle is not None:
            self.used[name] = code

    def write_bundle(self) -> None:
        """Write the bundle, if it lacks a loop that was loaded and no other process writes it."""
        if self._bundle is None or self.used.keys() <= self.bundled.keys():
            return
        with contextlib.suppress(OSError), self._bundle.with_name("lock").open("ab") as file:
            if _locked(file) and not self.used.keys() <= _unbundled(self._bundle).keys():
                contents = json.dumps({name: len(code) for name, code in self.used.items()})
                head = len(contents).to_bytes(HEAD_BYTES, "little") + contents.encode()
                _write(self._bundle, b"".join([head, *self.used.values()]))


def _unbundled(path: Path | None) -> Mapping[str, bytes]:
    """Return the machine code in a bundle by file name; empty if there is no bundle."""
    data = None if path is None else _read(path)
    if data is None:
        return {}
    at = HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES], "little")
    codes = {}
    for name, size in json.loads(data[HEAD_BYTES:at]).items():
        codes[name] = data[at : at + size]
        at += size
    return codes


def _locked(file: BinaryIO) -> bool:
    """Try to lock a file. Returns False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks: each process compiles for itself
        return not isinstance(error, BlockingIOError)
    return True


_compilation = _Compilation(lambda: None, keeps=False)


@contextlib.contextmanager
def compiling(tell: Callable[[], object], job: str = "") -> Iterator[None]:
    """Load loops within this block; one process of the host compiles all that are missing.

    Args:
        tell: Called before each loop that is compiled, and repeatedly while another process
            compiles. It may raise to stop the wait or the compilation.
        job: Text that determines which loops are loaded; empty for no bundle.

    Collective: no; the block may not contain collective calls. Blocks: while another process
    compiles.
    """
    global _compilation
    place = folder() if job else None
    bundle = place and place / f"bundle-{digest(machine() + job.encode()).hex()}.o"
    before, _compilation = _compilation, _Compilation(tell, keeps=True, bundle=bundle)
    try:
        yield
    finally:
        _compilation.release()
        done, _compilation = _compilation, before
    done.write_bundle()


def machine_code(name: str, compiled: Callable[[], bytes]) -> bytes:
    """Return the machine code of a variant, from disk or compiled now.

    Args:
        name: Name of its file, which contains a digest of all that the code depends on.
        compiled: Compiles the variant, and returns its machine code.
    """
    place = folder()
    if place is None:
        return _compiled(compiled)
    found = _compilation.bundled.get(name)
    if found is None:
        found = _read(place / name)
    if found is None:
        with _compilation.alone(place / "lock"):
            found = _read(place / name)
            if found is None:
                found = _compiled(compiled)
                _write(place / name, found)
    _compilation.note(name, found)
    return found


def _compiled(compiled: Callable[[], bytes]) -> bytes:
    _compilation.tell()
    return compiled()


@functools.cache
def folder() -> Path | None:
    """Return the folder for this type of processor; None if no folder can be written.

    It is in the user's cache folder, or else in the folder for temporary files.
    """
    import llvmlite.binding as llvm

    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = (Path(home, "mpips"), Path(tempfile.gettempdir(), f"mpips-{os.geteuid()}"))
    for place in filter(Path.is_absolute, places):
        folder = place / llvm.get_host_cpu_name()
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(place) and _is_ours(folder) and os.access(folder, os.W_OK):
                return folder
    return None


def _is_ours(folder: Path) -> bool:
    """Return whether only this user can write to a folder."""
    status = folder.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


@functools.cache
def machine() -> bytes:
    """Return a digest of LLVM, Python, processor and compiler, for all machine code."""
    import llvmlite
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    words = [llvmlite.__version__, sys.implementation.cache_tag, llvm.get_host_cpu_name(), features]
    return hashlib.blake2b(" ".join([*words, COMPILER]).encode()).digest()


def _read(path: Path) -> bytes | None:
    """Return the data of a file that `_write` wrote; None if it does not exist or is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[DIGEST_BYTES:] if digest(data[DIGEST_BYTES:]) == data[:DIGEST_BYTES] else None


def _write(path: Path, data: bytes) -> None:
    """Write data to a file with its digest; errors are ignored, as the cache is optional."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent) as file:
        file.write(digest(data) + data)
        file.flush()
        os.replace(file.name, path)  # else the block removes the file


def digest(data: bytes) -> bytes:
    """Return a digest of `DIGEST_BYTES` bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
