"""Jobs over data of every format that is read as it is needed: exact, and told of at the start."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from runs import COUNT, COUNTING, ENDLESS, SAVED, Plan, assert_counts, final, summary, thinned

from mpips.config import Config
from mpips.datasets import open_dataset
from mpips.datasets.order import Order

Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.launch

N, LIMIT_S, EPOCHS = 50, 150.0, 30
CLASSES, SIDE = 3, 8
WIDE = 1 << 17  # features of HDF5 files, nearly all zero: a block holds 8 samples


def picture(k: int) -> np.ndarray:
    """Return an image of class ``k % 3``, of the colour that its class says."""
    found = np.random.default_rng(k).integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
    found[..., k % CLASSES] += 150
    return found


def write_shards(folder: Path) -> str:
    for part in range(7):
        with tarfile.open(folder / f"shard-{part}.tar", "w") as file:
            for k in range(part, N, 7):
                stream = io.BytesIO()
                Image.fromarray(picture(k)).save(stream, "png")
                for suffix, data in (("png", stream.getvalue()), ("cls", b"%d" % (k % CLASSES))):
                    member = tarfile.TarInfo(f"{k:03d}.{suffix}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
    return "shard-*.tar"


def write_hdf5(folder: Path) -> str:
    """Write the mean colours of images, the largest of which says its class, and the classes."""
    for part in range(7):
        numbers = np.arange(part, N, 7)
        with h5py.File(folder / f"part-{part}.h5", "w") as file:
            x = file.create_dataset("x", (len(numbers), WIDE), "f4", chunks=(1, WIDE))
            x[:, :CLASSES] = [picture(k).mean((0, 1)) / 255 for k in numbers]
            file["y"] = numbers % CLASSES
    return "part-*.h5"


WRITERS = {"shards": write_shards, "hdf5": write_hdf5}
# Ranks and options of a part that is stopped at a random step, and of the one that ends it.
PARTS = ((4, "--servers 2"), (3, "--servers 1 --mode ssp --staleness-bound 1"))


@pytest.mark.parametrize("name", thinned(WRITERS, ["shards"], ()))
def test_stops_lose_and_repeat_nothing_and_models_learn(name: str, tmp_path: Path) -> None:
    plan, data = Plan(tmp_path), ["--dataset", WRITERS[name](tmp_path), "--batch-size", "4"]
    test = ["--problem", f"{COUNTING}:SlowStoppingCounting", *COUNT, "--test-fraction", "0.2"]
    for k, (ranks, text) in enumerate(PARTS):
        last = k + 1 == len(PARTS)
        more = ["--epochs", str(EPOCHS if last else ENDLESS), *["--resume"] * (k > 0)]
        plan.add("stops", ranks, [*data, *test, *text.split(), *more], 0 if last else SAVED)
    learns = ["--problem", "softmax", "--mode", "sync", "--epochs", "30", "--lr", "0.1"]
    plan.add("learns", 2, [*data, *learns])
    plan.run(LIMIT_S)
    stops = plan.out("stops")
    assert_counts(final(stops), N - N // 5, EPOCHS)
    assert name != "hdf5" or 1 < final(stops).state["block"] < N / 3
    index = json.loads((stops / "data.json").read_text())["files"]["dataset"]
    assert sum(entry["held"]["x"]["shape"][0] for entry in index) == N
    assert bool(index[0]["place"]) == (name == "shards")
    assert bool([*stops.glob("dataset.places.*")]) == (name == "shards")
    assert summary(plan.out("learns"))["accuracy"] > 0.8


MANY, BATCH = 50, 64


@pytest.mark.one_mpi
def test_a_start_opens_each_of_many_files_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2,000 million samples, which take no space: they are zeros that nobody has written."""
    n, opened = 2_000_000_000, Counter[str]()
    for k in range(MANY):
        with h5py.File(tmp_path / f"part-{k:02d}.h5", "w") as file:
            file.create_dataset("x", (n // MANY, 4), "f4", chunks=(1 << 16, 4))
            file.create_dataset("y", (n // MANY,), "f4", chunks=(1 << 16,))
    np.savez(tmp_path / "test.npz", x=np.zeros((4, 4), "f4"), y=np.zeros(4, "f4"))

    class Counted(h5py.File):
        def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
            opened[Path(path).name] += 1
            super().__init__(path, *args, **kwargs)

    monkeypatch.setattr(h5py, "File", Counted)
    monkeypatch.chdir(tmp_path)
    config = Config(dataset="part-*.h5", test_dataset="test.npz", batch_size=BATCH)
    with open_dataset(config) as data:
        order = Order(data.train.n, data.train.block(BATCH), config.seed)
        assert len(opened) == MANY
        assert max(opened.values()) == 2  # its arrays' shapes, a stretch of its targets
    ids = order.sample_ids(0, 10**9, 10**9 + 10_000)
    assert len(set(ids.tolist())) == 10_000
    assert 0 <= ids.min() < ids.max() < order.n == n
