"""Copies of data files on a node's own disk."""

import fcntl
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from test_datasets import config, everything, write_h5, write_npz

from mpips.datasets import count_file, describe, find_many, make_dataset, open_parts
from mpips.datasets.index import Counted
from mpips.datasets.local import Copies
from mpips.errors import UserError

Usage = namedtuple("Usage", "total used free")


def write(folder: Path, n: int = 3) -> list[str]:
    for k in range(n):
        (folder / f"{k}.bin").write_bytes(bytes([k]) * (1000 + k))
    return [str(folder / f"{k}.bin") for k in range(n)]


def made(folder: Path, paths: list[str]) -> list[str]:
    """Make copies to the end; returns where the files are read then."""
    copies = Copies(str(folder), paths, makes=True)
    assert copies._thread is not None
    copies._thread.join(30)
    found = [copies.best(path) for path in paths]
    copies.close()
    copies.close()
    return found


def test_copies_are_the_files(tmp_path: Path) -> None:
    paths, folder = write(tmp_path), tmp_path / "cache"
    found = made(folder, paths)
    assert found == [f"{folder}{path}" for path in paths]
    for copy, path in zip(found, paths, strict=True):
        assert Path(copy).read_bytes() == Path(path).read_bytes()
        assert os.stat(copy).st_mtime_ns == os.stat(path).st_mtime_ns
    assert len(list(folder.rglob("*.bin*"))) == 3
    before = [os.stat(copy).st_ino for copy in found]
    assert [os.stat(copy).st_ino for copy in made(folder, paths)] == before, "they are taken again"
    idle = Copies(str(folder), paths, makes=False)
    assert [idle.best(path) for path in paths] == found


def test_a_copy_of_what_was_is_made_anew(tmp_path: Path) -> None:
    paths, folder = write(tmp_path), tmp_path / "cache"
    made(folder, paths)
    Path(paths[1]).write_bytes(b"new" * 500)
    idle = Copies(str(folder), paths, makes=False)
    assert idle.best(paths[1]) == paths[1]
    assert Path(made(folder, paths)[1]).read_bytes() == b"new" * 500


def test_what_a_killed_job_has_left_is_written_over(tmp_path: Path) -> None:
    paths, folder = write(tmp_path), tmp_path / "cache"
    part = Path(f"{folder}{paths[0]}.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half" * 1000)
    assert Path(made(folder, paths)[0]).read_bytes() == Path(paths[0]).read_bytes()
    assert not part.exists()


def test_what_another_job_copies_is_left_to_it(tmp_path: Path) -> None:
    paths, folder = write(tmp_path), tmp_path / "cache"
    part = Path(f"{folder}{paths[0]}.part")
    part.parent.mkdir(parents=True)
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = made(folder, paths)
        assert part.exists()
    assert found[0] == paths[0]
    assert found[1] != paths[1]


def test_a_tenth_of_the_disk_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 7_000, 2_001))
    found = made(tmp_path / "cache", paths)
    assert [f != p for f, p in zip(found, paths, strict=True)] == [True, False, False]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--data-cache .*file: .*, expected a folder on a disk"):
        Copies(str(tmp_path / "file"), [], makes=False)


def test_a_file_that_is_gone_ends_the_copying_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write(tmp_path)
    Path(paths[1]).unlink()
    copies = made(tmp_path / "cache", paths)
    assert [Path(c).exists() for c in copies] == [True, False, True]
    assert copies[2] == paths[2]
    assert "mpips: --data-cache ends (No such file or directory: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["part-*.h5", "part-1.h5"])
def test_tables_go_over_to_the_copies(tmp_path: Path, name: str) -> None:
    """While they are open; a file alone is copied, too."""
    x = np.random.default_rng(0).normal(size=(30, 2))
    for k in range(3):
        write_h5(tmp_path / f"part-{k}.h5", x[10 * k : 10 * k + 10], np.zeros(10))
    wanted = config(tmp_path / name, data_cache=str(tmp_path / "cache"), test_fraction=0)
    files = find_many(wanted)["dataset"]
    counted = {"dataset": Counted(files, [count_file(files, path) for path in files.paths])}
    parts = open_parts(wanted, counted, True)
    with make_dataset(wanted, parts, describe(wanted, parts)) as data:
        before = everything(data.train, "float64")[0]
        last = tmp_path / "cache" / files.paths[-1].lstrip("/")
        deadline = time.monotonic() + 30
        while not last.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        after = everything(data.train, "float64")[0]
        held = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
        assert str(last) in held
        assert files.paths[-1] not in held
    np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(after, x if "*" in name else x[10:20])


def test_data_in_memory_has_no_use_for_it(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", np.ones((8, 2)), np.zeros(8))
    with pytest.raises(UserError, match=r"data_cache .* in memory, expected files that are re"):
        open_parts(config(path, data_cache=str(tmp_path)))


@pytest.mark.parametrize("option", ["dataset", "test_dataset"])
@pytest.mark.parametrize("names", ["0.h5::external", "*.h5::x,y,external"])
def test_files_that_read_from_others_are_refused(tmp_path: Path, names: str, option: str) -> None:
    """Relative names of other files would be looked for beside the copy."""
    for k in range(2):
        write_h5(tmp_path / f"{k}.h5", np.ones((8, 2)), np.zeros(8))
    found = {"dataset": f"{tmp_path}/*.h5", option: f"{tmp_path}/{names}"}
    with pytest.raises(UserError, match=r"--data-cache with .*external.*, expected all data in"):
        find_many(config(**found, data_cache=str(tmp_path / "cache")))
    find_many(config(**found))
