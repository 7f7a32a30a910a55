"""Parquet and CSV files: their columns as samples, and what is refused."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_datasets import everything, opened, refused

from mpips.datasets import columns as readers
from mpips.errors import UserError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

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
    lines = [[f'"{v}"' if isinstance(v, str) else repr(v) for v in row] for row in rows(data)]
    path.write_text("\n".join(map(",".join, [list(data), *lines])) + "\n")


def rows(data: dict[str, Any]) -> Any:
    return zip(*(np.asarray(v).tolist() for v in data.values()), strict=True)


WRITERS = {"parquet": write_parquet, "csv": write_csv}


def write_many(folder: Path, kind: str) -> str:
    edges = np.cumsum((0, *SIZES))
    for k, (begin, end) in enumerate(itertools.pairwise(edges)):
        part = {name: values[begin:end] for name, values in columns().items()}
        WRITERS[kind](folder / f"{k}.{kind}", part)
    return f"{folder}/*.{kind}"


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(readers, "PIECE", 64)  # so that a file has many
    return str(request.param)


def fails(name: str, told: str) -> None:
    """Assert that data can be opened, and that `told` is said as it is read."""
    with opened(name, test_fraction=0) as found, pytest.raises(UserError, match=told):
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
    x = np.arange(60, dtype="f4").reshape(20, 3)
    label = np.arange(20) % 2
    for fixed in (True, False):
        kind = pa.list_(pa.float32(), 3) if fixed else pa.list_(pa.float32())
        data = {"features": pa.array(x.tolist(), kind), "label": label}
        write_parquet(tmp_path / "a.parquet", data)
        with opened(f"{tmp_path}/a.parquet::features,label", test_fraction=0) as found:
            assert found.info.x_shape == (3,)
            np.testing.assert_array_equal(everything(found.train)[0], x)
    rows = x.tolist()
    rows[9] = rows[9][:2]
    data = {"features": pa.array(rows, pa.list_(pa.float32())), "label": label}
    write_parquet(tmp_path / "a.parquet", data)
    told = "column 'features', sample 9 has 2 values, expected 3, as the first"
    fails(f"{tmp_path}/a.parquet::features,label", told)


def test_a_block_is_as_large_as_a_row_group(tmp_path: Path) -> None:
    n, width = 30_000, 100
    data = {f"c{k}": np.zeros(n, "f4") for k in range(width)} | {"y": np.zeros(n)}
    write_parquet(tmp_path / "a.parquet", data, 25_000)
    names = ",".join(data)
    with opened(f"{tmp_path}/a.parquet::{names}", test_fraction=0) as found:
        assert found.train.block(32) == 24_992


def test_names_of_columns(tmp_path: Path, kind: str) -> None:
    name = write_many(tmp_path, kind)
    shown = f"{tmp_path}/0.{kind}"
    told = f"{shown} without names of columns, expected inputs and a target among a, b, name, label"
    assert told in refused(name)
    assert f"{shown}: column 'lable' is missing, expected one of a, b" in refused(
        f"{name}::a,lable"
    )
    assert "did you mean 'label'?" in refused(f"{name}::a,lable")
    assert f"{shown}: column 'a' is named twice" in refused(f"{name}::a,a,label")


def spoiled(folder: Path, kind: str, **changes: Any) -> str:
    """Change row 7 of the file ``2``; returns what names all."""
    name = write_many(folder, kind)
    part = {k: v[8:38].tolist() for k, v in columns().items()}
    for key, value in changes.items():
        part[key][7] = value
    if kind == "parquet":
        write_parquet(folder / "2.parquet", part)
        return name
    lines = [list(part), *([repr(v) for v in row] for row in zip(*part.values(), strict=True))]
    text = "\n".join(map(",".join, lines))
    (folder / "2.csv").write_text(text.replace("None", "").replace("'", '"') + "\n")
    return name


def test_numbers_that_are_missing_or_not_finite(tmp_path: Path, kind: str) -> None:
    where = f"{tmp_path}/2.{kind}"
    text = refused(f"{spoiled(tmp_path, kind, label=None)}::a,b,label", test_fraction=0)
    assert f"{where}: column 'label', sample 7 has no value, expected a number" in text
    for value, told in ((None, "column 'a', sample 7 has no value"), (np.nan, "sample 7.* is nan")):
        fails(f"{spoiled(tmp_path, kind, a=value)}::a,b,label", rf"{where}: .*{told}")


def test_text_and_categories_are_refused(tmp_path: Path, kind: str) -> None:
    name = write_many(tmp_path, kind)
    told = f"{tmp_path}/0.{kind}: array 'name' holds text, expected real numbers or integers"
    assert told in refused(f"{name}::a,name")
    assert told in refused(f"{name}::name,label")
    data = columns()
    data["name"] = pa.array(data["name"].tolist()).dictionary_encode()
    data["day"] = np.zeros(N, "M8[s]")
    write_parquet(tmp_path / "0.parquet", data)
    assert "array 'name' holds categories" in refused(f"{tmp_path}/0.parquet::name,label")
    assert "array 'day' holds values of type timestamp" in refused(
        f"{tmp_path}/0.parquet::day,label"
    )


def test_damage_to_parquet_files(tmp_path: Path) -> None:
    name = write_many(tmp_path, "parquet")
    path = tmp_path / "2.parquet"
    whole = path.read_bytes()
    for content in (whole[:-20], b"no parquet file at all", b""):
        path.write_bytes(content)
        assert str(path) in refused(f"{name}::a,b,label")
    about = parquet.ParquetFile(tmp_path / "3.parquet").metadata.row_group(0).column(0)
    path = tmp_path / "3.parquet"
    data = bytearray(path.read_bytes())
    at = about.data_page_offset
    data[at : at + about.total_compressed_size] = b"\xff" * about.total_compressed_size
    path.write_bytes(bytes(data))
    (tmp_path / "2.parquet").write_bytes(whole)
    told = rf"{path}, samples \d+ to \d+ cannot be read \(.*\), expected a whole Parquet file"
    fails(f"{name}::a,b,label", told)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ((b"\n", b"\n\n"), r"expected \d+, a line each; take out empty and quoted lines"),
        ((b"2.25", b"2,25"), "cannot be read .*Expected 5 columns, got 6"),
        ((b",2,8.75", b",two,8.75"), "cannot be read .*invalid value 'two'"),
    ],
)
def test_damage_to_csv_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: tuple[bytes, bytes], told: str
) -> None:
    monkeypatch.setattr(readers, "PIECE", 64)
    name = write_many(tmp_path, "csv")
    path = tmp_path / "2.csv"
    path.write_bytes(path.read_bytes().replace(*spoil))
    with pytest.raises(UserError, match=rf"{path}.*{told}"):
        opened(f"{name}::a,b,label")
    path.write_bytes(b"a,b,name,label,price\n")
    assert f"{path} has one line alone" in refused(f"{name}::a,b,label")
    path.write_bytes(b"\x1f\x8b\x08\x00" * 9)
    assert "it is compressed" in refused(f"{name}::a,b,label")


def test_a_csv_file_that_shrinks_while_the_job_runs(tmp_path: Path) -> None:
    name = write_many(tmp_path, "csv")
    with opened(f"{name}::a,b,label", test_fraction=0) as found:
        os.truncate(tmp_path / "2.csv", 300)
        with pytest.raises(UserError, match=r"2\.csv, samples \d+ to \d+ cannot be read \(it ends"):
            everything(found.train)
