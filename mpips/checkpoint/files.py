"""Checkpoint folders, file names and durable writes that survive `kill -9`.

A checkpoint is a folder ``step-000000000123`` with shard files and an index. A folder without
an index is not a checkpoint. The index is renamed into place last, and removed first.

Messages:
    checkpoint format 2: Another version of mpips wrote the run. Begin a new run, or go on with that
        version.
"""

import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpips.errors import UserError

if TYPE_CHECKING:
    import h5py

PathLike = str | os.PathLike[str]

FORMAT = 3
INDEX = "index.h5"
PIECE_BYTES = 8 << 20
"""Most bytes of one HDF5 call. h5py has one lock per process, for which other threads wait."""

_TEMPORARY = ".tmp"
_OLD = ".old"
_STEP_FOLDER = re.compile(r"step-(\d{12,})(\.old)?")
NPZ, SAFETENSORS, PT = ".npz", ".safetensors", ".pt"  # files of parameters
READ = (NPZ, SAFETENSORS)
UNPICKLED = (PT, ".pth", ".bin", ".ckpt")
OWN_FILE = re.compile(r"((shard|worker|rows)-\d{4,}|index)\.h5(\.tmp)?")


def file_of(kind: str, owner: int) -> str:
    """Return the file name of an owner's shard, of an owner's rows or of a worker's vectors.

    Args:
        kind: "shard", "rows" or "worker".
        owner: Number of the owner, or of the worker.
    """
    return f"{kind}-{owner:04d}.h5"


def step_folder(directory: PathLike, step: int) -> Path:
    """Return the path of the checkpoint of `step` in `directory`."""
    return Path(directory) / f"step-{step:012d}"


def folder_step(folder: PathLike) -> int | None:
    """Return the step in a folder's name, or None if the name has another form."""
    match = _STEP_FOLDER.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def list_checkpoints(path: PathLike) -> list[Path]:
    """List the checkpoint folders at `path`, complete or not, oldest first.

    Args:
        path: A run directory, its ``checkpoints`` folder, one checkpoint, or its index file.
            A checkpoint in a folder of any other name is recognised by its index.

    Returns:
        The folders; empty if there are none, or if `path` does not exist.
    """
    path = Path(path)
    if path.name == INDEX:
        path = path.parent
    if path.is_dir() and (folder_step(path.resolve()) is not None or (path / INDEX).exists()):
        return [path]
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if not path.is_dir():
        return []
    folders = (p for p in path.iterdir() if folder_step(p) is not None and p.is_dir())
    return sorted(folders, key=_age)


def committed(out: PathLike) -> list[Path]:
    """Return the folders of a run's committed checkpoints, those with an index, oldest first."""
    return [path for path in list_checkpoints(out) if (path / INDEX).exists()]


def _age(folder: Path) -> tuple[int, bool]:
    """Return the sort key of a step folder; ``step-N.old`` is older than ``step-N``."""
    return folder_step(folder) or 0, folder.suffix != _OLD


def begin_step(directory: PathLike, step: int) -> Path:
    """Create the empty folder for the shards of `step`.

    One rank calls it, before any owner calls `write_shard`. It creates `directory` too, but not the
    parent of `directory`: a run folder that was removed must not reappear unnoticed. Files that a
    killed job left of the same step are removed. A committed checkpoint of the same step is renamed
    to ``step-....old``. It still counts as a checkpoint until the new one is committed.

    Returns:
        The folder.

    Raises:
        UserError: If the folder cannot be created or emptied.
    """
    if step < 0:
        raise ValueError(f"step {step}, expected 0 or more")
    folder = step_folder(directory, step)
    with explained("make the checkpoint folder", folder):
        folder.parent.mkdir(exist_ok=True)
        if (folder / INDEX).exists():
            aside = folder.with_name(folder.name + _OLD)
            remove_checkpoint(aside)
            folder.rename(aside)
        remove_checkpoint(folder)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)
    return folder


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint's files, the index first, and its folder if that leaves it empty.

    Other files stay, and so does a folder that has some. A missing folder is no error.
    """
    if not folder.is_dir():
        return
    if (folder / INDEX).exists():
        (folder / INDEX).unlink()
        # Otherwise, after a power failure, the index could be back without the shards.
        sync(folder)
    for file in [p for p in folder.iterdir() if OWN_FILE.fullmatch(p.name)]:
        file.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def prune(
    folder: Path,
    base: Path | None,
    keep: int,
    look: Callable[[Path], tuple[bool, Path | None]],
    protected: Collection[int] = (),
) -> None:
    """Remove old checkpoints, and keep the newest `keep` complete ones up to `folder`.

    The function also removes incomplete checkpoints before `folder`. Checkpoints after `folder`
    stay: they are of a run that was later resumed from an earlier step.

    Args:
        folder: The newest checkpoint, which stays.
        base: The checkpoint that it needs, if it is incremental. It stays, too.
        keep: Number of complete checkpoints that stay, `folder` included.
        look: Returns whether a checkpoint is complete, and its base.
        protected: Steps whose complete checkpoints stay in addition.
    """
    kept, extra = {folder_step(folder)}, set(protected)
    needed = {base}
    older = [p for p in list_checkpoints(folder.parent) if _age(p) < _age(folder)]
    for other in reversed(older):
        step = folder_step(other)
        wanted = step not in kept and (len(kept) < keep or step in extra)
        is_needed = other.resolve() in needed
        is_whole, base = look(other) if wanted or is_needed else (False, None)
        stays = wanted and is_whole
        if not stays and not is_needed:
            remove_checkpoint(other)
            continue
        needed.add(base)
        if stays and len(kept) < keep:
            kept.add(step)
        extra -= {step} if stays else set()
    sync(folder.parent)


def write_durably(final: Path, write: Callable[[Path], None]) -> None:
    """Write a file by ``write(temporary)``, sync it and rename it to `final`.

    So `final` is never incomplete. After an error the temporary file is removed.

    Raises:
        UserError: If the file system refuses (no space, no permission, quota).
    """
    temporary = final.with_name(final.name + _TEMPORARY)
    with explained("write", final):
        try:
            write(temporary)
            sync(temporary)
            temporary.rename(final)
            sync(final.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that names the action and the path."""
    try:
        yield
    except OSError as error:
        # Messages of HDF5 have several lines.
        reason = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
        remedy = "free some space, keep fewer checkpoints, or give another folder"
        expected = "a writable folder with enough free space"
        raise UserError(f"cannot {action} {path}: {reason}", expected, remedy) from error


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path, begin: int = 0) -> str:
    """Return the SHA-256 of a file from byte `begin` on, in hexadecimal; releases the GIL."""
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def reading(path: Path, what: str) -> Iterator["h5py.File"]:
    """Open a finished HDF5 file for reading, without a lock, since the file no longer changes.

    Get its items by `item`, which never opens another file.

    Args:
        path: The file.
        what: Content to read, for the error message.

    Raises:
        UserError: At any error in the block. A file with flipped bits raises no single type: h5py
            may raise a TypeError or an OSError, or return a group in place of a dataset.
    """
    import h5py

    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise damaged(f"{path}: cannot read {what}: {reason}", "a whole file") from None


