"""Checkpoints: every snapshot, every damage, and `kill -9` at any moment."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from checkpoints import committed, vector, written
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.checkpoint import (
    Checkpoint,
    begin_step,
    boxes,
    list_checkpoints,
    need_whole,
    newest_whole,
    open_checkpoint,
    reader,
    verify,
    write_shard,
    write_worker,
)
from mpips.checkpoint.__main__ import main
from mpips.checkpoint.files import (
    folder_step,
    remove_checkpoint,
    step_folder,
    write_durably,
)
from mpips.checkpoint.shards import CHUNK_BYTES
from mpips.errors import UserError
from mpips.layout import Layout, Shard, check_names, cut

LAYOUT = Layout.of({"w1": (7, 5, 3), "b1": (5,), "deep/w2": (11, 4), "t": (), "none": (0, 3)})
STATE = {"clocks": [3, 2**60], "ledger": {"0": [1, 2]}, "text": "ü", "x": 0.1, "long": "y" * 99999}
ARRAYS = {"applied": np.arange(4), "mean": np.array([0.5, np.nan])}
MORE = {"config": "seed = 1\n", "state": STATE, "arrays": ARRAYS, "keep": 3}


def save(
    directory: Path, step: int = 3, parts: int = 3, layout: Layout = LAYOUT, dtype: str = "float32",
    slots: tuple[str, ...] = ("m", "v"), shards: list[Shard] | None = None, **changes: Any,
) -> Path:  # fmt: skip
    """Write a checkpoint whose content follows from its step, and return its folder."""
    whole = [vector(layout.size, 10 * step + k, dtype) for k in range(1 + len(slots))]
    directory.mkdir(parents=True, exist_ok=True)
    folder, records = begin_step(directory, step), []
    for owner, s in enumerate(shards or cut(layout.size, parts, np.dtype(dtype).itemsize)):
        held = {name: whole[1 + k][s.range] for k, name in enumerate(slots)}
        records.append(write_shard(folder, owner, s, step, whole[0][s.range], held))
    about = MORE | {"dtype": np.dtype(dtype), "slot_names": slots} | changes
    return committed(folder, step, layout, records[::-1], **about)


def check(checkpoint: Checkpoint) -> None:
    """Fail unless the content is what `save` wrote for that step."""
    size, dtype = checkpoint.layout.size, str(checkpoint.dtype)
    found = [checkpoint.read_params(), *map(checkpoint.read_slot, ("m", "v"))]
    for k, array in enumerate(found):
        assert array.tobytes() == vector(size, 10 * checkpoint.step + k, dtype).tobytes()


# --- what is saved is what is read --------------------------------------------------------------


@st.composite
def cut_layouts(draw: st.DrawFn) -> tuple[Layout, list[Shard]]:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=4))
    layout = Layout.of({f"a{k}": shape for k, shape in enumerate(shapes)})
    edges = draw(st.lists(st.integers(0, layout.size), max_size=5))
    edges = [0, *sorted(edges), layout.size]
    return layout, [Shard(b, e) for b, e in itertools.pairwise(edges)]


@given(cut_layouts(), st.sampled_from(["float32", "float64"]), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_any_cut_of_any_shapes(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[Layout, list[Shard]],
    dtype: str,
    parts: int,
) -> None:
    """It is read in any number of other cuts, and as whole arrays."""
    layout, shards = case
    folder = save(tmp_path_factory.mktemp("c"), layout=layout, dtype=dtype, shards=shards)
    assert verify(folder) == []
    check(saved := open_checkpoint(folder))
    out = np.zeros(layout.size + 2, dtype)
    for s in cut(layout.size, parts, 4):
        saved.read_slot("v", s.begin, s.end, out=out[1:-1][s.range])
    assert out.tobytes() == np.pad(vector(layout.size, 32, dtype), 1).tobytes()
    with h5py.File(folder / "index.h5") as file:
        for k, source in enumerate(["params", "slots/m", "slots/v"]):
            for name, view in layout.views(vector(layout.size, 30 + k, dtype)).items():
                mapped = file[source][name]
                assert mapped.shape == view.shape
                assert mapped.dtype == view.dtype
                assert mapped[()].tobytes() == view.tobytes()
                found = [*boxes(view.shape, 1, view.size - 1)]
                assert len(found) <= max(1, 2 * view.ndim - 1), "as few as go"
                if view.ndim > 1 and view.size:
                    assert mapped[-1, ..., -1].tobytes() == view[-1, ..., -1].tobytes()


def test_everything_else_comes_back(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path))
    assert (checkpoint.step, checkpoint.layout, checkpoint.state) == (3, LAYOUT, STATE)
    assert (checkpoint.config, checkpoint.slot_names) == ("seed = 1\n", ("m", "v"))
    assert checkpoint.arrays["applied"].tolist() == [0, 1, 2, 3]
    assert checkpoint.arrays["applied"].dtype == np.int64
    assert np.array_equal(checkpoint.arrays["mean"], [0.5, np.nan], equal_nan=True)


def test_the_folder_can_be_moved_and_renamed(tmp_path: Path, monkeypatch: Any) -> None:
    folder = save(tmp_path / "run")
    moved = tmp_path / "elsewhere" / "best"
    moved.parent.mkdir()
    folder.rename(moved)
    monkeypatch.chdir(moved)
    assert verify(".") == verify(moved) == verify(moved / "index.h5") == []
    check(open_checkpoint(moved))
    with h5py.File("index.h5") as file:
        assert np.array_equal(file["params/b1"][:], vector(LAYOUT.size, 30)[105:110])
    (moved / "shard-0001.h5").unlink()
    with h5py.File("index.h5") as file:
        assert np.isnan(file["params/w1"][:]).any()


# --- what is one worker's alone ----------------------------------------------------------------

NAMES, PIECES = ("own", "residual/w"), ((3, 20), (33, 60))


def of_worker(worker: int, name: str) -> np.ndarray:
    """The first as a whole, the second in two pieces and with zeroes between and behind."""
    found = np.random.default_rng([worker, NAMES.index(name)]).standard_normal(LAYOUT.size, "f4")
    if name == NAMES[1]:
        held = np.zeros(LAYOUT.size, bool)
        for begin, end in PIECES:
            held[begin:end] = True
        found[~held] = 0
    return found


def save_workers(directory: Path, workers: tuple[int, ...] = (2, 0, 1)) -> Path:
    """Write a checkpoint of 2 owners, and what some workers have."""
    folder, records = begin_step(directory, 5), []
    for k in workers:
        first, second = (of_worker(k, name) for name in NAMES)
        pieces = {NAMES[0]: [(0, first)], NAMES[1]: [(b, second[b:e]) for b, e in PIECES]}
        records.append(write_worker(folder, k, 5, pieces, LAYOUT.size, "f4"))
    return committed(folder, 5, LAYOUT, workers=records, worker_names=NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_worker_reads_its_own_and_others_the_mean(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_workers(tmp_path))
    out, part = np.empty(LAYOUT.size, "f4"), np.empty(25, "f4")
    assert checkpoint.worker_names == NAMES
    for worker in range(3):
        checkpoint.read_worker(name, worker, out)
        np.testing.assert_array_equal(out, of_worker(worker, name))
        checkpoint.read_worker(name, worker, part, 30)
        np.testing.assert_array_equal(part, out[30:55])
    checkpoint.read_workers_share(name, 0, out)
    mean = np.mean([of_worker(k, name).astype("f8") for k in range(3)], axis=0)
    np.testing.assert_allclose(out, mean, rtol=1e-6)
    checkpoint.read_workers_share(name, 30, part)
    np.testing.assert_array_equal(part, out[30:55])


def test_files_of_workers_are_told_apart_and_go_with_the_others(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"files of workers \[0, 2\], expected one of each"):
        save_workers(tmp_path, (0, 2))
    assert newest_whole(tmp_path)[0] is None
    folder = save_workers(tmp_path)
    a, b = folder / "worker-0000.h5", folder / "worker-0002.h5"
    checkpoint = open_checkpoint(folder)
    assert a.stat().st_size == b.stat().st_size
    a.write_bytes(b.read_bytes())
    with pytest.raises(UserError, match="attribute owner 2, expected 0"):
        checkpoint.read_worker("own", 0, np.empty(LAYOUT.size, "f4"))
    (folder / "worker-0001.h5.tmp").write_text("half")
    remove_checkpoint(folder)
    assert not folder.exists()


@pytest.mark.parametrize("pieces", [0, 1])
def test_what_is_in_no_piece_takes_no_room(pieces: int, tmp_path: Path) -> None:
    n, held = 10_000_000, np.ones(100_000, "f4")
    vectors = {"residual": [(5_000_000, held)][:pieces]}
    record = write_worker(tmp_path, 0, 1, vectors, n, "f4")
    assert record.bytes < pieces * (held.nbytes + 2 * CHUNK_BYTES) + 20_000
    with h5py.File(tmp_path / record.file, locking=False) as file:
        assert file["residual"].shape == (n,)
        assert file["residual"][:].sum() == pieces * held.size


# --- wrong calls --------------------------------------------------------------------------------


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path))
    for begin, end in ((-1, 3), (4, 3), (0, LAYOUT.size + 1)):
        with pytest.raises(ValueError, match="expected within"):
            checkpoint.read_params(begin, end)
    with pytest.raises(UserError, match="did you mean 'm'"):
        checkpoint.read_slot("mm")
    with pytest.raises(ValueError, match="committed"):
        write_shard(checkpoint.path, 0, Shard(0, 4), 3, np.zeros(4, "f4"), {})


@pytest.mark.parametrize("names", [["a", "a"], ["a/b", "a"], ["a", "a/b/c"], [""], ["a//b"], ["."]])
def test_names_that_hdf5_cannot_hold(names: list[str]) -> None:
    with pytest.raises(UserError, match="array name"):
        check_names(names)
    check_names(["a", "ab", "b/a", "b/c", "%b", "x y", "ü"])


def test_commit_needs_the_files_and_keep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep 0"):
        save(tmp_path, keep=0)
    folder, layout = begin_step(tmp_path, 5), Layout.of({"w": (4,)})
    records = written(folder, 5, np.zeros(4, np.float32))
    (folder / records[0].file).unlink()
    with pytest.raises(UserError, match=r"shard-0000\.h5: missing"):
        committed(folder, 5, layout, records)
    assert not (folder / "index.h5").exists()


# --- damage -------------------------------------------------------------------------------------


def flip(path: Path, at: int, bits: int = 0x10) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "told", "read"),
    [
        (lambda shard: flip(shard, -1), r"{0}: sha256 .*\[64, 112\)", ""),
        # The type of an attribute is one of time then, for which h5py raises a TypeError.
        (
            lambda shard: flip(shard, shard.read_bytes().index(b"step\0") + 8, 2),
            "{0}: sha256 .*its HDF5 header is damaged",
            "cannot read params: TypeError",
        ),
        (
            lambda shard: os.truncate(shard, shard.stat().st_size - 1),
            r"{0}: {2} bytes .*expected {1} bytes",
            "cannot read params",
        ),
        (Path.unlink, "{0}: missing", "cannot read params"),
        (
            lambda shard: shard.rename(shard.with_name("x")),
            "{0}: missing.*rename that to shard-0001.h5",
            "cannot read params",
        ),
        (
            lambda shard: shutil.copy(shard.with_name("shard-0000.h5"), shard),
            "{0}: ",
            "attribute begin 0, expected 64",
        ),
        (
            lambda shard: shutil.copy(save(shard.parents[1], 1) / shard.name, shard),
            "{0}: .*owner 1, step 1",
            "attribute step 1, expected 3",
        ),
    ],
)
def test_what_is_wrong_with_a_shard_is_said(
    harm: Callable[[Path], object], told: str, read: str, tmp_path: Path
) -> None:
    """Which damage is found: tests/checkpoint/test_damage.py."""
    folder = save(tmp_path)
    opened, shard = open_checkpoint(folder), folder / "shard-0001.h5"
    size = shard.stat().st_size
    harm(shard)
    (problem,) = verify(folder)
    assert re.search(told.format(shard, size, size - 1), problem)
    if read:
        with pytest.raises(UserError, match=read):
            opened.read_params(65, 68)
    if "missing" in told or "bytes" in told:
        with pytest.raises(UserError, match=r"missing|bytes"):
            open_checkpoint(folder)


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths of the shards that are read to compute their checksums, as they are read."""
    digest, read = hashlib.file_digest, list[str]()

    def noted(file: Any, name: Any) -> Any:
        read.extend([str(file.name)] if "shard-" in str(file.name) else [])
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return read


