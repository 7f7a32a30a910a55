"""Parquet and CSV files: their columns as samples or features, and what is refused."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import Case, Outside, attack, outside
from runs import Plan, final, summary
from test_arrays import NOT_READ, files, npy
from test_datasets import X, Y, everything, fails, opened, refused, told, write_npz

from mpips.datasets import columns as readers
from mpips.datasets.csr import IDS, ids_of, seen
from mpips.errors import UserError
from mpips.tables.saved_rows import find_rows

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


def test_lines_of_more_than_a_megabyte(tmp_path: Path) -> None:
    names, row = ",".join(f"c{k}" for k in range(200_000)), ",".join(["0.125"] * 200_000)
    (tmp_path / "a.csv").write_text(f"{names},y\n{row},0\n{row},1\n")
    with opened(f"{tmp_path}/a.csv::c0,c199999,y", test_fraction=0) as found:
        x, y = everything(found.train)
    assert (x.tolist(), y.tolist()) == ([[0.125] * 2] * 2, [0, 1])


# Columns of categories, which are hashed


def clicks(n: int = 1000) -> dict[str, Any]:
    """Return clicks that a pair of columns tells, and neither of them."""
    rng = np.random.default_rng(0)
    user, page = rng.integers(8, size=n), rng.integers(6, size=n)
    named = np.array([f"user, {k}" for k in user])
    return {"user": named, "page": page, "clicked": (user + page) % 2}


def test_ids_are_of_column_and_text() -> None:
    ids = ids_of("a", pa.array(["x", "y", "x", None, ""]))
    assert ids[0] == ids[2] != ids[1]
    assert ids[3] == ids[4]
    assert (ids_of("b", pa.array(["x"])) != ids[:1]).all()
    assert (ids_of("a", pa.array(["y", "x"]).dictionary_encode()) == ids[[1, 0]]).all()
    assert (ids_of("a", pa.array([7, 8])) == ids_of("a", pa.array(["7", "8"]))).all()
    many = ids_of("a", pa.array([str(k) for k in range(10_000)]))
    assert 0 <= many.min() < many.max() < IDS
    assert len(np.unique(many)) > 9_900
    assert ids[0] == 816389, "a run that is resumed elsewhere has the same"


def test_values_that_share_an_id_are_counted() -> None:
    """Those that one process has met: an id is shared by two values, and not by one met twice."""
    seen.clear()
    values = [str(k) for k in range(20_000)]
    for part in (values[:12_000], values[11_000:], values):
        ids = ids_of("a", pa.array(part))
    bits = seen.bits
    assert bits is not None
    used, shared = np.unpackbits(bits, axis=1).astype(bool)
    count = np.bincount(ids, minlength=IDS)
    np.testing.assert_array_equal(used, count > 0)
    np.testing.assert_array_equal(shared, count > 1)
    assert 100 < shared.sum() < 300
    seen.clear()
    for pair, count in ((["x", "x"], 1), (["x", None], 2)):
        ids_of("a", pa.array(pair))
        assert seen.bits is not None
        assert np.unpackbits(seen.bits, axis=1).sum(axis=1).tolist() == [count, 0]


def test_samples_have_an_id_a_column(tmp_path: Path, kind: str) -> None:
    data = clicks()
    for part in range(2):
        half = {name: values[part * 500 : part * 500 + 500] for name, values in data.items()}
        WRITERS[kind](tmp_path / f"{part}.{kind}", half)
    name = f"{tmp_path}/*.{kind}::user,page,clicked"
    with opened(name, test_fraction=0, problem="logistic_sparse", scale=0.5) as found:
        info = found.info
        assert (info.sparse, info.x_shape, info.classes, info.n_train) == (True, (IDS,), 2, 1000)
        x, y = found.train.load(450, 550, np.dtype("f4"))
        wanted = [ids_of(name, pa.array(list(data[name][450:550]))) for name in ("user", "page")]
        np.testing.assert_array_equal(x.indices.reshape(100, 2), np.stack(wanted, axis=1))
        assert (x.values.dtype, set(x.values)) == (np.float32, {0.5})
        assert np.diff(x.starts).tolist() == [2] * 100
        np.testing.assert_array_equal(y, data["clicked"][450:550])
    assert "array 'user' holds text" in refused(name, problem="softmax")
    dense = str(write_npz(tmp_path / "dense.npz", np.ones((4, 2)), np.arange(4) % 2))
    text = refused(name, problem="logistic_sparse", test_dataset=dense)
    assert f"{dense} beside {tmp_path}/*.{kind}, expected both sparse, or none" in text


def test_lists_are_no_categories(tmp_path: Path) -> None:
    coded = pa.array(["a", "b"] * 50).dictionary_encode()
    data = {"tags": [[1, 2], [3]] * 50, "coded": coded, "y": [0, 1] * 50}
    write_parquet(tmp_path / "a.parquet", data)
    text = refused(f"{tmp_path}/a.parquet::tags,y", problem="logistic_sparse")
    assert "column 'tags' of list<element: int64>, which is to be hashed, expected text" in text
    name = f"{tmp_path}/a.parquet::coded,y"
    with opened(name, test_fraction=0, problem="logistic_sparse") as found:
        x, _ = found.train.load(0, 4, np.dtype("f4"))
        assert x.indices.tolist() == ids_of("coded", pa.array(["a", "b", "a", "b"])).tolist()


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_pair_of_columns_is_learnt(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    write_parquet(tmp_path / "clicks.parquet", clicks(2000))
    options = ["--problem", "factorization_machine", "--optimizer", "adagrad", "--lr", "0.1"]
    options += ["--dataset", "clicks.parquet::user,page,clicked", "--factors", "4"]
    plan.add("run", 3, [*options, "--epochs", "10"])
    plan.add("run", 2, ["--resume", "--epochs", "15"])
    plan.run(120, tmp_path)
    found = summary(plan.out("run"))
    assert found["accuracy"] > 0.95
    assert found["hashed"] == {"ids": 14, "shared": 0}
    assert len(final(plan.out("run")).columns("features")["rows"].whole()) == 14
    rows = find_rows(final(plan.out("run")), "features", ids_of("user", pa.array(["user, 3"])))
    assert rows.shape == (1, 5)


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
    ("spaces behind commas", csv(TABLE.replace("a,b,y", 'a, "b", y', 1)), "^read$"),
    ("a mark of its encoding", csv("\ufeff" + TABLE), "^read$"),
    ("lines of Windows", csv(TABLE.replace("\n", "\r\n")), "^read$"),
    ("truths", csv(truths("false", "true")), r"^read \(8, 2\): \[0. .*0 1 0 1"),
    ("truths that are hashed", csv(truths("no", "yes"), names="::a,y"), "holds text"),
    ("a number among truths", csv(truths("false", "true") + "2,2,true\n"), "holds text"),
    ("a missing truth", csv(truths("false", "true") + ",1,true\n"), "has no value"),
    ("two columns of a name", csv("a,a,y\n1,2,0\n3,4,1\n", "::a,y"), "two columns"),
    ("no names asked for, of none", csv("\n1,2,0\n", ""), "without names"),
    ("a zero byte", csv(TABLE + "1\0,2,0\n"), "expected"),
    ("a line within quotes", csv(TABLE + '"1\n2",2,0\n'), "expected"),
    ("a quote without end", csv(TABLE + '"1,2,0\n'), "expected"),
    ("a target that is negative", csv(TABLE + "1,2,-9\n"), "label"),
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
    ("empty lists", table("::a,y", a=[[1.0][:0]] * 8), "expected"),
    ("names that are paths", table("::/etc/passwd,y"), "is missing"),
]


@pytest.mark.parametrize("cases", [CSVS, PARQUETS], ids=["CSV", "Parquet"])
def test_hostile_files(cases: list[Case], tmp_path: Path, outside: Outside) -> None:
    attack(cases, tmp_path, outside, told)
