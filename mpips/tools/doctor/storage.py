"""Folder of runs: its file system, locks, rate and visibility."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mpips.checkpoint.files import PIECE_BYTES
from mpips.checkpoint.run_folder import claim, is_claimed, release
from mpips.errors import human_bytes, listed
from mpips.session.folder import RUNS
from mpips.tools.doctor.report import HOSTS_SHOWN, Finding, fail, ok, warn, warn_if

WRITE_BYTES = 256 << 20
WRITE_S = 1.5
SLOW_S = 120.0  # time of one checkpoint, above which the doctor warns
SKEW_S = 1.0
SEEN_S = 5.0  # network file systems cache the entries of a folder for some seconds
LOCAL = ("tmpfs", "ramfs")
OCTAL = re.compile(r"\\([0-7]{3})")


def run_folder(out: str) -> Path:
    """Return the folder to try: the folder of runs, or its nearest parent that exists.

    Args:
        out: Value of ``--out``; empty for the default.
    """
    path = Path(out or RUNS).absolute()
    return next((p for p in (path, *path.parents) if p.is_dir()), Path.cwd())


def try_storage(folder: Path, checkpoint_bytes: int) -> list[Finding]:
    """Try writes, locks and HDF5 in a new, empty folder; return the findings.

    Raises:
        OSError: If the file system fails.
    """
    stat = os.statvfs(folder)
    kind = file_system(folder, Path("/proc/mounts").read_text())
    path = folder / "small"
    start = time.perf_counter()
    _write_small(path)
    sync_s = time.perf_counter() - start
    ahead_s = path.stat().st_mtime - time.time() + sync_s  # correct within sync_s
    return [
        judge_space(str(folder.parent), kind, stat.f_bavail * stat.f_frsize, checkpoint_bytes),
        judge_rate(_write_large(folder / "large"), sync_s, checkpoint_bytes),
        judge_lock(try_lock(folder)),
        judge_hdf5(_try_hdf5(folder / "small.h5")),
        judge_stamps(ahead_s),
    ]


def try_folder(out: str, checkpoint_bytes: int) -> tuple[Path | None, list[Finding]]:
    """Try the folder of runs in this process.

    Returns:
        A temporary folder in it, which the caller removes, or None if it could not be created; and
        the findings.
    """
    parent = Path(out or RUNS)
    folder: Path | None = None
    try:
        parent = run_folder(out)
        folder = Path(tempfile.mkdtemp(prefix=".mpips-doctor-", dir=parent))
        return folder, try_storage(folder, checkpoint_bytes)
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        remedy = "give an --out that can be written"
        return None, [fail("folder", f"{parent}: {error.strerror or error}", remedy)]


def _write_small(path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(b"mpips")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _write_large(path: Path) -> float:
    """Write and sync pieces for about a second; returns the time per byte in seconds."""
    piece, written = os.urandom(PIECE_BYTES), 0
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        path.unlink()  # so no large file stays if the process is killed
        while written < WRITE_BYTES and time.perf_counter() - start < WRITE_S:
            written += file.write(piece)
            os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    return seconds / written


def _try_hdf5(path: Path) -> str:
    import h5py

    try:
        with h5py.File(path, "w", locking=False) as file:
            file["x"] = [1, 2, 3]
        with h5py.File(path, "r", locking=False) as file:
            values = file["x"][:].tolist()
    except OSError as error:
        return str(error).splitlines()[0]
    return "" if values == [1, 2, 3] else f"{values} instead of what was written"


def try_lock(folder: Path) -> bool:
    """Lock a folder as a run does; returns whether this excludes a second run."""
    claim(folder)
    try:
        return is_claimed(folder)
    finally:
        release()


def wait_for(folder: Path, limit_s: float = SEEN_S) -> bool:
    """Wait until this host sees a folder that another host has created; returns whether it does."""
    ends = time.monotonic() + limit_s
    while not folder.is_dir():
        if time.monotonic() > ends:
            return False
        os.listdir(folder.parent) if folder.parent.is_dir() else None
        time.sleep(0.1)
    return True


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that has a path.

    Args:
        path: Absolute path.
        mounts: Text of ``/proc/mounts``.
    """
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        _, mount, type_, *_ = line.split()
        point = Path(OCTAL.sub(lambda code: chr(int(code[1], 8)), mount))  # \040 is a space
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), type_
    return kind


