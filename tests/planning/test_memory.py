"""A dataset larger than a worker's memory: its share of memory stays small."""

from pathlib import Path

import h5py
import launch
import pytest
from runs import summary

SAMPLES, FEATURES = 1_000_000, 1000  # 4 GB in single precision


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_4_gb_file_is_read_in_little_memory(mode: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "large.h5", "w") as file:  # zeroes that take no space on the disk
        file.create_dataset("x", (SAMPLES, FEATURES), "f4")
        file.create_dataset("y", (SAMPLES,), "i4")
    options = f"--problem softmax --classes 10 --dataset large.h5 --mode {mode} --batch-size 500"
    options += " --steps 800 --eval-every 0 --out run"  # 3.2 GB, of two workers
    launch.train(3, *options.split(), cwd=tmp_path).check()
    assert max(summary(tmp_path / "run")["peak_memory_mb"]) < 700
