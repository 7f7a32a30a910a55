"""Indexes of checkpoints whose sums are right and whose content is hostile."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
from hostile import Case, Change, Outside, attack, external_link, outside, stored_outside, virtual
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


def given(name: str, value: Any) -> Change:
    """Return what gives a JSON value, or text."""
    return text(name, lambda *_: value)


def record(field: str, value: Any, at: int = 0) -> Change:
    """Return what changes a field of the record of a file; `value` may be made of `outside`."""

    def change(shards: Any, outside: Path) -> Any:
        shards[at][field] = value(outside) if callable(value) else value
        return shards

    return text("shards", change)


def array(name: str, data: Any, **how: Any) -> Change:
    def change(file: Any, _: Path) -> None:
        if name in file:
            del file[name]
        file.create_dataset(name, data=data, **how)

    return change


def attribute(name: str, value: Any) -> Change:
    return lambda file, _: file.attrs.__setitem__(name, value)


def sizes(*shape: Any) -> Change:
    return given("layout", [{"name": "w1", "shape": list(shape)}])


OTHER = "links to the file .*secret|has its data in the file .*secret"
DEEP = "[" * 100_000 + "]" * 100_000
UNREADABLE = "cannot read the index"
HUGE = {"data": None, "shape": (1 << 47,), "chunks": (8,), "dtype": "f8"}
CHANGES: list[tuple[str, Change, str]] = [
    ("as it should be", lambda file, outside: None, "^read$"),
    ("all texts in another file", external_link("meta", "/"), OTHER),
    ("the configuration in another file", external_link("meta/config", "x"), OTHER),
    ("arrays in another file", external_link("arrays", "/"), OTHER),
    ("an array more, in another file", external_link("arrays/more", "x"), "^read$"),
    ("an array stored outside", stored_outside("arrays/applied"), OTHER),
    ("a virtual array", virtual("arrays/applied"), OTHER),
    ("parameters elsewhere, which nobody reads", external_link("params/w1", "x"), "^read$"),
    ("a shard by a whole path", record("file", lambda o: str(o / "secret.h5")), "secret.h5"),
    ("a shard by a relative path", record("file", "../../outside/secret"), "secret"),
    ("a shard in a folder", record("file", "x/shard-0000.h5"), "shard-0000"),
    ("a shard that is the index", record("file", "shard-0000.h5\0"), "shard-0000"),
    ("a shard without a name", record("file", ""), UNREADABLE),
    ("a shard whose name is a number", record("file", 7), UNREADABLE),
    ("a range that is text", record("begin", "0"), UNREADABLE),
    ("a range that is a truth", record("begin", False), UNREADABLE),
    ("a range below 0", record("begin", -8), UNREADABLE),
    ("a range that overlaps", record("begin", 0, at=1), UNREADABLE),
    ("a range with a gap", record("end", 32), UNREADABLE),
    ("a range of exabytes", record("end", 1 << 62, at=2), UNREADABLE),
    ("a size that is not a number", record("bytes", float("nan")), UNREADABLE),
    ("a size that is a list", record("bytes", [1]), UNREADABLE),
    ("a sum that is a number", record("sha256", 7), "sha256"),
    ("a base that is text", record("base", "../.."), UNREADABLE),
    ("a base below 0", record("base", -1), UNREADABLE),
    ("a field more", record("run", "true"), UNREADABLE),
    ("files that are a number", given("shards", 7), UNREADABLE),
    ("no files", given("shards", []), UNREADABLE),
    ("lists without end", given("state", DEEP), UNREADABLE),
    ("a state that is no JSON", given("state", "__import__('os')"), UNREADABLE),
    ("a number of 10,000 digits", given("shards", "9" * 10_000), UNREADABLE),
    ("a state that is another", given("state", [1, "x"]), "^read$"),
    ("parameters of exabytes", sizes(1 << 62), UNREADABLE),
    ("a dimension below 0", sizes(-1, -7, 5), UNREADABLE),
    ("a dimension that is text", sizes("7", 5), UNREADABLE),
    ("a layout that is a list of numbers", given("layout", [1]), UNREADABLE),
    ("a type of objects", attribute("dtype", "O"), UNREADABLE),
    ("a type of records", attribute("dtype", "f4,O"), UNREADABLE),
    ("another type", attribute("dtype", "float64"), "float64"),
    ("a step that is text", attribute("step", "../7"), UNREADABLE),
    ("a step below 0", attribute("step", -3), "expected"),
    ("another step", attribute("step", 7), "expected"),
    ("slots of another name", given("slot_names", ["../x", "v"]), "expected"),
    ("slots that are numbers", given("slot_names", [7]), UNREADABLE),
    ("a configuration that is a number", array("meta/config", 7.0), UNREADABLE),
    ("texts that are a number", array("meta", 7.0), UNREADABLE),
    ("an array of petabytes", array("arrays/more", **HUGE), ""),
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
    cases: list[Case] = [(name, index(change), told) for name, change, told in CHANGES]
    attack(cases, tmp_path, outside, read)
