"""Offsets of samples in their files, kept beside the index.

Files of some formats have to be gone through before a sample can be found in them. As files are
counted, each worker writes what it has found to a file of its own in the run's folder; who opens a
data file reads its part of that.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpips.datasets.index import Entry


def save(index: Path, option: str, *, worker: int, entries: Sequence[Entry]) -> list[Entry]:
    """Write what was found in a worker's files; returns the entries without it.

    Raises:
        OSError: If it cannot be written.
    """
    found, begin = [], 0
    if all(entry.held is None or entry.held.places is None for entry in entries):
        return list(entries)
    with open(_path(index, option, worker), "wb") as file:
        for entry in entries:
            assert entry.held is not None, "files of one format"
            places = entry.held.places
            assert places is not None, "files of one format"
            file.write(places.tobytes())
            held = replace(entry.held, places=None)
            found.append(replace(entry, held=held, place=(worker, begin, places.size)))
            begin += places.size
    return found


def load(index: Path, option: str, entry: Entry) -> np.ndarray | None:
    """Return what `save` has written of a file, shape (size,), int64; None if it is gone."""
    if entry.place is None:
        return None
    worker, begin, size = entry.place
    try:
        path = _path(index, option, worker)
        if 8 * (begin + size) > os.path.getsize(path):
            return None
        return np.fromfile(path, np.int64, size, offset=8 * begin)
    except OSError:
        return None


def _path(index: Path, option: str, worker: int) -> Path:
    return index.with_name(f"{option}.places.{worker}")
