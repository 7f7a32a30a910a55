"""The folder of a run belongs to one job at a time: `mpips.session.folder`."""

import dataclasses
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from mpips.checkpoint import list_checkpoints, open_checkpoint, run_folder, verify, write_shard
from mpips.checkpoint.files import begin_step, step_folder
from mpips.checkpoint.index import Contents, commit
from mpips.checkpoint.run_folder import (
    LOCK,
    NO_LOCKS,
    RunFolder,
    claim,
    is_claimed,
    release,
    write_whole,
)
from mpips.config import Config
from mpips.config.command_line import parse_command_line
from mpips.config.jobfile import to_toml
from mpips.config.option import shown
from mpips.errors import UserError
from mpips.layout import Layout, Shard
from mpips.session import folder

NOBODY = 65534
FOLDERS = {"checkpoints", "record", "trace", "tensorboard"}


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release()


def find(out: Path, *words: str) -> folder.Run:
    """Find the run that a command line names, as rank 0 does."""
    return folder.find_run(parse_command_line(["--out", str(out), *words]))


def test_a_folder_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while its first batch is under way, which leaves a folder that may be cleared."""
    monkeypatch.chdir(tmp_path)
    out = Path("runs", "mlp-async-20260101-120000")
    unfinished(out)
    claim(out)
    for words in ([], ["--resume", "auto"]):
        with pytest.raises(UserError, match="in use by a running job"):
            find(out, *words)
    assert is_claimed(out)
    assert (out / "checkpoints").is_dir()
    release()
    assert not is_claimed(out)
    assert not is_claimed(tmp_path / "none")
    os.mkfifo(tmp_path / LOCK)
    assert not is_claimed(tmp_path)
    found = folder.find_run(parse_command_line(["--resume", "auto"]))
    assert (found.out, found.resumed) == (out, False), "nothing was saved: begins anew"
    assert is_claimed(out)


def test_another_user_sees_it_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # not all of its parents may be entered
    claim(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / LOCK).chmod(0o444)
    user = os.geteuid()
    os.seteuid(user or NOBODY)
    try:
        assert is_claimed(Path())
    finally:
        os.seteuid(user)


def test_texts_are_utf8_in_every_locale(tmp_path: Path) -> None:
    names = "from pathlib import Path; from mpips.checkpoint.run_folder import write_whole"
    code = f"{names}; write_whole(Path('config.toml'), '\\xfc')"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | plain, cwd=tmp_path, check=True)
    assert (tmp_path / "config.toml").read_text("utf-8") == "\xfc"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run begins and is resumed there; nobody knows of another one in its folder."""
    saved_run(tmp_path / "other", Config())
    for number in NO_LOCKS:
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
        out = tmp_path / f"run-{number}"
        assert find(out).out == out
        assert not is_claimed(out)
        assert find(tmp_path / "other", "--resume").resumed
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        claim(tmp_path)


