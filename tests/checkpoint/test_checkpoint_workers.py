"""What is one worker's alone in a checkpoint: read by as many workers, or by others."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from checkpoints import committed

from mpips.checkpoint import (
    begin_step,
    list_checkpoints,
    newest_whole,
    open_checkpoint,
    write_worker,
)
from mpips.checkpoint.files import remove_checkpoint
from mpips.checkpoint.shards import CHUNK_BYTES
from mpips.errors import UserError
from mpips.layout import Layout

LAYOUT = Layout.of({"w": (13, 7), "b": (7,)})
NAMES = ("m", "residual/w")
WORKERS, STEP = 3, 5
PIECES = ((3, 20), (33, 60))


def vector(worker: int, name: str) -> np.ndarray:
    """The first as a whole, the second in two pieces and with zeroes between and behind."""
    rng = np.random.default_rng([worker, NAMES.index(name)])
    found = rng.standard_normal(LAYOUT.size).astype("f4")
    if name == NAMES[1]:
        held = np.zeros(LAYOUT.size, bool)
        for begin, end in PIECES:
            held[begin:end] = True
        found[~held] = 0
    return found


def save(directory: Path, absent: int | None = None) -> Path:
    """Write a checkpoint of 2 owners and 3 workers; `absent` is left out."""
    folder, own = begin_step(directory, STEP), []
    for k in set(range(WORKERS)) - {absent}:
        first, second = (vector(k, name) for name in NAMES)
        pieces = {NAMES[0]: [(0, first)], NAMES[1]: [(b, second[b:e]) for b, e in PIECES]}
        own.insert(0, write_worker(folder, k, STEP, pieces, LAYOUT.size, "f4"))
    return committed(folder, STEP, LAYOUT, workers=own, worker_names=NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_worker_reads_its_own_and_others_the_mean(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path))
    out, part = np.empty(LAYOUT.size, "f4"), np.empty(25, "f4")
    assert checkpoint.worker_names == NAMES
    for worker in range(WORKERS):
        checkpoint.read_worker(name, worker, out)
        np.testing.assert_array_equal(out, vector(worker, name))
        checkpoint.read_worker(name, worker, part, 30)
        np.testing.assert_array_equal(part, out[30:55])
    checkpoint.read_workers_share(name, 0, out)
    mean = np.mean([vector(k, name).astype("f8") for k in range(WORKERS)], axis=0)
    np.testing.assert_allclose(out, mean, rtol=1e-6)
    checkpoint.read_workers_share(name, 30, part)
    np.testing.assert_array_equal(part, out[30:55])
    assert checkpoint.size_bytes == sum(p.stat().st_size for p in checkpoint.path.iterdir())


def test_a_file_of_another_worker_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    a, b = folder / "worker-0000.h5", folder / "worker-0002.h5"
    checkpoint = open_checkpoint(folder)
    assert a.stat().st_size == b.stat().st_size
    a.write_bytes(b.read_bytes())
    with pytest.raises(UserError, match="attribute owner 2, expected 0"):
        checkpoint.read_worker("m", 0, WORKERS, np.empty(LAYOUT.size, "f4"))


def test_a_worker_that_is_missing_is_no_commit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"files of workers \[0, 2\], expected one of each"):
        save(tmp_path, absent=1)
    assert newest_whole(tmp_path)[0] is None


def test_removal_takes_the_files_of_workers_too(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "worker-0001.h5.tmp").write_text("half")
    remove_checkpoint(folder)
    assert not list_checkpoints(tmp_path)
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
