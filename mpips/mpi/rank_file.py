"""A file of one rank's own in the folder of a run: a line of JSON, and then pieces of bytes.

Loads no MPI.
"""

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpips.errors import complain


class RankFile:
    """Writes such a file, until it is closed.

    Args:
        path: The file, which is made anew.
        about: What the line says.
        what: What the file is called.
        most: Bytes of pieces at which it ends; None for no end.

    A file that cannot be written is told of once, and ends no run.

    Attributes:
        open: Whether pieces are written.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], what: str, most: int | None = None
    ) -> None:
        self._path, self._what, self._most, self._size = path, what, most, 0
        self.open = False
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (held until close)
            self._write(json.dumps(about).encode() + b"\n")
        except OSError as problem:
            complain(f"warning: no {what} {path}: {problem.strerror}")
            return
        self.open = True

    def append(self, data: bytes, end: bytes = b"") -> None:
        """Write a piece, if the file is open. Blocks: until the system has it.

        Args:
            data: The piece.
            end: A shorter one that replaces it if it cannot be written: of a full disk, what is
                left of the file's last block often has room for it.
        """
        if not self.open:
            return
        self._size += len(data)
        at = self._file.tell()
        try:
            self._write(data)
            if self._most is not None and self._size >= self._most:
                raise OSError(0, "it is full")
        except OSError as problem:
            if end:
                self._end_with(end, at)
            self.close()
            complain(f"warning: the {self._what} {self._path} ends here: {problem.strerror}")

    def _end_with(self, end: bytes, at: int) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), at + os.pwrite(self._file.fileno(), end, at))

    def _write(self, data: bytes) -> None:
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Write no more. May be called twice."""
        if self.open:
            self.open = False
            self._file.close()
