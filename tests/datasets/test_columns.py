"""Parquet and CSV files: their columns as samples, and what is refused."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import Case, Outside, attack, outside
from test_arrays import NOT_READ, files, npy
from test_datasets import X, Y, everything, opened, refused, told

from mpips.datasets import columns as readers
from mpips.errors import UserError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

__all__ = ["outside"]

SIZES = (7, 1, 30, 12)
N = sum(SIZES)


def columns() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=N),
        "b": np.arange(N, dtype="i4"),
        "name": np.array([f"row, {k}" for k in range(N)]),
        "label": np.arange(N) % 3,
        "price": np.arange(N) / 4,
    }


def write_parquet(path: Path, data: dict[str, Any], rows: int = 4) -> None:
    parquet.write_table(pa.table(data), path, row_group_size=rows)


def write_csv(path: Path, data: dict[str, Any]) -> None:
    """Write text in quotes, and nothing for None."""
    kinds = {str: '"{}"', type(None): ""}
    rows = zip(*(np.asarray(v).tolist() for v in data.values()), strict=True)
    lines = [[kinds.get(type(v), "{!r}").format(v) for v in row] for row in rows]
    path.write_text("\n".join(map(",".join, [list(data), *lines])) + "\n")


WRITERS = {"parquet": write_parquet, "csv": write_csv}


def write_many(folder: Path, kind: str, spoiled: tuple[str, Any] | None = None) -> str:
    """Write files 0 to 3; `spoiled` is a column and what its sample 7 in the file 2 is."""
    for k, (begin, end) in enumerate(itertools.pairwise(np.cumsum((0, *SIZES)))):
        part = {name: values[begin:end] for name, values in columns().items()}
        if spoiled and k == 2:
            part = {name: values.tolist() for name, values in part.items()}
            part[spoiled[0]][7] = spoiled[1]
        WRITERS[kind](folder / f"{k}.{kind}", part)
    return f"{folder}/*.{kind}"


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(readers, "PIECE", 64)  # so that a file has many
    return str(request.param)


def fails(name: str, words: str) -> None:
    """Assert that data can be opened, and that `words` are said as it is read."""
    with opened(name, test_fraction=0) as found, pytest.raises(UserError, match=words):
        everything(found.train)


def test_columns_are_inputs_and_targets(tmp_path: Path, kind: str) -> None:
    name, data = write_many(tmp_path, kind), columns()
    with opened(f"{name}::a,b,label", test_fraction=0) as found:
        assert (found.info.x_shape, found.info.classes, found.info.n_train) == ((2,), 3, N)
        x, y = everything(found.train, "float64")
        np.testing.assert_array_equal(x, np.stack([data["a"], data["b"]], axis=1))
        np.testing.assert_array_equal(y, data["label"])
        assert found.train.table.where(10) == (f"{tmp_path}/2.{kind}", 2)
        for begin in range(0, N, 3):
            for end in range(begin + 1, N + 1, 5):
                np.testing.assert_array_equal(found.train.table.read(begin, end)[0], x[begin:end])
                np.testing.assert_array_equal(found.train.table.read_y(begin, end), y[begin:end])
    with opened(f"{tmp_path}/2.{kind}::b,price", test_fraction=0.2) as found:
        assert (found.info.x_shape, found.info.classes, found.info.n_train) == ((1,), None, 24)


def test_lists_of_one_length_are_inputs(tmp_path: Path) -> None:
    x, name = np.arange(60, dtype="f4").reshape(20, 3), f"{tmp_path}/a.parquet::features,label"
    short = [*x[:9].tolist(), [1.0, 2.0], *x[10:].tolist()]
    for kind, rows in ((pa.list_(pa.float32(), 3), x), (pa.list_(pa.float32()), x), (None, short)):
        data = {"features": pa.array(list(rows), kind), "label": np.arange(20) % 2}
        write_parquet(tmp_path / "a.parquet", data)
        if kind is None:
            fails(name, "column 'features', sample 9 has 2 values, expected 3, as the first")
            continue
        with opened(name, test_fraction=0) as found:
            assert found.info.x_shape == (3,)
            np.testing.assert_array_equal(everything(found.train)[0], x)


def test_a_block_is_as_large_as_a_row_group(tmp_path: Path) -> None:
    data = {f"c{k}": np.zeros(30_000, "f4") for k in range(101)}
    write_parquet(tmp_path / "a.parquet", data, 25_000)
    with opened(f"{tmp_path}/a.parquet::{','.join(data)}", test_fraction=0) as found:
        assert found.train.block(32) == 24_992


def test_names_and_types_that_are_refused(tmp_path: Path, kind: str) -> None:
    name, first = write_many(tmp_path, kind), f"{tmp_path}/0.{kind}"
    text = f"{first}: array 'name' holds text, expected real numbers or integers"
    for names, words in (
        ("", f"{first} without names of columns, expected inputs and a target among a, b, na"),
        ("::a,lable", f"{first}: column 'lable' is missing, expected one of a, b"),
        ("::a,lable", "did you mean 'label'?"),
        ("::a,a,label", f"{first}: column 'a' is named twice"),
        ("::a,name", text),
        ("::name,label", text),
    ):
        assert words in refused(f"{name}{names}")
    where = f"{tmp_path}/2.{kind}"
    bad = refused(f"{write_many(tmp_path, kind, ('label', None))}::a,b,label", test_fraction=0)
    assert f"{where}: column 'label', sample 7 has no value, expected a number" in bad
    for value, words in ((None, "'a', sample 7 has no value"), (np.nan, "sample 7.* is nan")):
        fails(f"{write_many(tmp_path, kind, ('a', value))}::a,b,label", rf"{where}: .*{words}")


def test_damage_to_parquet_files(tmp_path: Path) -> None:
    name, path = write_many(tmp_path, "parquet"), tmp_path / "2.parquet"
    whole = path.read_bytes()
    for content in (whole[:-20], b"no parquet file at all", b""):
        path.write_bytes(content)
        assert str(path) in refused(f"{name}::a,b,label")
    about = parquet.ParquetFile(tmp_path / "3.parquet").metadata.row_group(0).column(0)
    at, size = about.data_page_offset, about.total_compressed_size
    with (tmp_path / "3.parquet").open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * size)
    path.write_bytes(whole)
    words = r"3.parquet, samples \d+ to \d+ cannot be read \(.*\), expected a whole Parquet file"
    fails(f"{name}::a,b,label", words)


def test_damage_to_csv_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE", 64)
    name, path = f"{write_many(tmp_path, 'csv')}::a,b,label", tmp_path / "2.csv"
    whole = path.read_bytes()
    for before, after, words in (
        (b"\n", b"\n\n", r"expected \d+, a line each; take out empty and quoted lines"),
        (b"2.25", b"2,25", "cannot be read .*Expected 5 columns, got 6"),
        (b",2,8.75", b",two,8.75", "cannot be read .*invalid value 'two'"),
        (whole, b"a,b,name,label,price\n", "has one line alone"),
        (whole, b"\x1f\x8b\x08\x00" * 9, "it is compressed"),
    ):
        path.write_bytes(whole.replace(before, after))
        with pytest.raises(UserError, match=rf"{path}.*{words}"):
            opened(name)
    path.write_bytes(whole)
    with opened(name, test_fraction=0) as found:
        os.truncate(path, 300)
        with pytest.raises(UserError, match=r"2\.csv, samples \d+ to \d+ cannot be read \(it ends"):
            everything(found.train)


# Hostile ones

TABLE = "a,b,y\n" + "".join(f"{a},{b},{y}\n" for (a, b), y in zip(X.tolist(), Y, strict=True))


def csv(content: str | bytes, names: str = "::a,b,y", file: str = "a.csv", found: str = "") -> Any:
    data = content if isinstance(content, bytes) else content.encode()
    return files(f"{{}}/{found or file}{names}", {file: data})


def truths(*words: str) -> str:
    """Return the good table, with whether `a` is above 0.5 in its place, and `y` as words too."""
    rows = zip(X.tolist(), Y.tolist(), strict=True)
    return "a,b,y\n" + "".join(f"{words[a > 0.5]},{b},{words[y]}\n" for (a, b), y in rows)


def pairs(x: str, y: str) -> Any:
    return files("{}/x*.npy,{}/y*.npy", {x: npy(X), y: npy(Y)})


CSVS: list[Case] = [
    ("as it should be", csv(TABLE), "^read$"),
    ("quoted names", csv(TABLE.replace("a,b,y", '"a","b","y"', 1)), "^read$"),
    ("a comma in a name", csv(TABLE.replace("a,b,", '"a, 1",b,', 1), '::"a, 1",b,y'), "^read$"),
    ("a quote without end in the names", csv(TABLE.replace("a,b", '"a,b', 1)), "missing|cannot"),
    ("spaces behind commas", csv(TABLE.replace("a,b,y", 'a, "b", y', 1)), "^read$"),
    ("a mark of its encoding", csv("\ufeff" + TABLE), "^read$"),
    ("lines of Windows", csv(TABLE.replace("\n", "\r\n")), "^read$"),
    ("truths", csv(truths("false", "true")), r"^read \(8, 2\): \[0. .*0 1 0 1"),
    ("truths in capitals", csv(truths("False", "True"), "::b,a,y"), r"^read \(8, 2\)"),
    ("truths that are hashed", csv(truths("no", "yes"), names="::a,y"), "holds text"),
    ("a number among truths", csv(truths("false", "true") + "2,2,true\n"), "holds text"),
    ("a missing truth", csv(truths("false", "true") + ",1,true\n"), "has no value"),
    ("two columns of a name", csv("a,a,y\n1,2,0\n3,4,1\n", "::a,y"), "two columns"),
    ("no names asked for, of none", csv("\n1,2,0\n", ""), "without names"),
    ("zeros", csv(bytes(100)), "expected"),
    ("UTF-16", csv(TABLE.encode("utf-16")), "expected"),
    ("a zero byte", csv(TABLE + "1\0,2,0\n"), "expected"),
    ("a line within quotes", csv(TABLE + '"1\n2",2,0\n'), "expected"),
    ("a quote without end", csv(TABLE + '"1,2,0\n'), "expected"),
    ("a huge number", csv(TABLE + "1e999,2,0\n"), "finite"),
    ("a target of exabytes", csv(TABLE + "1,2,99999999999999999999\n"), "expected|^read"),
    ("a target that is negative", csv(TABLE + "1,2,-9\n"), "label"),
    ("a name of a megabyte", csv("a" * (1 << 20) + ",b,y\n1,2,0\n"), "expected"),
    *((f"a file {n!r}", csv(TABLE, file=n), "^read$") for n in ("a,1.csv", "a[1].csv")),
    *((f"{n!r} is found", csv(TABLE, file=n, found="*.csv"), "^read$")
      for n in ("a,1.csv", "-o,--out.csv", "a::b.csv", "a\nb.csv")),
    ("pairs", pairs("x1.npy", "y1.npy"), "^read$"),
    ("a comma in a name of pairs", pairs("x,1.npy", "y,1.npy"), "comma"),
]  # fmt: skip


def table(names: str = "::a,b,y", damage: bool = False, **changes: Any) -> Any:
    """Return what writes a good Parquet file, but for columns that are changed."""

    def write(folder: Path, _: Path) -> str:
        path = folder / "data.parquet"
        write_parquet(path, {"a": X[:, 0], "b": X[:, 1], "y": Y, **changes})
        if damage:  # an end that is said to be of 256 MB
            path.write_bytes(path.read_bytes()[:-8] + b"\xff\xff\xff\x0fPAR1")
        return f"{path}{names}"

    return write


PARQUETS: list[Case] = [
    ("as it should be", table(), "^read$"),
    ("an end of 256 MB", table(damage=True), NOT_READ),
    ("truths", table(y=Y.astype(bool)), "^read$"),
    ("times", table(a=pa.array(Y, pa.timestamp("s"))), "holds values of type timestamp"),
    ("categories", table(a=pa.array(["u", "v"] * 4).dictionary_encode()), "holds categories"),
    ("lists beside columns", table(a=[[1.0]] * 8), "lists"),
    ("lists of lists", table("::a,y", a=[[[1.0]]] * 8), "holds"),
    ("empty lists", table("::a,y", a=[[1.0][:0]] * 8), "expected"),
    ("names that are paths", table("::/etc/passwd,y"), "is missing"),
    ("text by name", files("{}/a.parquet::a,y", {"a.parquet": b"PAR1 PAR1"}), NOT_READ),
]


@pytest.mark.parametrize("cases", [CSVS, PARQUETS], ids=["CSV", "Parquet"])
def test_hostile_files(cases: list[Case], tmp_path: Path, outside: Outside) -> None:
    attack(cases, tmp_path, outside, told)