def item(group: Any, name: str) -> Any:
    """Return an item of an open HDF5 file.

    Raises:
        KeyError: If there is no such item.
        ValueError: If the item or its data is in another file. That file is not opened.
    """
    from mpips.datasets.hdf5 import inside

    value = inside(group, name)
    if value is None:
        raise KeyError(f"no {name}")
    return value


class OtherFormatError(UserError):
    """Error for a checkpoint that another version of mpips has written."""

    def __init__(self, path: Path, found: str) -> None:
        remedy = "begin a new run, or go on with the version of mpips that wrote it"
        super().__init__(f"{path}: checkpoint format {found}", str(FORMAT), remedy)


def damaged(got: str, expected: str) -> UserError:
    """Return the error for a checkpoint that has changed since it was written."""
    return UserError(got, expected, "use another checkpoint")


class _Writing(io.FileIO):
    """A file that stores its first error in `error` instead of raising it.

    If a write raised, HDF5 could not close the file, and the process would crash later.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, or nothing after an error."""
        rest = memoryview(data)
        with self._store_error():
            while rest and self.error is None:
                rest = rest[super().write(rest) :]
        return len(data)

    def readinto(self, out: Any) -> int:
        """Fill `out` from the file, with zeros after its end."""
        whole = memoryview(out)
        with self._store_error():
            count = super().readinto(whole) or 0
            whole[count:] = bytes(len(whole) - count)
        return len(whole)

    def truncate(self, size: int | None = None) -> int:
        """Set the length of the file."""
        with self._store_error():
            return super().truncate(size)
        return size or 0

    @contextmanager
    def _store_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


@contextmanager
def create_h5(path: Path, user_block_bytes: int = 0) -> Iterator["h5py.File"]:
    """Create an HDF5 file that any HDF5 library from 1.10 on can read.

    Raises:
        OSError: If the file system refuses.
    """
    import h5py

    block, versions = user_block_bytes or None, ("earliest", "v110")
    with _Writing(path, "w+") as raw:
        try:
            with h5py.File(raw, "w", libver=versions, userblock_size=block) as file:
                yield file
        finally:
            if raw.error is not None:
                raise raw.error


def pieces(begin: int, end: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide the rows ``[begin, end)`` into ranges of at most `PIECE_BYTES`, or of one row."""
    length = max(1, PIECE_BYTES // row_bytes)
    for start in range(begin, end, length):
        yield start, min(end, start + length)


def row_bytes(array: Any) -> int:
    """Return the size of a row of an array or dataset in bytes, at least 1."""
    return max(1, array.dtype.itemsize * math.prod(array.shape[1:]))


def is_parameter_file(path: Path) -> bool:
    """Return whether `path` is a parameter file, by its suffix; if not, it is a checkpoint.

    Raises:
        UserError: If the file is missing, or could be read only by unpickling.
    """
    if path.is_dir() or path.suffix not in READ + UNPICKLED:
        return False
    if path.suffix in UNPICKLED:
        remedy = "save it by safetensors.torch.save_file: unpickling could run what is in a file"
        raise UserError(f"parameters in {path}", f"a file that ends in {' or '.join(READ)}", remedy)
    if not path.is_file():
        raise UserError(f"no file {path}", "a file of parameters, or a run's folder")
    return True
