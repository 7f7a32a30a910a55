"""Checkpoints as owners write and commit them, with as little as a test wants."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpips.checkpoint import Contents, ShardRecord, commit, write_shard
from mpips.layout import Layout, cut


def vector(size: int, step: int, dtype: str = "float32") -> np.ndarray:
    """Return numbers of a step; step 3 has NaNs of both signs, one that signals, 1e-45, 0, -0."""
    found = np.random.default_rng(step).standard_normal(size).astype(dtype)
    if step // 10 == 3:
        words = found.view(f"u{found.itemsize}")
        top, signals = 2 ** (8 * found.itemsize) - 1, np.array(np.inf, dtype).view(words.dtype)
        bits = [top, top >> 1, int(signals) + 0x1234, 1, 0, (top >> 1) + 1]
        words[:6] = np.array(bits, words.dtype)[:size]
    return found


def written(folder: Path, step: int, params: np.ndarray, owners: int = 2) -> list[ShardRecord]:
    """Write parameters of some owners without slots; returns the records of the files."""
    shards = enumerate(cut(params.size, owners, params.itemsize))
    return [write_shard(folder, k, s, step, params[s.range], {}) for k, s in shards]


def committed(
    folder: Path, step: int, layout: Layout, shards: Sequence[ShardRecord] | None = None,
    keep: int = 2, protected: tuple[int, ...] = (), **more: Any,
) -> Path:  # fmt: skip
    """Commit shards, or those of small numbers, and what else is given; returns the folder."""
    if shards is None:
        shards = written(folder, step, np.arange(layout.size, dtype="f4"))
    about = {"dtype": np.dtype("f4"), "slot_names": (), "config": "", "state": {}} | more
    contents = Contents(step=step, layout=layout, shards=tuple(shards), **about)
    commit(folder, contents, keep, protected)
    return folder