def test_a_missing_shard_is_not_looked_for_in_the_others(
    tmp_path: Path, digested: list[str]
) -> None:
    """They may be many and large, and each would be read for each that is missing."""
    folder = save(tmp_path, parts=5)
    for number in (1, 3):
        (folder / f"shard-{number:04d}.h5").unlink()
    digested.clear()
    assert len(verify(folder)) == 2
    assert len(set(digested)) == len(digested)


def test_a_folder_under_the_name_of_another_step(tmp_path: Path) -> None:
    save(tmp_path, 7).rename(tmp_path / "step-000000000009")
    (problem,) = verify(tmp_path)
    assert "folder of step 9, expected step 7" in problem


def test_the_one_before_a_damaged_one_is_used(tmp_path: Path) -> None:
    folders = [save(tmp_path, step, parts=1, keep=9) for step in (1, 2, 3, 4)]
    begin_step(tmp_path, 5)
    (folders[3] / "index.h5").unlink()
    flip(folders[2] / "shard-0000.h5", 3000)
    checkpoint, complaints = need_whole(tmp_path)
    assert checkpoint.step == 2
    check(checkpoint)
    assert len(complaints) == 3
    assert "000005" in complaints[0]
    assert "000004: no index.h5" in complaints[1]
    assert "000003/shard-0000.h5: sha256" in complaints[2]
    for folder in folders[:2]:
        remove_checkpoint(folder)
    nothing, complaints = newest_whole(tmp_path)
    assert nothing is None
    assert len(complaints) == 3
    assert newest_whole(tmp_path / "absent") == (None, [])


