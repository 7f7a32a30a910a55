"""Copies of data files on a node's own disk, made while a job reads them from where they are.

One process of a node copies file after file in a thread; all of its processes open a copy in place
of the file once it is whole. A copy lies under the file's whole path, has the file's size and time,
and is taken again by later jobs as long as the file has both.
"""

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Sequence

from mpips.errors import UserError, complain

SPARE = 0.1  # of the disk is left free
PIECE = 8 << 20


class Copies:
    """The copies of a dataset's files in a folder.

    Args:
        folder: On a disk of this node.
        paths: The files.
        makes: Whether this process makes them; on each node one does.

    Raises:
        UserError: If the folder cannot be written.
    """

    def __init__(self, folder: str, paths: Sequence[str], makes: bool) -> None:
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as problem:
            raise _unwritable(folder, problem) from None
        if not os.access(self._folder, os.W_OK):
            raise UserError(f"--data-cache {folder} cannot be written", "a folder of your own")
        if makes:
            self._thread = threading.Thread(target=self._make_all, args=(paths,), daemon=True)
            self._thread.start()

    def best(self, path: str) -> str:
        """Return the copy of a file, or its own path where there is none of it as it is now."""
        copy = self.place_of(path)
        with contextlib.suppress(OSError):
            there, now = os.stat(copy), os.stat(path)
            if (there.st_size, there.st_mtime_ns) == (now.st_size, now.st_mtime_ns):
                return copy
        return path

    def place_of(self, path: str) -> str:
        """Return where the copy of a file is, or will be."""
        return os.path.join(self._folder, os.path.abspath(path).lstrip(os.sep))

    def close(self) -> None:
        """End the copying, after the piece in work; a copy that is not whole goes."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _make_all(self, paths: Sequence[str]) -> None:
        try:
            for path in paths:
                if self._over.is_set() or not self._has_room(path):
                    return
                if self.best(path) == path:
                    self._make(path)
        except OSError as problem:  # no job fails for it: the files are where they were
            why = f"{problem.strerror}: {problem.filename or self._folder}"
            complain(f"--data-cache ends ({why}), files are read directly")

    def _has_room(self, path: str) -> bool:
        disk = shutil.disk_usage(self._folder)
        return disk.free - os.path.getsize(path) > SPARE * disk.total

    def _make(self, path: str) -> None:
        """Copy a file, unless another job is about to; whole or not at all."""
        copy = self.place_of(path)
        part = f"{copy}.part"
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
        with open(path, "rb") as source, open(handle, "r+b", buffering=0) as target:
            if not _is_ours(target.fileno(), part):
                return
            about = os.fstat(source.fileno())
            target.truncate(0)
            done = 0
            while done < about.st_size and not self._over.is_set():
                done += os.sendfile(target.fileno(), source.fileno(), done, PIECE) or about.st_size
            os.utime(target.fileno(), ns=(about.st_atime_ns, about.st_mtime_ns))
            whole = os.fstat(target.fileno()).st_size == about.st_size
            if whole and os.fstat(source.fileno()).st_mtime_ns == about.st_mtime_ns:
                os.replace(part, copy)
            else:
                os.unlink(part)


def _is_ours(part: int, path: str) -> bool:
    """Whether nobody else writes a file, which may be what a killed job has left."""
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Another process may just have made a copy of it, by renaming it.
    return os.path.exists(path) and os.path.samestat(os.fstat(part), os.stat(path))


def _unwritable(folder: str, problem: OSError) -> UserError:
    got = f"--data-cache {folder}: {problem.strerror}"
    return UserError(got, "a folder on a disk of the node", "give another one")