# Judgement -----------------------------------------------------------------------------------


def judge_space(folder: str, kind: str, free: int, size: int) -> Finding:
    """Judge the file system of a folder.

    Args:
        folder: The folder.
        kind: Type of the file system.
        free: Free bytes.
        size: Bytes of a checkpoint.
    """
    text = f"{folder} is {kind} with {human_bytes(free)} free"
    if free < size:
        remedy = "free some space, or give another --out"
        return fail("folder", f"{text}, a checkpoint takes {human_bytes(size)}", remedy)
    if free < 3 * size:  # a run keeps two, while it writes another
        remedy = "free some space, give another --out, or --keep 1"
        return warn("folder", f"{text}, three checkpoints take {human_bytes(3 * size)}", remedy)
    remedy = "give an --out on a disk: this one is gone when the host is started again"
    return warn_if(kind in LOCAL, "folder", text, remedy)


def judge_rate(write_s: float, sync_s: float, size: int) -> Finding:
    """Judge the rate of writes.

    Args:
        write_s: Mean time to write and sync one byte, in seconds.
        sync_s: Time to write, sync and rename a small file, in seconds.
        size: Bytes of a checkpoint.
    """
    rate, takes_s = 1 / write_s, size * write_s
    text = f"{human_bytes(rate)}/s written and synced, {sync_s * 1e3:.1f} ms a small file; "
    text += f"a checkpoint of {human_bytes(size)} takes {takes_s:.1f} s"
    figures = {"write_mb_s": rate / 1e6, "sync_ms": sync_s * 1e3}
    remedy = "give an --out on a faster file system, or save less often (--checkpoint-every)"
    return warn_if(takes_s > SLOW_S, "writing", text, remedy, **figures)


def judge_lock(locks: bool) -> Finding:
    """Judge whether a lock excludes a second run."""
    if locks:
        return ok("locks", "a locked file keeps a second job out")
    remedy = "never start two jobs with one --out, or give one where flock works"
    text = "a locked file does not keep others out, or there are no locks"
    return warn("locks", text, f"{remedy} (Lustre: mount with -o flock)")


def judge_hdf5(error: str) -> Finding:
    """Judge whether an HDF5 file was written and read; `error` is empty then."""
    if not error:
        return ok("hdf5", "a file was written and read")
    return fail("hdf5", f"no file could be written and read: {error}", "give another --out")


def judge_stamps(ahead_s: float) -> Finding:
    """Judge by how many seconds the file system's clock is ahead of this host's."""
    text = f"files are dated {abs(ahead_s):.1f} s "
    text += "ahead of this host's clock" if ahead_s > 0 else "behind this host's clock"
    remedy = "have the file server's clock set by NTP"
    return warn_if(abs(ahead_s) > SKEW_S, "file times", text, remedy)


def judge_seen(hosts: Sequence[str], seen: Sequence[bool]) -> Finding:
    """Judge whether each host sees a folder that rank 0 has created."""
    missing = [host for host, sees in zip(hosts, seen, strict=True) if not sees]
    if missing:
        text = f"what rank 0 writes is not seen on {listed(missing, HOSTS_SHOWN)}"
        return fail("sharing", text, "give an --out on a file system that all nodes share")
    if len(hosts) == 1:
        return ok("sharing", "one host writes and reads")
    return ok("sharing", f"all {len(hosts)} hosts see what rank 0 writes")


def judge_remote_lock(host: str, held: bool) -> Finding:
    """Judge whether a lock of rank 0 excludes another host."""
    if held:
        return ok("remote locks", f"a file locked by rank 0 keeps {host} out too")
    remedy = "never start two jobs with one --out (NFS: mount with local_lock=none)"
    return warn("remote locks", f"a file locked by rank 0 does not keep {host} out", remedy)
