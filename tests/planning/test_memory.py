"""A dataset larger than a worker's memory: its share of memory stays small."""

import time
from pathlib import Path

import h5py
import launch
import pytest

pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.one_mpi]

SAMPLES, FEATURES = 1_000_000, 1000  # 4 GB in single precision
LIMIT_MB = 400


def proportional_set_size_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_4_gb_file_is_read_in_little_memory(mode: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "large.h5", "w") as file:  # zeroes that take no space on the disk
        file.create_dataset("x", (SAMPLES, FEATURES), "f4")
        file.create_dataset("y", (SAMPLES,), "i4")
        assert file["x"].nbytes == 4_000_000_000
    options = ["--problem", "softmax", "--classes", "10", "--dataset", "large.h5", "--mode", mode]
    options += ["--out", "run", "--steps", "100000", "--eval-every", "0"]
    sizes: dict[int, list[float]] = {}
    with launch.Running(3, ["-m", "mpips.train", *options], tmp_path) as job:
        deadline = time.monotonic() + 60
        while "run in run" not in job.output():
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.1)
        for _ in range(20):
            for pid in job.ranks():
                sizes.setdefault(pid, []).append(proportional_set_size_mb(pid))
            time.sleep(0.25)
        assert job.process.poll() is None, job.output()
    assert len(sizes) == 3
    grown = {pid: max(seen) - seen[0] for pid, seen in sizes.items()}
    assert max(grown.values()) < LIMIT_MB, grown
