"""Reading samples of each format during training, beside the format's own reader.

One process reads an epoch in mpips' order, with a thread that reads ahead, and computes the
gradient of a small linear model for every batch. A larger model would hide the time of reading. On
the other side, the format's own reader reads and decodes the same files in file order, with as
many threads. The files are in the page cache.
"""

import importlib.util
import io
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks.turns import compare_rates, take_turns
from mpips.config import Config
from mpips.datasets import Source, open_dataset
from mpips.datasets.loader import Loader
from mpips.datasets.order import Order
from mpips.tools.bench.jobs import temporary_folder
from mpips.tools.bench.measure import Options, Row

SIDE, CLASSES, BATCH, FILES = 64, 10, 64, 8
SAMPLES, QUICK_SAMPLES = 4096, 256
WIDTH = 256  # numbers in a row of a table
SHORT, SHORTEST = 4, 32  # factors of the number of samples for formats that are read fast
REACH = 0.8
AHEAD = 2
RATE = 1e-7  # learning rate, small enough to avoid overflow

Alone = Callable[[Path], int]


def run(options: Options) -> list[Row]:
    """Compare each format whose package is installed."""
    n = QUICK_SAMPLES if options.quick else SAMPLES
    rows = []
    for name, (package, write, names, alone, times) in FORMATS.items():
        if importlib.util.find_spec(package) is None:
            continue
        with temporary_folder() as folder:
            write(folder, n * times)
            rows.append(_compare(name, folder, names, alone, n * times, options))
    return rows


def _compare(name: str, folder: Path, names: str, alone: Alone, n: int, options: Options) -> Row:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    dataset = f"{folder}/{names}"
    sides = {"mpips": lambda: _train(dataset), "alone": lambda: _rate(lambda: alone(folder))}
    found = take_turns(sides, options.repeats)
    figures = compare_rates(found["mpips"], found["alone"])
    case = f"{name}, {size / n / 1e3:.1f} kB a sample, {figures[0] * size / n / 1e6:.0f} MB/s"
    beside = "its reader alone"
    return Row("reading", case, figures[0], "samples/s", beside, *figures[1:], REACH)


def _rate(read: Callable[[], int]) -> float:
    begin = time.perf_counter()
    n = read()
    return n / (time.perf_counter() - begin)


def _train(dataset: str) -> float:
    """Read an epoch as a job of one worker; returns the rate in samples/s, without the start."""
    config = Config(dataset=dataset, test_dataset=dataset, batch_size=BATCH)
    with open_dataset(config) as data:
        source = data.train
        weights = np.zeros(int(np.prod(data.info.x_shape)), "f4")

        def learn() -> int:
            for x, y in _batches(source):
                flat = x.reshape(len(x), -1)
                error = flat @ weights - (y == 0)
                np.subtract(weights, RATE * (error @ flat), out=weights)
            return source.n

        return _rate(learn)


def _batches(source: Source) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    order = Order(source.n, source.block(BATCH), 0)
    ranges = [(k, min(k + BATCH, source.n)) for k in range(0, source.n, BATCH)]
    with Loader(source, order, "float32") as loader:
        for number in range(len(ranges) + AHEAD):
            if number < len(ranges):
                loader.submit(0, *ranges[number])
            if number >= AHEAD:
                batch = loader.take()
                yield batch.x, batch.y


# For each format: a function that writes files, and one that reads them by the format's reader.


def _pictures(n: int) -> Iterator[tuple[int, bytes]]:
    """Yield a class and a JPEG of a smooth picture, similar to a photograph, `n` times."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for _ in range(n):
        small = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(small).resize((SIDE, SIDE)).save(stream, "jpeg", quality=90)
        yield int(rng.integers(CLASSES)), stream.getvalue()


def _write_hdf5(folder: Path, n: int) -> None:
    rng = np.random.default_rng(0)
    for part in range(FILES):
        with h5py.File(folder / f"{part}.h5", "w") as file:
            x = rng.integers(0, 256, (n // FILES, SIDE, SIDE, 3), dtype=np.uint8)
            file.create_dataset("x", data=x, chunks=(32, SIDE, SIDE, 3))
            file["y"] = rng.integers(0, CLASSES, n // FILES)


def _read_hdf5(folder: Path) -> int:
    n = 0
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            for begin in range(0, len(file["x"]), BATCH):
                n += len(_scaled(file["x"][begin : begin + BATCH]))
    return n


def _write_images(folder: Path, n: int) -> None:
    for label in range(CLASSES):
        (folder / f"class-{label}").mkdir()
    for k, (label, data) in enumerate(_pictures(n)):
        (folder / f"class-{label}" / f"{k}.jpg").write_bytes(data)


def _read_images(folder: Path) -> int:
    return _decode(path.read_bytes() for path in sorted(folder.rglob("*.jpg")))


def _write_tar(folder: Path, n: int) -> None:
    pictures = _pictures(n)
    for part in range(FILES):
        with tarfile.open(folder / f"{part}.tar", "w") as file:
            for k in range(n // FILES):
                label, data = next(pictures)
                for suffix, content in (("jpg", data), ("cls", b"%d" % label)):
                    member = tarfile.TarInfo(f"{k:06d}.{suffix}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))


def _read_tar(folder: Path) -> int:
    def members() -> Iterator[bytes]:
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as file:
                for member in file:
                    if member.name.endswith("jpg") and (content := file.extractfile(member)):
                        yield content.read()

    return _decode(members())


def _decode(images: Iterator[bytes]) -> int:
    """Decode with a thread per core, and scale batches; returns the number of images."""
    from PIL import Image

    def decode(data: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(data)))

    n = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        while batch := [data for data, _ in zip(images, range(BATCH), strict=False)]:
            n += len(_scaled(np.stack([*pool.map(decode, batch)])))
    return n


def _write_parquet(folder: Path, n: int) -> None:
    import pyarrow
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    for part in range(FILES):
        values = pyarrow.array(rng.normal(size=n // FILES * WIDTH).astype("f4"))
        rows = pyarrow.FixedSizeListArray.from_arrays(values, WIDTH)
        labels = pyarrow.array(rng.integers(0, CLASSES, n // FILES))
        table = pyarrow.table({"features": rows, "label": labels})
        parquet.write_table(table, folder / f"{part}.parquet", row_group_size=4096)


def _read_parquet(folder: Path) -> int:
    from pyarrow import parquet

    n = 0
    for path in sorted(folder.glob("*.parquet")):
        file: Any = parquet.ParquetFile(path)
        for batch in file.iter_batches(columns=["features", "label"]):
            x = batch.column(0).flatten().to_numpy().reshape(-1, WIDTH)
            n += len(np.array(x, "f4"))
    return n


def _scaled(x: np.ndarray) -> np.ndarray:
    return np.multiply(x, 1 / 255, dtype="f4")


FORMATS: dict[str, tuple[str, Callable[[Path, int], None], str, Alone, int]] = {
    "HDF5": ("h5py", _write_hdf5, "*.h5", _read_hdf5, SHORT),
    "images": ("PIL", _write_images, "", _read_images, 1),
    "tar": ("PIL", _write_tar, "*.tar", _read_tar, 1),
    "Parquet": ("pyarrow", _write_parquet, "*.parquet::features,label", _read_parquet, SHORTEST),
}
