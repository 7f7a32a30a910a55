"""Trying hostile files: each is refused in one line or read right; nothing else is opened or run.

Every open of a file in the folder `outside` is seen by inotify, whichever library does it; what
Python runs, unpickles or opens elsewhere is seen by an audit hook.
"""

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

IN_ACCESS, IN_OPEN, IN_NONBLOCK = 0x1, 0x20, 0o4000
SECRET = 77.0  # each number of each file outside
RAN = Path("/tmp/mpips-was-here")  # what a program in a file makes, if it is run
FOREIGN = re.compile(
    r"os\.(system|exec|posix_spawn|fork.*|putenv|symlink|rename|remove)|subprocess.*|socket\..*|"
    r"pickle\.find_class"
)
OWN = tuple(
    str(Path(each).resolve()) + "/"
    for each in (sys.prefix, sys.base_prefix, "/usr", "/proc", "/sys", Path(__file__).parents[2])
)
CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
KERNELS = f"{CACHE}/mpips/"  # where compiled loops are kept
_seen: list[str] | None = None  # of the case that is tried

Change = Callable[[Any, Path], None]  # of an HDF5 file, with the folder outside
Case = tuple[str, Callable[[Path, Path], str], str]  # name, (folder, outside) -> dataset, told


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None or KERNELS in str(args) or "__pycache__" in str(args):
        return
    if FOREIGN.fullmatch(event):
        _seen.append(f"{event} {args}")
    elif event == "open" and isinstance(args[0], str | bytes):
        path, mode = os.path.abspath(os.fsdecode(args[0])), args[1] or "r"
        if not path.startswith(OWN) or not set(mode) <= set("rb") or "outside" in path:
            _seen.append(f"open {path} {mode}")


@functools.cache
def _hooked() -> None:
    sys.addaudithook(_hook)  # it stays as long as the process


class Outside:
    """A folder of files that no hostile file may reach; `opens` tells how often one was opened."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self._libc = folder, ctypes.CDLL(None, use_errno=True)
        with h5py.File(folder / "secret.h5", "w") as file:
            file["x"], file["y"] = np.full((8, 2), SECRET), np.full(8, 77)
        (folder / "secret").write_bytes(b"M" * 256)  # 77 as bytes
        (folder / "secret.txt").write_text("77 1:77\n" * 8)
        self._fd = self._libc.inotify_init1(IN_NONBLOCK)
        assert self._fd >= 0, os.strerror(ctypes.get_errno())
        name = os.fsencode(folder)
        assert self._libc.inotify_add_watch(self._fd, name, IN_OPEN | IN_ACCESS) >= 0

    def opens(self) -> int:
        """Return how many opens and reads there were since the last call."""
        try:
            return len(os.read(self._fd, 1 << 16))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    found = Outside(tmp_path / "outside")
    yield found
    found.close()


def judged(text: str, told: str, seen: list[str], opens: int) -> str:
    """Return what is wrong with what a case has led to; empty if nothing is."""
    if seen or opens:
        return f"{seen} and {opens} bytes of events outside"
    if "\n" in text or len(text) > 600 or (text[:4] != "read" and ", expected " not in text):
        return f"not one clear line: {text}"
    return "" if re.search(told, text) else f"{text!r}, expected {told!r}"


def attack(cases: list[Case], folder: Path, outside: Outside, read: Callable[[str], str]) -> None:
    """Try all cases, and fail with what is wrong with each."""
    global _seen
    _hooked()
    RAN.unlink(missing_ok=True)
    wrong = {}
    for number, (name, write, told) in enumerate(cases):
        here = folder / f"case{number}"
        here.mkdir()
        dataset = write(here, outside.folder)
        outside.opens()
        _seen = []
        try:
            text = read(dataset)
        except Exception as error:
            text = f"{type(error).__name__}\n{error}"
        finally:
            seen, _seen = [line for line in _seen if str(here) not in line], None
        if found := judged(text, told, seen, outside.opens()):
            wrong[name] = found
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
    assert not RAN.exists(), "a program in a file was run"


def put(name: str, make: Callable[[Path], Any]) -> Change:
    def change(file: Any, outside: Path) -> None:
        if name in file:
            del file[name]
        file[name] = make(outside)

    return change


def external_link(name: str, item: str, file: str = "secret.h5") -> Change:
    return put(name, lambda outside: h5py.ExternalLink(str(outside / file), item))


def stored_outside(name: str) -> Change:
    """Return what puts an array of 8 rows of bytes into the file `secret`."""

    def change(file: Any, outside: Path) -> None:
        shape = file[name].shape
        del file[name]
        part = str(outside / "secret"), 0, int(np.prod(shape))
        file.create_dataset(name, shape, "u1", external=[part])

    return change


def virtual(name: str, source: str = "", item: str = "x") -> Any:
    """Return what makes an array virtual; of the file `secret.h5`, unless another is named."""

    def change(file: Any, outside: Path) -> None:
        if name in file:
            del file[name]
        layout = h5py.VirtualLayout((8, 2), "f8")
        layout[:] = h5py.VirtualSource(source or str(outside / "secret.h5"), item, (8, 2), "f8")
        file.create_virtual_dataset(name, layout)

    return change