def test_the_one_that_replaces_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job that keeps one removes it while it is checked."""
    first = save(tmp_path, 1, keep=1)
    begin_step(tmp_path, 2)

    def listed(path: Path) -> list[Path]:
        if path == first:
            save(tmp_path, 2, keep=1)
            first.mkdir(exist_ok=True)  # its index is gone, and its folder not yet
        return list_checkpoints(path)

    monkeypatch.setattr(reader, "list_checkpoints", listed)
    assert need_whole(tmp_path)[0].step == 2


# --- keeping, rewriting, failing ----------------------------------------------------------------


def kept(directory: Path) -> list[int | None]:
    return [folder_step(folder) for folder in list_checkpoints(directory)]


def test_the_last_whole_ones_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    for step in (0, 5, 10):
        save(directory, step, parts=1, keep=2)
    assert kept(tmp_path) == [5, 10]
    # A half-written and a truncated one do not count, and go; a newer one stays.
    begin_step(directory, 7)
    begin_step(directory, 99)
    os.truncate(step_folder(directory, 10) / "shard-0000.h5", 100)
    (directory / "notes").mkdir()
    save(directory, 12, parts=1, keep=2)
    assert kept(tmp_path) == [5, 12, 99]
    (step_folder(directory, 5) / "notes.txt").write_text("mine")
    save(directory, 13, parts=1, keep=1)
    assert kept(directory) == [5, 13, 99]
    assert [p.name for p in step_folder(directory, 5).iterdir()] == ["notes.txt"]
    assert (directory / "notes").exists()


def test_protected_ones_stay_beside_the_last(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    for step, protected in ((1, ()), (2, (1,)), (3, (1,)), (4, (1, 3)), (5, (1,))):
        save(directory, step, parts=1, keep=2, protected=protected)
    assert kept(tmp_path) == [1, 4, 5]
    save(directory, 6, parts=1, keep=1, protected=(5, 6))
    assert kept(tmp_path) == [5, 6]


def test_the_same_step_again_never_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 4, keep=1, config="one")
    folder = begin_step(tmp_path, 4)
    for _ in range(2):
        checkpoint, complaints = need_whole(tmp_path)
        assert checkpoint.config == "one"
        assert len(complaints) == 1
        check(checkpoint)
        write_shard(folder, 0, Shard(0, 4), 4, np.zeros(4, np.float32), {})
        folder = begin_step(tmp_path, 4)
        assert not list(folder.iterdir())
    save(tmp_path, 4, keep=1, config="two")
    assert list_checkpoints(tmp_path) == [folder]
    assert open_checkpoint(folder).config == "two"


def test_an_error_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    final = tmp_path / "f"
    final.write_text("old")

    def fail(path: Path) -> None:
        path.write_text("new")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write .*/f: .*No space left"):
        write_durably(final, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert final.read_text() == "old"
    with pytest.raises(UserError, match="cannot make the checkpoint folder"):
        begin_step(final, 1)
    with pytest.raises(UserError, match="No such file or directory"):
        begin_step(tmp_path / "removed" / "checkpoints", 1)
    assert not (tmp_path / "removed").exists()


def test_a_file_system_that_refuses(tmp_path: Path) -> None:
    """What was begun is removed, and no file that is still open takes its room."""
    save(tmp_path, 1)
    limit, limits = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(limit, (100_000, limits[1]))
        with pytest.raises(UserError, match=r"cannot write .*shard-0000\.h5"):
            save(tmp_path, 2, layout=Layout.of({"w": (500_000,)}))
    finally:
        resource.setrlimit(limit, limits)
    assert not list(step_folder(tmp_path, 2).iterdir())
    opened = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    held = [path.stat().st_size for path in opened if str(tmp_path) in os.readlink(path)]
    assert sum(held) == 0
    assert need_whole(tmp_path)[0].step == 1


def test_every_system_call_may_be_the_last(tmp_path: Path, monkeypatch: Any) -> None:
    """Stop before the n-th call that changes a folder, for each n, instead of at random."""

    class KilledError(Exception):
        pass

    def wrap(call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                raise KilledError
            return call(*args, **kwargs)

        return counted

    changing = [(os, "fsync"), (Path, "rename"), (Path, "unlink"), (Path, "rmdir"), (Path, "mkdir")]
    for step in (1, 2, 3):
        save(tmp_path / "before", step, keep=3)
    (tmp_path / "before" / "step-000000000002" / "index.h5").unlink()
    run, finished = tmp_path / "run", False
    for n in range(1, 200):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "before", run)
        left = n
        with monkeypatch.context() as patch, contextlib.suppress(KilledError):
            for owner, name in changing:
                patch.setattr(owner, name, wrap(getattr(owner, name)))
            save(run, 3, keep=1)
            finished = True
        checkpoint, _ = need_whole(run)
        assert checkpoint.step == 3
        check(checkpoint)
        if finished:
            break
    assert finished
    assert n > 20


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(tmp_path / "run" / "checkpoints", step)
    flip(tmp_path / "run" / "checkpoints" / "step-000000000030" / "shard-0002.h5", 2500)
    return tmp_path / "run"


def test_list_inspect_and_verify(run_directory: Path, capsys: Any) -> None:
    for path in (run_directory, run_directory / "checkpoints"):
        assert main(["list", str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines] == [["step", str(k)] for k in (10, 20, 30)]
        assert lines[0].endswith(" whole")
        assert lines[1].endswith(" whole, newest")
        assert "shard-0002.h5: sha256" in lines[2]
    assert main(["inspect", str(run_directory), "--step", "10"]) == 0
    out = capsys.readouterr().out
    for told in ("w1 (7, 5, 3)", "slots: m, v", "shard-0002.h5", "clocks: [3,", "applied"):
        assert told in out
    assert max(map(len, out.splitlines())) < 200
    assert main(["verify", str(run_directory)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "step-000000000030/shard-0002.h5" in line
    assert main(["verify", str(run_directory), "--step", "20"]) == 0
    assert main(["verify", str(run_directory / "checkpoints" / "step-000000000010")]) == 0


def test_output_need_not_be_read_to_its_end(run_directory: Path) -> None:
    command = f"{sys.executable} -m mpips.checkpoint inspect {run_directory} --step 20 | true"
    assert subprocess.run(command, shell=True, capture_output=True, check=True).stderr == b""


def test_a_checkpoint_may_go_as_it_is_listed(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A running job removes old ones."""

    def verified(folder: Path) -> list[str]:
        problems = verify(folder)
        if folder_step(folder) == 10:
            shutil.rmtree(folder)
        return problems

    monkeypatch.setattr("mpips.checkpoint.__main__.verify", verified)
    assert main(["list", str(run_directory)]) == 0
    assert re.search("step 10 +0 B  whole", capsys.readouterr().out)