def test_a_look_at_a_folder_keeps_no_job_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that asks whether it is in use locks it for a moment."""
    with open(tmp_path / LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert not is_claimed(tmp_path), "two look at a time"
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=[BlockingIOError, None]))
    claim(tmp_path)


def test_a_checkpoint_is_read_whoever_has_locked_it(tmp_path: Path) -> None:
    """HDF5 is asked for no locks: its own would be refused here."""
    saved_run(tmp_path / "run", Config())
    (step,) = list_checkpoints(tmp_path / "run")
    with (step / "shard-0000.h5").open("rb") as shard, (step / "index.h5").open("rb") as index:
        for file in (shard, index):
            fcntl.flock(file, fcntl.LOCK_EX)
        assert verify(step) == []
        assert open_checkpoint(step).read_params().tolist() == [0.0] * 4


def unfinished(out: Path, *kinds: str, step: int = 0) -> None:
    """Leave what a job leaves that has saved its start and then gone to `step`."""
    find(out)
    release()
    folder.save_config(out, Config(seed=3))
    lines = "".join(f'{{"kind": "{kind}"}}\n' for kind in ("start", "checkpoint", *kinds))
    (out / "metrics.jsonl").write_text(lines)
    for k in {0, step}:
        (step_folder(out / "checkpoints", k)).mkdir(parents=True)
        (step_folder(out / "checkpoints", k) / "index.h5").touch()


def parts_of_a_checkpoint(out: Path) -> None:
    """Leave what a job leaves that is killed as it saves its start, of a copy and a trace too."""
    part = "record/part-0001"
    for name in (
        *("checkpoints/step-000000000000/shard-0000.h5", f"{part}/step-000000000007/index.h5"),
        *(f"{part}/server-00000", "trace/part-0001/rank-00000", ".lock", "dataset.places.12.tmp"),
        *("tensorboard/events.out.tfevents.1.host", "test_dataset.places.0"),
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()


def early_files(out: Path) -> None:
    """Leave what a job leaves that has begun to count samples, and not to train."""
    unfinished(out, "stop")  # Open MPI ends the other ranks by SIGTERM
    for name in run_folder.EARLY - FOLDERS - {"config.toml", "metrics.jsonl"}:
        (out / name).write_text("{}")
        (out / f"{name}.tmp").touch()


@pytest.mark.parametrize("leave", [unfinished, parts_of_a_checkpoint, early_files])
@pytest.mark.parametrize("words", [(), ("--resume", "auto")])
def test_what_ended_in_its_first_batch_blocks_nothing(
    words: tuple[str, ...], leave: Callable[[Path], None], tmp_path: Path
) -> None:
    """But for a trace, which says what happened, all of it is removed, by a refused job too."""
    out = tmp_path / "run"
    leave(out)
    for seed in ("4", "5"):  # the corrected command, and another one
        found = find(out, *words, "--seed", seed)
        assert (found.config.seed, found.checkpoint, found.resumed) == (int(seed), None, False)
        if not words or seed == "5":
            assert {path.name for path in out.iterdir()} <= {".lock", "trace", "trace.json"}
        folder.forget(out)
        release()
    assert out.exists() == any(out.glob("trace*"))


FOREIGN = (
    *("checkpoints/epoch3.pt", "record/take-1.wav", "data.json", "metrics.jsonl", "summary.json"),
    *("config.toml", "us.places.csv", "best", "trace/a", "tensorboard/events.out.tfevents.1.host"),
)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_another_program_is_refused(name: str, tmp_path: Path) -> None:
    out = tmp_path / "model"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("precious")
    with pytest.raises(UserError, match="expected a new or empty folder"):
        find(out)
    assert {path for path in out.rglob("*") if path.is_file()} == {out / name}


def test_files_of_others_stay_in_the_folders_of_a_run(tmp_path: Path) -> None:
    """A run that begins anew, and one that is refused, removes its own files alone."""
    out = tmp_path / "run"
    unfinished(out)
    others = [
        *("checkpoints/epoch3.pt", "checkpoints/step-000000000000/notes.txt", "record/take-1.wav"),
        *("record/part-0001/notes.txt", "tensorboard/notes.txt"),
    ]
    for name in others:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("precious")
    for words in ([], ["--resume", "auto"]):
        find(out, *words)
        release()
        folder.save_config(out, Config())
        (out / "checkpoints" / "step-000000000000" / "shard-0000.h5").touch()
    folder.forget(out)
    left = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert left == {".lock", *others}


@pytest.mark.parametrize(
    ("kinds", "step", "kept"),
    [(("train",), 0, True), (("eval",), 0, True), ((), 7, True), (("train",), 0, False)],
)
def test_what_has_trained_stays(
    kinds: tuple[str, ...], step: int, kept: bool, tmp_path: Path
) -> None:
    """Also where its checkpoints were removed since."""
    out = tmp_path / "run"
    unfinished(out, *kinds, step=step)
    if not kept:
        shutil.rmtree(out / "checkpoints")
        (out / "summary.json").touch()
    before = sorted(out.rglob("*"))
    with pytest.raises(UserError, match="holds a run, expected a new or empty folder"):
        find(out)
    with pytest.raises(UserError, match="seed 4 on resume, expected 3 as in the saved run"):
        find(out, "--resume", "auto", "--seed", "4")
    if not kept:
        with pytest.raises(UserError, match=r"no whole checkpoint .*; bring back what is missing"):
            find(out, "--resume", "auto")
    assert sorted(out.rglob("*")) == before


def test_a_run_that_begins_anew_keeps_its_log(tmp_path: Path) -> None:
    """Only the lines since the last beginning say whether this run has trained and saved."""
    out, begun = tmp_path / "run", '{"kind": "start", "resumed": false}\n{"kind": "train"}\n'
    unfinished(out)
    for log in ((out / "metrics.jsonl").read_text(), begun):
        with (out / "metrics.jsonl").open("a") as file:
            file.write(log)
        before = (out / "metrics.jsonl").read_text()
        assert not find(out, "--resume", "auto").resumed
        release()
        assert (out / "metrics.jsonl").read_text() == before


def test_a_refused_job_leaves_a_link_as_it_was(tmp_path: Path) -> None:
    """A folder of a cluster's scratch disk, say, which the user has linked."""
    out = tmp_path / "run"
    (tmp_path / "scratch").mkdir()
    out.symlink_to(tmp_path / "scratch")
    find(out)
    folder.forget(out)
    assert out.is_symlink()
    assert not list(out.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, remedy in {
        errno.EACCES: "Permission denied, .*; give another --out, or the right to write there",
        errno.EROFS: "Read-only file system, .*; give another --out$",
        errno.ENOSPC: "No space left on device, .*; free some space, or give another --out",
    }.items():
        failing = Mock(side_effect=OSError(number, os.strerror(number)))
        monkeypatch.setattr(Path, "mkdir", failing)
        with pytest.raises(UserError, match=remedy):
            find(tmp_path / "run")


def saved_run(out: Path, config: Config, step: int = 7) -> None:
    """Make a run's folder with its configuration and one checkpoint."""
    out.mkdir(parents=True, exist_ok=True)
    folder.save_config(out, config)
    at, layout = begin_step(out / "checkpoints", step), Layout.of({"w": (4,)})
    records = [write_shard(at, 0, Shard(0, 4), step, np.zeros(4, "f4"), {})]
    about = layout, np.dtype("f4"), (), tuple(records), to_toml(config), {}
    commit(at, Contents(step, *about), keep=1)


def test_a_link_to_a_checkpoint_may_move(tmp_path: Path) -> None:
    """Each rank opens what it pointed to: the run of a link may find a better one meanwhile."""
    best, (first, second) = tmp_path / "best", (tmp_path / name for name in "ab")
    for out, step in ((first, 7), (second, 8)):
        saved_run(out, Config(), step)
        best.unlink(missing_ok=True)
        best.symlink_to(list_checkpoints(out)[0])
        if step == 7:
            found = find(tmp_path / "run", "--init-from", str(best)).checkpoint
    assert found is not None
    assert open_checkpoint(found).step == 7


def test_a_folder_is_made_anew_where_there_is_no_other(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    run_folder = RunFolder(out)
    out.rmdir()
    assert run_folder.path() is None
    out.mkdir()
    (out / "of somebody else").touch()
    with pytest.raises(FileExistsError):
        run_folder.recreate()
    assert (run_folder.path(), run_folder.moved) == (None, "")
    (out / "of somebody else").unlink()
    assert run_folder.recreate() == run_folder.path() == out
    assert run_folder.moved == f"{out} was removed while the job ran"
    release()
    run_folder.close()


def resumed(out: Path, *options: str) -> folder.Run:
    """Find the run to be resumed, and let it go."""
    found = find(out, "--resume", *options)
    release()
    return found


SAVED = Config(batch_size=48, seed=3, optimizer="sgd", lr=0.1, codec="int8")
GROUPS, HELD_OUT = "enc/*: lr=0.5; enc/out.*: weight_decay=0.5", "2024/held-out.h5::x/a,y/b"
WITH_SLASHES = Config(dataset="2024/train.h5", test_dataset=HELD_OUT, groups=GROUPS, lr=0.1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 3", "seed = 2", "seed 2, which was changed by hand, expected 3 as in its check"),
        ("batch_size = 48\n", "", "batch_size 32, .*, expected 48 .*; write batch_size = 48 there"),
        ("batch_size", "catch_size", "unknown key 'catch_size', expected .* or remove .*config"),
        ("seed = 3", "seed 3", r"config\.toml: .*, expected TOML; or remove .*config\.toml"),
    ],
)
def test_a_changed_config_is_refused_where_the_order_depends_on_it(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    saved_run(out, SAVED)
    assert not resumed(out).notes
    text = (out / "config.toml").read_text()
    assert old in text
    (out / "config.toml").write_text(text.replace(old, new))
    for more in ([], ["--seed", "3", "--batch-size", "48", "--shuffle"]):
        with pytest.raises(UserError, match=message):
            resumed(out, *more)
    (out / "config.toml").unlink()
    assert resumed(out).config.batch_size == 48


def test_flipped_bits_of_a_config_are_refused_or_said(tmp_path: Path) -> None:
    out = tmp_path / "run"
    saved_run(out, WITH_SLASHES)
    path = out / "config.toml"
    good, kept = path.read_bytes(), resumed(out).config
    for at in range(0, len(good), 37):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        try:
            found = resumed(out)
        except UserError:
            continue
        assert found.config == kept or found.notes, path.read_bytes()[at - 20 : at + 20]


def test_another_change_of_the_config_is_said(tmp_path: Path) -> None:
    saved_run(tmp_path, WITH_SLASHES)
    path = tmp_path / "config.toml"
    text = path.read_text()
    for name, old, new in (
        ("groups", GROUPS, GROUPS.replace("enc/*", "dec/*")),
        ("dataset", "2024/train.h5", "2025/train.h5"),
    ):
        path.write_text(text.replace(old, new))
        (note,) = resumed(tmp_path).notes
        assert "differs from the checkpoint of step 7" in note
        assert note.endswith(f": {name} {shown(old)} -> {shown(new)}; this holds from here on")
    path.write_text(text.replace("lr = 0.1", "lr = 0.01"))
    assert not resumed(tmp_path, "--lr", "0.1").notes, "it is given anew"
    path.write_text(to_toml(dataclasses.replace(WITH_SLASHES, codec="auto")))
    assert not resumed(tmp_path).notes, "the checkpoint has what was chosen"


def test_a_run_of_another_version_is_refused(tmp_path: Path) -> None:
    """The format is told before the options that this version does not have."""
    out = tmp_path / "run"
    saved_run(out, SAVED)
    (out / "config.toml").write_text(f"dim = 32\n{(out / 'config.toml').read_text()}")
    index = step_folder(out / "checkpoints", 7) / "index.h5"
    written = index.read_bytes().replace(b"checkpoint 3\n", b"checkpoint 2\n", 1)
    index.write_bytes(written)
    message = r"index\.h5: checkpoint format 2, expected 3; begin a new run, or go on with the ver"
    with pytest.raises(UserError, match=message):
        find(out, "--resume")
    (out / "config.toml").unlink()
    with pytest.raises(UserError, match=message):
        find(out, "--resume", "auto")
    assert index.read_bytes() == written


def test_a_run_without_its_config_goes_on_by_the_sealed_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("runs", "mlp-async-20260101-120000")
    saved_run(out, SAVED)
    (out / "config.toml").unlink()
    for words in (["--resume", "--out", str(out)], ["--resume"], ["--resume", "auto"]):
        found = folder.find_run(parse_command_line(words))
        release()
        assert found.resumed
        assert found.out == out
        assert (found.config.seed, found.config.batch_size, found.config.lr) == (3, 48, 0.1)
        (note,) = found.notes
        assert "config.toml is missing: the copy in" in note
    with pytest.raises(UserError, match="holds a run"):
        find(out)
    with pytest.raises(UserError, match="seed 4 on resume, expected 3 as in the saved run"):
        find(out, "--resume", "--seed", "4")


def test_a_file_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    write_whole(path, "old")

    def full(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="Input/output error"):
        write_whole(path, "new")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]
