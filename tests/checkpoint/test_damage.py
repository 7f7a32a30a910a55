"""Damaged files of a checkpoint, of every kind: each is found, and nothing comes but an error."""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from checkpoints import committed, vector, written

from mpips.checkpoint import (
    TableRows,
    begin_step,
    newest_whole,
    open_checkpoint,
    verify,
    write_rows,
    write_worker,
)
from mpips.checkpoint.files import INDEX
from mpips.checkpoint.rows import RowsFile
from mpips.checkpoint.shards import read_shard, shard_problem
from mpips.errors import UserError
from mpips.layout import Layout

LAYOUT = Layout.of({"w": (3, 2)})
SIZE = LAYOUT.size
FILES = ("shard-0000.h5", "worker-0000.h5", "rows-0000.h5", INDEX)
TABLE = "t"
CASE_S, HELD_S = 1, 60  # of the processor, so that load does not decide; and on the clock
# Bits of a byte are 8: in turn all of them, and one or two of each byte. An index is summed before
# anything in it is read, so that which bit it is makes no difference.
EVERY, OF_INDEX = 7, 29
Case = tuple[str, int, int]  # what is done, where, and which bit or how much


def save(directory: Path, step: int) -> Path:
    """Write a checkpoint that is as small as can be and has a file of each kind."""
    folder, whole = begin_step(directory, step), vector(SIZE, step)
    workers = [write_worker(folder, 0, step, {"residual": [(2, whole[:3])]}, SIZE, "f4")]
    numbers, values = np.array([4, 1]), whole[:4].reshape(2, 2)
    rows = write_rows(folder, 0, step, {TABLE: TableRows(numbers, values, {"m": -values})})
    more = {"rows": [rows], "tables": {TABLE: {"rows": 9, "dim": 2}}, "workers": workers}
    shards = written(folder, step, whole, owners=1)
    return committed(folder, step, LAYOUT, shards, worker_names=("residual",), **more)


def readers(folder: Path, name: str) -> Callable[[], str]:
    """Return what says what is made of a damaged file: by its sum, and if it is read without.

    Any error but a UserError comes through. No index is read before its sum is right.
    """
    if name == INDEX:
        return lambda: "found" if verify(folder) else "missed"
    opened = open_checkpoint(folder)
    (record,) = [r for r in opened.files if r.file == name]

    def read() -> None:
        if record in opened.rows:
            list(RowsFile(folder, record, opened.step, TABLE).pieces())
            return
        what = "params" if record in opened.shards else "residual"
        read_shard(folder, record, opened.step, what, 0, np.empty(SIZE, "f4"))

    def judge() -> str:
        found = "found" if shard_problem(folder, record, sums=True) else "missed"
        try:
            read()
        except UserError:
            return f"{found}, not read"
        return found

    return judge


def flips(content: bytes) -> list[Case]:
    """Return the bits of a small file, without the numbers that it holds."""
    payload = vector(SIZE, 3).tobytes()
    at = content.find(payload)
    held = range(at, at + len(payload)) if at >= 0 else range(0)
    return [("flip", k, bit) for k in range(len(content)) if k not in held for bit in range(8)]


def ranges(content: bytes, most: int) -> list[Case]:
    """Return ranges of a file that become zero, and its beginnings."""
    chance, size = random.Random(len(content)), len(content)
    zeros = [(chance.randrange(size), chance.choice((1, 8, 64, 512))) for _ in range(2 * most)]
    zeros = [(at, n) for at, n in zeros if any(content[at : at + n])]
    cuts = chance.sample(range(size), most)
    return [("zero", at, n) for at, n in zeros[:most]] + [("cut", at, 0) for at in cuts]


def damaged(good: bytes, case: Case, others: Sequence[bytes]) -> bytes:
    """Return what a file holds after that."""
    kind, at, n = case
    if kind == "flip":
        return good[:at] + bytes([good[at] ^ 1 << n]) + good[at + 1 :]
    if kind == "zero":
        return good[:at] + bytes(len(good[at : at + n])) + good[at + n :]
    return good[:at] if kind == "cut" else others[at]


def in_batches(cases: Sequence[Case], judge: Callable[[Case], str]) -> Counter[str]:
    """Judge cases in child processes: a damaged file may end, or hold up, the one that reads it."""
    found: Counter[str] = Counter()
    while found.total() < len(cases):
        reader, writer = os.pipe()
        if not (child := os.fork()):
            for case in cases[found.total() :]:
                signal.setitimer(signal.ITIMER_PROF, CASE_S)
                signal.alarm(HELD_S)
                try:
                    text = judge(case)
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


def damage(folder: Path, name: str, cases: Sequence[Case], others: Sequence[bytes]) -> Counter[str]:
    """Do to a file what the cases say, one after the other; say what its readers do."""
    verdict, file = readers(folder, name), folder / name
    good = file.read_bytes()
    with file.open("r+b", buffering=0) as changed:  # a file that is made anew waits for the disk

        def put(content: bytes) -> None:
            os.pwrite(changed.fileno(), content, 0)
            if os.fstat(changed.fileno()).st_size != len(content):
                os.ftruncate(changed.fileno(), len(content))

        def judge(case: Case) -> str:
            put(damaged(good, case, others))
            try:
                return verdict()
            finally:
                put(good)

        found = in_batches(cases, judge)
    file.write_bytes(good)  # where a reader was ended in the midst of a case
    return found


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("most", [60, pytest.param(None, marks=pytest.mark.long)])
def test_a_damaged_file_is_found(name: str, most: int | None, tmp_path: Path) -> None:
    """A bit of its structures, a range that is zero, a snapshot, or another file in its place."""
    older, folder = save(tmp_path, 2), save(tmp_path, 3)
    bits, others = flips((folder / name).read_bytes()), (older / name, *(folder / f for f in FILES))
    cases = bits[:: len(bits) // most if most else OF_INDEX if name == INDEX else EVERY]
    cases += ranges((folder / name).read_bytes(), 20 if most else 300)
    cases += [("swap", k, 0) for k, path in enumerate(others) if path != folder / name]
    found = damage(folder, name, cases, [path.read_bytes() for path in others])
    assert set(found) <= {"found", "found, not read"}, found
    assert found.total() == len(cases) >= (most or 10_000 / EVERY)
    assert verify(folder) == []


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file(name: str, tmp_path: Path) -> None:
    """Who opens one waits for whoever writes."""
    folder = save(tmp_path, 1)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert name in str(verify(folder))
    assert newest_whole(tmp_path)[0] is None
