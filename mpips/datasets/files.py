"""Datasets of many files, named by patterns or lists.

``train-*.h5::x,y`` names the matching files, in the order of their names. ``a.h5,b-*.h5`` names the
files of each part, in the order of the parts. A format with two files a dataset has a pattern for
each: ``x-*.npy,y-*.npy``.
"""

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpips.errors import UserError, listed

SHOWN = 3
PAIRED = ("arrays.open_npy", "arrays.open_idx")  # readers of formats with two files a dataset


@dataclass(frozen=True)
class Files:
    """The files of a dataset of many files.

    Attributes:
        name: The pattern or list, as given.
        paths: The files, in the form that the reader takes: a pair is ``x.npy,y.npy``.
        arrays: The text after ``::``.
        reader: Name of the format's reader.
    """

    name: str
    paths: tuple[str, ...]
    arrays: str
    reader: str

    @property
    def title(self) -> str:
        """Name of the dataset in messages."""
        path = self.name.partition("::")[0]
        alone = "," not in path or len(self.paths) == 1
        return path if alone else f"{self.paths[0]} and {len(self.paths) - 1} more files"


def parts(path: str) -> list[str]:
    """Return the files of a path with commas; an existing file may have commas in its name."""
    if "," not in path:
        return [path]
    return [path] if os.path.exists(os.path.expanduser(path)) else path.split(",")


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern; an existing file may have wildcards in its name."""
    return glob.has_magic(path) and not os.path.exists(path)


def find_files(name: str, format_of: Callable[[str], str]) -> Files | None:
    """Return the files that `name` stands for; None if it is a single dataset.

    Args:
        name: Patterns and paths, separated by commas; optionally ``::`` and names of arrays.
        format_of: Returns the name of a file's reader.

    Raises:
        UserError: If a pattern matches no file, a file is named twice, or formats are mixed.
    """
    path, _, arrays = name.partition("::")
    items = [os.path.expanduser(item) for item in parts(path)]
    patterns = any(map(is_pattern, items))
    if not patterns and len(items) == 1:
        return None
    found = [matching(item) for item in items]
    in_pairs = len(items) > 1 and format_of(found[0][0]) in PAIRED
    if in_pairs and not patterns:
        return None
    paths = _pairs(items, found) if in_pairs else tuple(file for files in found for file in files)
    if len(set(paths)) < len(paths):
        twice = next(file for file in paths if paths.count(file) > 1)
        got = f"dataset {path!r} names {twice} twice"
        raise UserError(got, "each file once", "leave it out, or narrow the pattern")
    reader = format_of(paths[0])
    for file in paths[1:]:
        if format_of(file) != reader:
            got = f"dataset {path!r} names {file} beside {paths[0]}"
            raise UserError(got, "files of one format", "narrow the pattern")
    return Files(name, paths, arrays, reader)


def matching(item: str) -> list[str]:
    """Return the files that a pattern matches, in the order of their names; a path itself.

    Raises:
        UserError: If it matches no file.
    """
    if not is_pattern(item):
        return [item]
    paths = sorted(glob.glob(item, recursive=True))
    if paths:
        return paths
    folder = Path(item).parent
    if glob.has_magic(str(folder)) or not folder.is_dir():
        known = f"under {os.getcwd()}" if not folder.is_absolute() else "there"
        remedy = f"check the folder {folder}, or the pattern"
    else:
        known = f"in {folder.resolve()}"
        files = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
        remedy = f"it has {listed(files, SHOWN)}" if files else "the folder has no file"
    raise UserError(f"dataset pattern {item!r} matches no file {known}", "at least one", remedy)


def _pairs(items: Sequence[str], found: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return a pair for each file of inputs, with the file of targets at the same position.

    Raises:
        UserError: If there are not two patterns with the same number of files.
    """
    if len(items) != 2:
        got = f"dataset {','.join(items)!r} of {len(items)} parts"
        remedy = "write it as x-*.npy,y-*.npy"
        raise UserError(got, "a pattern for inputs and one for targets", remedy)
    for file in (*found[0], *found[1]):
        if "," in file:
            got = f"file {file} with a comma in its path"
            raise UserError(got, "none in those of pairs of files", "rename it")
    if len(found[0]) != len(found[1]):
        got = f"{items[0]!r} matches {len(found[0])} files and {items[1]!r} {len(found[1])}"
        raise UserError(got, "as many of each: they go together in the order of their names")
    return tuple(f"{x},{y}" for x, y in zip(*found, strict=True))
