"""Flipped bits in the files of a checkpoint: found in every file, and nothing but an error."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint import vector

from mpips.checkpoint import (
    begin_step,
    commit,
    list_checkpoints,
    newest_whole,
    open_checkpoint,
    verify,
    write_shard,
    write_worker,
)
from mpips.checkpoint.__main__ import main
from mpips.checkpoint.files import INDEX
from mpips.checkpoint.shards import read_shard, shard_problem
from mpips.errors import UserError
from mpips.layout import Layout, Shard

LAYOUT = Layout.of({"w": (3, 2)})
SIZE = LAYOUT.size
FILES = ("shard-0000.h5", "worker-0000.h5", INDEX)
CASE_S = 10
EVERY = 3  # bits of a byte are 8: in turn all of them, and two or three of each byte


def save(directory: Path, step: int) -> Path:
    """Write a checkpoint that is as small as can be and has a file of each kind."""
    folder, whole = begin_step(directory, step), vector(SIZE, step)
    shards = [write_shard(folder, 0, Shard(0, SIZE), step, whole, {})]
    workers = [write_worker(folder, 0, step, {"residual": [(2, whole[:3])]}, SIZE, "f4")]
    commit(
        folder, step=step, layout=LAYOUT, dtype="float32", shards=shards, slots=(), config="",
        state={}, arrays={}, keep=2, workers=workers, worker_names=("residual",),
    )  # fmt: skip
    return folder


def readers(folder: Path, name: str) -> Callable[[], str]:
    """Return what says what is made of a damaged file: by its sum, and if it is read without.

    Any error but a UserError comes through. No index is read before its sum is right.
    """
    if name == INDEX:
        return lambda: "found" if verify(folder) else "missed"
    opened = open_checkpoint(folder)
    (record,) = [r for r in opened.contents.files if r.file == name]
    what = "params" if record in opened.shards else "residual"

    def judge() -> str:
        found = "found" if shard_problem(folder, record, sums=True) else "missed"
        try:
            read_shard(folder, record, opened.step, what, 0, np.empty(SIZE, "f4"))
        except UserError:
            return f"{found}, not read"
        return found

    return judge


def bits(file: Path) -> list[tuple[int, int]]:
    """Return the bytes and bits of a small file, without the numbers that it holds."""
    content, payload = file.read_bytes(), vector(SIZE, 3).tobytes()
    at = content.find(payload)
    held = range(at, at + len(payload)) if at >= 0 else range(0)
    return [(k, bit) for k in range(len(content)) if k not in held for bit in range(8)]


def in_batches(cases: Sequence[tuple[int, int]], judge: Callable[[int, int], str]) -> Counter[str]:
    """Judge cases in child processes: a damaged file may end, or hold up, the one that reads it."""
    found: Counter[str] = Counter()
    while found.total() < len(cases):
        reader, writer = os.pipe()
        if not (child := os.fork()):
            for case in cases[found.total() :]:
                signal.alarm(CASE_S)
                try:
                    text = judge(*case)
                except BaseException as error:
                    text = f"{type(error).__name__} at {case}"
                os.write(writer, f"{text}\n".encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as lines:
            found.update(line.strip() for line in lines)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            found[f"ended by {code} at {cases[found.total()]}"] += 1
    return found


def damage(folder: Path, name: str, most: int | None = None) -> Counter[str]:
    """Flip bits of one file's structures, some or one in three; say what its readers do."""
    verdict, file = readers(folder, name), folder / name
    good, cases = file.read_bytes(), bits(file)
    with file.open("r+b", buffering=0) as damaged:  # a file that is truncated waits for the disk

        def judge(at: int, bit: int) -> str:
            os.pwrite(damaged.fileno(), bytes([good[at] ^ 1 << bit]), at)
            try:
                return verdict()
            finally:
                os.pwrite(damaged.fileno(), good[at : at + 1], at)

        found = in_batches(cases[:: len(cases) // most if most else EVERY], judge)
    file.write_bytes(good)  # where a reader was ended in the midst of a case
    return found


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("most", [60, pytest.param(None, marks=pytest.mark.long)])
def test_a_flipped_bit_of_the_structures_is_damage(
    name: str, most: int | None, tmp_path: Path
) -> None:
    folder = save(tmp_path, 3)
    found = damage(folder, name, most)
    assert set(found) <= {"found", "found, not read"}, found
    assert found.total() >= (most or 10_000 / EVERY)
    assert verify(folder) == []


def test_what_is_no_number_type_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A bit that makes a whole number's type one of time: h5py raises a TypeError for it."""
    older, folder = save(tmp_path, 2), save(tmp_path, 3)
    shard = folder / "shard-0000.h5"
    good = shard.read_bytes()
    for name in (b"begin\0", b"end\0", b"owner\0", b"step\0"):
        at = good.index(name) + 8  # behind the name comes the type
        shard.write_bytes(good[:at] + bytes([good[at] ^ 2]) + good[at + 1 :])
        with pytest.raises(UserError, match="cannot read params: TypeError"):
            open_checkpoint(folder).read_params()
        (problem,) = verify(folder)
        assert "its HDF5 header is damaged" in problem
        whole, complaints = newest_whole(tmp_path)
        assert whole is not None
        assert whole.path == older
        assert complaints == [problem]
    assert main(["list", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path)]) == 1
    output = str(tmp_path / "out.npz")
    assert main(["export", str(tmp_path), "-o", output]) == 0
    assert "step 2" in capsys.readouterr().out
    assert len(list_checkpoints(tmp_path)) == 2