SUMMARY = {
    "global_step": 50, "samples": 1600, "pushes_sent": 50, "pushes_applied": 50,
    "stop_reason": "steps", "resumed_from": None,
}  # fmt: skip


def finished(out: Path, clocks: tuple[int, ...] = (25, 25)) -> Path:
    """Leave what a run of 25 steps of each of its workers leaves."""
    allocator = {"clocks": list(clocks), "pending": [[0, 0, 8]], "cursor": [0, 0]}
    state = {"allocator": allocator, "n_train": 100, "samples": 1600}
    for step in (40, 50):
        save(out / "checkpoints", step, config="steps = 25\n", state=state)
    (out / "summary.json").write_text(json.dumps(SUMMARY))
    (out / "DONE").write_text("steps\n")
    return out


def test_verify_of_a_run_reads_each_byte_once(
    tmp_path: Path, digested: list[str], capsys: Any
) -> None:
    out = finished(tmp_path / "run")
    digested.clear()
    assert main(["verify", "--run", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 checkpoints, whole; the run is complete\n"
    assert sorted(digested) == sorted(map(str, out.rglob("shard-*.h5")))
    assert main(["verify", "--run", str(out), "--step", "50"]) == 2
    assert "--step with --run, expected one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("summary", "clocks", "told"),
    [
        ([], (25, 25), "summary.json: list, expected an object"),
        ({"samples": 3}, (25, 25), "summary.json: no sound global_step, pushes_sent, pushes_app"),
        (SUMMARY | {"resumed_from": 7}, (25, 25), "summary.json: no sound resumed_from: it was"),
        (SUMMARY | {"samples": "x"}, (25, 25), "summary.json: no sound samples: it was edited, or"),
        (SUMMARY | {"samples": 3}, (25, 25), "samples 3, expected 1600"),
        (SUMMARY | {"global_step": 49}, (25, 25), "global_step 49, expected 50"),
        (SUMMARY | {"stop_reason": "epochs"}, (25, 25), "epoch and position [0, 0], expected [40"),
        (SUMMARY | {"stop_reason": "epochs"}, (25, 25), "batches that were not applied [[0, 0, 8]"),
        (SUMMARY | {"pushes_sent": 51}, (25, 25), "pushes sent 51, expected 50: gradients that"),
        (SUMMARY, (26, 24), "steps of the workers [24, 26], expected [25]: not every worker has"),
        (None, (25, 25), "no DONE: the run has not finished, or this is not"),
    ],
)
def test_verify_of_a_run_says_what_a_difference_means(
    summary: Any, clocks: tuple[int, int], told: str, tmp_path: Path, capsys: Any
) -> None:
    out = finished(tmp_path / "run", clocks)
    (out / "summary.json").write_text(json.dumps(summary))
    if summary is None:
        (out / "DONE").unlink()
    assert main(["verify", "--run", str(out)]) == 1
    assert f"{out}: {told}" in capsys.readouterr().out


def test_verify_of_a_run_that_was_shortened(tmp_path: Path, capsys: Any) -> None:
    """Resumed with no more epochs than it has made, it saves nothing: its file has their number."""
    allocator = {"clocks": [25, 25], "pending": [[2, 0, 8]], "cursor": [2, 12]}
    state = {"allocator": allocator, "n_train": 100, "samples": 204}
    out, ended = tmp_path / "run", {"samples": 204, "stop_reason": "epochs"}
    save(out / "checkpoints", 50, config="epochs = 9\n", state=state)
    (out / "config.toml").write_text("epochs = 2\n")
    (out / "summary.json").write_text(json.dumps(SUMMARY | ended))
    (out / "DONE").touch()
    assert main(["verify", "--run", str(out)]) == 0, capsys.readouterr().out


def test_export(run_directory: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "out.npz"
    assert main(["export", str(run_directory), "-o", str(output)]) == 0
    assert "not whole: " in capsys.readouterr().err
    with np.load(output) as arrays:
        assert len(arrays.files) == 15
        for k, source in enumerate(["params", "slots/m", "slots/v"]):
            for name, view in LAYOUT.views(vector(LAYOUT.size, 200 + k)).items():
                found = arrays[f"{source}/{name}"]
                assert found.dtype == np.float32
                assert found.shape == view.shape
                assert found.tobytes() == view.tobytes()
    before = output.read_bytes()
    assert main(["export", str(run_directory), "-o", str(output), "--step", "10"]) == 2
    assert "exists, expected a new file" in capsys.readouterr().err
    assert output.read_bytes() == before
    wrong = {"o.npz": ["--step", "30"], "no/o.npz": [], "o.txt": []}
    for name, more in wrong.items():
        assert main(["export", str(run_directory), "-o", str(tmp_path / name), *more]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.npz", "run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "{0}/absent"], "no checkpoint at"),
        (["verify", "{0}"], "no checkpoint at"),
        (["inspect", "{0}/run", "--step", "11"], "expected one of 10, 20, 30"),
        (["export", "{0}/run"], "-o"),
        (["frobnicate"], "frobnicate"),
        ([], "COMMAND"),
        (["list", "{0}/run", "--step", "x"], "invalid int"),
        (["inspect", "{0}/run/checkpoints/step-000000000020/shard-0000.h5"], "no checkpoint at"),
    ],
)
def test_errors_are_printed_once(
    run_directory: Path, capsys: Any, arguments: list[str], message: str
) -> None:
    assert main([a.format(run_directory.parent) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert message in line
    assert ", expected " in line
