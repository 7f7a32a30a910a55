"""Indexes of checkpoints whose sums are right and whose content is hostile."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
from hostile import (
    Case,
    Change,
    Outside,
    attack,
    external_link,
    outside,
    stored_outside,
    virtual,
)
from test_checkpoint import LAYOUT, check, save

from mpips.checkpoint import open_checkpoint, verify
from mpips.checkpoint.files import INDEX
from mpips.checkpoint.index import seal
from mpips.errors import UserError

__all__ = ["outside"]


def index(change: Change) -> Callable[[Path, Path], str]:
    """Return what writes a checkpoint with a changed index, under a right sum."""

    def write(folder: Path, outside: Path) -> str:
        path = save(folder) / INDEX
        with h5py.File(path, "r+") as file:
            change(file, outside)
        with open(path, "r+b") as raw:
            raw.write(seal(path))
        return str(path.parent)

    return write


def text(name: str, change: Callable[[Any, Path], Any]) -> Change:
    """Return what changes a value that is JSON, or text where the new value is text."""

    def write(file: Any, outside: Path) -> None:
        place = f"meta/{name}"
        found = change(json.loads(file[place].asstr()[()]), outside)
        del file[place]
        file[place] = found if isinstance(found, str) else json.dumps(found)

    return write


def record(field: str, value: Any, at: int = 0) -> Change:
    """Return what changes a field of the record of a file; `value` may be made of `outside`."""

    def change(shards: Any, outside: Path) -> Any:
        shards[at][field] = value(outside) if callable(value) else value
        return shards

    return text("shards", change)


def array(name: str, value: Any, **how: Any) -> Change:
    def change(file: Any, _: Path) -> None:
        if name in file:
            del file[name]
        file.create_dataset(name, data=value, **how)

    return change


def attribute(name: str, value: Any) -> Change:
    def change(file: Any, _: Path) -> None:
        file.attrs[name] = value

    return change


def sizes(*shape: Any) -> Change:
    return text("layout", lambda layout, _: [{"name": "w1", "shape": list(shape)}])


OTHER = "links to the file .*secret|has its data in the file .*secret"
DEEP = "[" * 100_000 + "]" * 100_000
INDEXES: list[Case] = [
    ("as it should be", index(lambda file, outside: None), "^read$"),
    ("all texts in another file", index(external_link("meta", "/")), OTHER),
    ("the configuration in another file", index(external_link("meta/config", "x")), OTHER),
    ("files in another file", index(external_link("meta/shards", "x")), OTHER),
    ("arrays in another file", index(external_link("arrays", "/")), OTHER),
    ("an array more, in another file", index(external_link("arrays/more", "x")), "^read$"),
    ("an array stored outside", index(stored_outside("arrays/applied")), OTHER),
    ("a virtual array", index(virtual("arrays/applied")), OTHER),
    (
        "parameters elsewhere, which nobody reads",
        index(external_link("params/w1", "x")),
        "^read$",
    ),
    ("a shard by a whole path", index(record("file", lambda o: str(o / "secret.h5"))), "secret.h5"),
    ("a shard by a relative path", index(record("file", "../../outside/secret")), "secret"),
    ("a shard in a folder", index(record("file", "x/shard-0000.h5")), "shard-0000"),
    ("a shard that is the index", index(record("file", "shard-0000.h5\0")), "shard-0000"),
    ("a shard without a name", index(record("file", "")), "cannot read the index"),
    ("a shard whose name is a number", index(record("file", 7)), "cannot read the index"),
    ("a range that is text", index(record("begin", "0")), "cannot read the index"),
    ("a range that is a truth", index(record("begin", False)), "cannot read the index"),
    ("a range below 0", index(record("begin", -8)), "cannot read the index"),
    ("a range that overlaps", index(record("begin", 0, at=1)), "cannot read the index"),
    ("a range with a gap", index(record("end", 32)), "cannot read the index"),
    ("a range of exabytes", index(record("end", 1 << 62, at=2)), "cannot read the index"),
    ("a size that is not a number", index(record("bytes", float("nan"))), "cannot read the index"),
    ("a size that is a list", index(record("bytes", [1])), "cannot read the index"),
    ("a sum that is a number", index(record("sha256", 7)), "sha256"),
    ("a base that is text", index(record("base", "../..")), "cannot read the index"),
    ("a base below 0", index(record("base", -1)), "cannot read the index"),
    ("a field more", index(record("run", "true")), "cannot read the index"),
    ("files that are a number", index(text("shards", lambda *_: 7)), "cannot read the index"),
    ("no files", index(text("shards", lambda *_: [])), "cannot read the index"),
    ("lists without end", index(text("state", lambda *_: DEEP)), "cannot read the index"),
    ("a state that is no JSON", index(text("state", lambda *_: "__import__('os')")), "the index"),
    ("a number of 10,000 digits", index(text("shards", lambda *_: "9" * 10_000)), "the index"),
    ("a state that is another", index(text("state", lambda *_: [1, "x"])), "^read$"),
    ("parameters of exabytes", index(sizes(1 << 62)), "cannot read the index"),
    ("a dimension below 0", index(sizes(-1, -7, 5)), "cannot read the index"),
    ("a dimension that is text", index(sizes("7", 5)), "cannot read the index"),
    ("a layout that is a list of numbers", index(text("layout", lambda *_: [1])), "the index"),
    ("a type of objects", index(attribute("dtype", "O")), "cannot read the index"),
    ("a type of records", index(attribute("dtype", "f4,O")), "cannot read the index"),
    ("a type of text", index(attribute("dtype", "S8")), "cannot read the index"),
    ("another type", index(attribute("dtype", "float64")), "float64"),
    ("a step that is text", index(attribute("step", "../7")), "cannot read the index"),
    ("a step below 0", index(attribute("step", -3)), "expected"),
    ("another step", index(attribute("step", 7)), "expected"),
    ("slots of another name", index(text("slot_names", lambda *_: ["../x", "v"])), "expected"),
    ("slots that are numbers", index(text("slot_names", lambda *_: [7])), "cannot read the index"),
    ("a configuration that is a number", index(array("meta/config", 7.0)), "cannot read the index"),
    ("texts that are a number", index(array("meta", 7.0)), "cannot read the index"),
    (
        "an array of petabytes",
        index(array("arrays/more", None, shape=(1 << 47,), chunks=(8,), dtype="f8")),
        "",
    ),
]


def read(folder: str) -> str:
    """Return what one is told of a checkpoint; ``read`` if all of it can be read."""
    try:
        if problems := verify(folder):
            return problems[0]
        found = open_checkpoint(folder)
        check(found)
        assert found.layout == LAYOUT
    except UserError as error:
        return str(error)
    return "read"


def test_indexes(tmp_path: Path, outside: Outside) -> None:
    attack(INDEXES, tmp_path, outside, read)
