"""Jobs over many files: exact through stops and kills, quick to start, and checked on resume."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from runs import COUNT, COUNTING, ENDLESS, SAVED, Plan, assert_counts, final, newest, summary

from mpips.config import Config
from mpips.datasets import open_dataset
from mpips.datasets.order import Order

pytestmark = pytest.mark.launch

FILES, EPOCHS = 40, 10
WIDE = 1 << 14  # features: a block holds 64 samples
LIMIT_S = 90.0


def write_uneven(folder: Path) -> int:
    """Write 40 files of 1 to 12 samples, which take no space; returns the number of samples."""
    sizes = np.random.default_rng(0).integers(1, 13, FILES).tolist()
    for k, size in enumerate(sizes):
        with h5py.File(folder / f"train-{k:02d}.h5", "w") as file:
            file.create_dataset("x", (size, WIDE), "f4", chunks=(1, WIDE))
            file["y"] = np.arange(size, dtype="f4")
    np.savez(folder / "test.npz", x=np.zeros((4, WIDE), "f4"), y=np.zeros(4, "f4"))
    return sum(sizes)


def counting(kind: str) -> list[str]:
    data = ["--dataset", "train-*.h5", "--test-dataset", "test.npz", "--batch-size", "8"]
    return ["--problem", f"{COUNTING}:{kind}", *data, *COUNT]


# Ranks and options of the parts of one run; all but the last are stopped at a random step.
PARTS = (
    (4, "--servers 1"), (6, "--servers 2 --node-size 2"),
    (3, "--servers 1 --mode ssp --staleness-bound 1"),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.other_mpi
def test_stops_lose_and_repeat_nothing(tmp_path: Path) -> None:
    n, plan = write_uneven(tmp_path), Plan(tmp_path)
    words = [*counting("StoppingCounting"), "--checkpoint-every", "4steps"]
    for k, (ranks, text) in enumerate(PARTS):
        last = k + 1 == len(PARTS)
        more = ["--epochs", str(EPOCHS if last else ENDLESS), *["--resume"] * (k > 0)]
        plan.add("stops", ranks, [*words, *text.split(), *more], 0 if last else SAVED)
    plan.run(LIMIT_S)
    out = plan.out("stops")
    assert_counts(final(out), n, EPOCHS)
    assert 0 < newest(out).state["block"] < n / 3
    entries = json.loads((out / "data.json").read_text())["files"]["dataset"]
    assert sum(entry["held"]["x"]["shape"][0] for entry in entries) == n
    assert summary(out)["resumed_from"]


MANY, BATCH = 50, 64


@pytest.mark.one_mpi
def test_a_start_opens_each_of_many_files_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2,000 million samples, which take no space: they are zeros that nobody has written."""
    for k in range(MANY):
        with h5py.File(tmp_path / f"part-{k:02d}.h5", "w") as file:
            file.create_dataset("x", (2_000_000_000 // MANY, 4), "f4", chunks=(1 << 16, 4))
            file.create_dataset("y", (2_000_000_000 // MANY,), "f4", chunks=(1 << 16,))
    np.savez(tmp_path / "test.npz", x=np.zeros((4, 4), "f4"), y=np.zeros(4, "f4"))
    opened: Counter[str] = Counter()

    class Counted(h5py.File):
        def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
            opened[Path(path).name] += 1
            super().__init__(path, *args, **kwargs)

    monkeypatch.setattr(h5py, "File", Counted)
    monkeypatch.chdir(tmp_path)
    config = Config(dataset="part-*.h5", test_dataset="test.npz", batch_size=BATCH)
    with open_dataset(config) as data:
        order = Order(data.train.n, BATCH, data.train.block(BATCH), config.seed)
        assert len(opened) == MANY
        assert max(opened.values()) == 2  # its arrays' shapes, a stretch of its targets
    ids = order.sample_ids(0, 10**9, 10**9 + 10_000)
    assert len(set(ids.tolist())) == 10_000
    assert 0 <= ids.min() < ids.max() < order.n == 2_000_000_000
