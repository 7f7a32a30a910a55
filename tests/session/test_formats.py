"""Jobs over data of every format that is read as it is needed: exact, and told of at the start."""

import io
import json
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from runs import COUNT, COUNTING, ENDLESS, SAVED, Plan, assert_counts, final, shared_out, summary

Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.launch

LIMIT_S, EPOCHS = 150.0, 30
CLASSES, SIDE = 3, 8


def picture(k: int) -> np.ndarray:
    """Return an image of class ``k % 3``, of the colour that its class says."""
    found = np.random.default_rng(k).integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
    found[..., k % CLASSES] += 150
    return found


def write_photos(folder: Path) -> str:
    for k in range(50):
        path = folder / "photos" / "abc"[k % CLASSES] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(k)).save(path)
    return "photos/"


def write_shards(folder: Path) -> str:
    for part in range(7):
        with tarfile.open(folder / f"shard-{part}.tar", "w") as file:
            for k in range(part, 50, 7):
                stream = io.BytesIO()
                Image.fromarray(picture(k)).save(stream, "png")
                for suffix, data in (("png", stream.getvalue()), ("cls", b"%d" % (k % CLASSES))):
                    member = tarfile.TarInfo(f"{k:03d}.{suffix}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
    return "shard-*.tar"


def write_tables(folder: Path, kind: str) -> str:
    """Write the mean of each image's colours, whose largest says its class."""
    pyarrow, csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    parquet = pytest.importorskip("pyarrow.parquet")
    write = {"csv": csv.write_csv, "parquet": parquet.write_table}[kind]
    for part in range(7):
        numbers = np.arange(part, 50, 7)
        means = np.stack([picture(k).mean((0, 1)) / 255 for k in numbers])
        table = {**dict(zip("abc", means.T, strict=True)), "label": numbers % CLASSES}
        write(pyarrow.table(table), folder / f"table-{part}.{kind}")
    return f"table-*.{kind}::a,b,c,label"


N = 50
WRITERS = {
    "photos": write_photos,
    "shards": write_shards,
    "parquet": partial(write_tables, kind="parquet"),
    "csv": partial(write_tables, kind="csv"),
}
PLACED = ("shards", "csv")
# Ranks and options of a part that is stopped at a random step, and of the one that ends it.
PARTS = ((4, "--servers 2"), (3, "--servers 1 --mode ssp --staleness-bound 1"))


@pytest.mark.parametrize("name", shared_out(WRITERS, ["shards"], ()))
def test_stops_lose_and_repeat_nothing_and_models_learn(name: str, tmp_path: Path) -> None:
    plan, data = Plan(tmp_path), ["--dataset", WRITERS[name](tmp_path), "--batch-size", "4"]
    test = ["--problem", f"{COUNTING}:SlowStoppingCounting", *COUNT, "--test-fraction", "0.2"]
    for k, (ranks, text) in enumerate(PARTS):
        last = k + 1 == len(PARTS)
        more = ["--epochs", str(EPOCHS if last else ENDLESS), *["--resume"] * (k > 0)]
        plan.add("stops", ranks, [*data, *test, *text.split(), *more], 0 if last else SAVED)
    learns = ["--problem", "softmax", "--mode", "sync", "--epochs", "30", "--lr", "0.1"]
    plan.add("learns", 2, [*data, *learns], quiet=False)
    plan.run(LIMIT_S)
    stops = plan.out("stops")
    assert_counts(final(stops), N - N // 5, EPOCHS)
    index = json.loads((stops / "data.json").read_text())["files"]["dataset"]
    assert sum(entry["held"]["x"]["shape"][0] for entry in index) == N
    assert bool(index[0]["place"]) == (name in PLACED)
    assert bool([*stops.glob("dataset.places.*")]) == (name in PLACED)
    assert summary(plan.out("learns"))["accuracy"] > 0.8
    (told,) = plan.outputs("learns")
    assert ("classes: 0 a, 1 b, 2 c" in told) == (name == "photos")
