"""Columns of categories as features of sparse samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Plan, final, summary
from test_columns import WRITERS, write_parquet
from test_datasets import opened, refused

from mpips.datasets import columns
from mpips.datasets.csr import IDS, ids_of, seen
from mpips.tables.saved_rows import find_rows

pa = pytest.importorskip("pyarrow")
N = 1000


def clicks(n: int = N) -> dict[str, Any]:
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


@pytest.mark.parametrize("kind", WRITERS)
def test_samples_have_an_id_a_column(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PIECE", 500)
    data = clicks()
    for part in range(2):
        half = {name: values[part * 500 : part * 500 + 500] for name, values in data.items()}
        WRITERS[kind](tmp_path / f"{part}.{kind}", half)
    name = f"{tmp_path}/*.{kind}::user,page,clicked"
    with opened(name, test_fraction=0, problem="logistic_sparse") as found:
        info = found.info
        assert (info.sparse, info.x_shape, info.classes, info.n_train) == (True, (IDS,), 2, N)
        x, y = found.train.load(450, 550, np.dtype("f4"))
        wanted = [ids_of(name, pa.array(list(data[name][450:550]))) for name in ("user", "page")]
        np.testing.assert_array_equal(x.indices.reshape(100, 2), np.stack(wanted, axis=1))
        assert x.values.dtype == np.float32
        assert (x.values == 1).all()
        assert np.diff(x.starts).tolist() == [2] * 100
        np.testing.assert_array_equal(y, data["clicked"][450:550])
    assert "array 'user' holds text" in refused(name, problem="softmax")


def test_lists_are_no_categories(tmp_path: Path) -> None:
    coded = pa.array(["a", "b"] * 50).dictionary_encode()
    data = {"tags": [[1, 2], [3]] * 50, "coded": coded, "y": [0, 1] * 50}
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(data), tmp_path / "a.parquet")
    told = refused(f"{tmp_path}/a.parquet::tags,y", problem="logistic_sparse")
    assert "column 'tags' of list<element: int64>, which is to be hashed, expected text" in told
    coded_alone = f"{tmp_path}/a.parquet::coded,y"
    with opened(coded_alone, test_fraction=0, problem="logistic_sparse") as found:
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
