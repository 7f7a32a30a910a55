"""libsvm text: dense samples in memory, and equal sparse ones in memory that does not grow."""

import gzip
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import Case, Outside, attack, outside
from launch import ROOT
from test_arrays import FLOOD, NOT_READ, files
from test_datasets import X, Y, opened, refused, told
from test_datasets import everything as dense

from mpips.datasets import Dataset, base, iterate, libsvm
from mpips.datasets.csr import Csr, join
from mpips.datasets.loader import Loader
from mpips.datasets.order import Order
from mpips.errors import UserError

__all__ = ["outside"]

SAMPLE = ROOT / "jobs" / "digits-300.svm"
ODD = "# a comment\n+1 3:0.5  7:-2e-1\r\n\n-1 qid:4 1:.25 # 9:9\n1\n-1\t2:1 9:3.5E0\n"


def write_svm(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def is_sparse(data: Dataset, n: int, width: int) -> bool:
    info = data.info
    return info.sparse and (info.n_train, info.x_shape) == (n, (width,))


def everything(data: Dataset, dtype: str = "float64") -> tuple[Csr, np.ndarray]:
    batches = list(iterate(data.train, 0, data.train.n, 7, dtype))
    return join([batch.x for batch in batches]), np.concatenate([batch.y for batch in batches])


def test_lines(tmp_path: Path) -> None:
    text = "# a comment\n0 1:0.5 3:-2e1\n\n2 qid:7 2:1 # more\n  \n1\n0 4:4 \r\n"
    x, y = dense(opened(write_svm(tmp_path / "a.svm", text), test_fraction=0).train)
    assert x.tolist() == [[0.5, 0, -20, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 4]]
    assert y.tolist() == [0, 2, 1, 0]


LABELS: dict[str, tuple[list[float], int | None]] = {  # what they are, and how many classes
    "-1 +1 1": ([0, 1, 1], 2),
    "1 2 1": ([1, 2, 1], 3),
    "2 4": ([2, 4], 5),
    "1 2.5 3": ([1, 2.5, 3], None),
    "1.0 2.0": ([1, 2], None),
    "1e0 -3": ([1, -3], None),
}


@pytest.mark.parametrize("labels", LABELS)
def test_labels(tmp_path: Path, labels: str) -> None:
    path = write_svm(tmp_path / "a.svm", "".join(f"{label} 1:1\n" for label in labels.split()))
    data = opened(path, test_fraction=0)
    assert (dense(data.train)[1].tolist(), data.info.classes) == LABELS[labels]


def test_libsvm_widths_of_two_files_are_made_equal(tmp_path: Path) -> None:
    a = write_svm(tmp_path / "a.svm", "0 1:1\n1 2:1\n")
    b = write_svm(tmp_path / "b.svm", "0 5:1\n")
    zero = write_svm(tmp_path / "zero.svm", "0 0:1 3:1\n")
    for train, test, width in ((a, b, 5), (b, a, 5), (a, zero, 4), (zero, a, 4)):
        data = opened(train, test_dataset=str(test))
        assert data.info.x_shape == (width,)
        assert [dense(part)[0].shape[1] for part in (data.train, data.test)] == [width] * 2
    # Counted from 0 because the other file is: "1:1" is the second column.
    assert dense(opened(a, test_dataset=str(zero)).train)[0][0].tolist() == [0, 1, 0, 0]
    for one, other in ((str(a), f"{a}::sparse"), (f"{a}::sparse", str(a))):
        assert "expected both sparse, or none" in refused(one, test_dataset=other)


@pytest.mark.parametrize("piece", [64, 1 << 20])
def test_batches_are_those_of_the_dense_reader(
    piece: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(libsvm, "PIECE", piece)
    for path, n in ((SAMPLE, 300), (write_svm(tmp_path / "odd.svm", ODD), 4)):
        dense = opened(path, test_fraction=0, scale=0.5)
        data = opened(f"{path}::sparse", test_fraction=0, scale=0.5)
        assert is_sparse(data, n, dense.info.x_shape[0])
        assert opened(path, problem="factorization_machine").info.sparse
        assert not opened(path, problem="softmax").info.sparse
        assert data.info.classes == dense.info.classes
        x, y = everything(data)
        assert x.values.dtype == np.float64
        wanted = dense.train.load(0, n, np.dtype("f8"))
        np.testing.assert_array_equal(x.dense(), wanted[0])
        np.testing.assert_array_equal(y, wanted[1])


def test_many_files_stand_one_behind_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the highest index of any, and counted from 0 if one of them is."""
    monkeypatch.setattr(libsvm, "PIECE", 8)
    for k, text in enumerate(("1 1:1 2:2\n0 5:3\n", "# none yet\n1 0:7\n", "0 9:1\n1 2:4")):
        write_svm(tmp_path / f"{k}.svm", text)
    data = opened(f"{tmp_path}/*.svm::sparse", test_fraction=0)
    assert is_sparse(data, 5, 10)
    x, y = everything(data)
    rows = [{1: 1, 2: 2}, {5: 3}, {0: 7}, {9: 1}, {2: 4}]
    np.testing.assert_array_equal(x.dense(), [[row.get(k, 0) for k in range(10)] for row in rows])
    assert y.tolist() == [1, 0, 1, 0, 1]
    places = [(f"{tmp_path}/0.svm", 1), (f"{tmp_path}/1.svm", 0), (f"{tmp_path}/2.svm", 1)]
    assert [data.train.table.where(row) for row in (1, 2, 4)] == places
    train, test = f"{tmp_path}/0.svm::sparse", f"{tmp_path}/1.svm"
    with opened(train, test_dataset=f"{test}::sparse") as both:
        assert both.train.load(1, 2, np.dtype("f4"))[0].indices.tolist() == [5]
        assert both.test.load(0, 1, np.dtype("f4"))[0].indices.tolist() == [0]
    assert "1.svm beside" in refused(train, test_dataset=test)


def test_files_that_change(tmp_path: Path) -> None:
    assert "nothing behind ::, or sparse" in refused(f"{SAMPLE}::x", problem="logistic_sparse")
    path = write_svm(tmp_path / "c.svm", "1 1:1\n0 1:1\n")
    with opened(f"{path}::sparse", test_fraction=0) as data:
        write_svm(path, "1 1:1\n0 1:y\n")
        with pytest.raises(UserError, match=r"c\.svm cannot be read \(it was changed"):
            data.train.load(0, 2, np.dtype("f4"))


def test_products_that_are_too_large(tmp_path: Path) -> None:
    path = write_svm(tmp_path / "c.svm", "1 1:1e30\n0 1:1\n")
    text = "sample 0, element (0,) is inf in float32"
    assert text in refused(path, test_fraction=0, scale=1e20)
    data = opened(f"{path}::sparse", test_fraction=0, scale=1e20)
    with pytest.raises(UserError, match=re.escape(text)):
        everything(data, "float32")


def test_numbers_are_those_of_python() -> None:
    rng = np.random.default_rng(0)
    some = rng.uniform(0.1, 1, 2000) * 10.0 ** rng.integers(-5, 12, 2000)
    for digits, power, ulps in ((6, 0, 0), (15, 0, 0), (17, 0, 0), (17, 20, 2), (30, 0, 2)):
        texts = [f"{number * 10.0**power:.{digits}g}" for number in some]
        line = "1 " + " ".join(f"{k}:{text}" for k, text in enumerate(texts))
        found = libsvm.parse(line.encode()).x.values
        wanted = np.array([float(text) for text in texts])
        assert (np.abs(found - wanted) <= ulps * np.spacing(np.abs(wanted))).all()


def test_the_order_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch out of several blocks has each sample's own features, in the order that was asked."""
    monkeypatch.setattr(libsvm, "PIECE", 512)
    monkeypatch.setattr(base, "BLOCK_BYTES", 4000)
    data = opened(f"{SAMPLE}::sparse", test_fraction=0, batch_size=32)
    source, whole, seen = data.train, everything(data)[0].dense(), list[int]()
    block = source.block(32)
    assert 0 < block < 300
    with Loader(source, Order(source.n, block, 3), "float64") as loader:
        for begin in range(0, 300, 32):
            loader.submit(0, begin, min(begin + 32, 300))
            batch = loader.take()
            np.testing.assert_array_equal(batch.x.dense(), whole[batch.ids])
            seen += batch.ids.tolist()
    assert sorted(seen) == list(range(300))


def peak_of(path: Path) -> int:
    """Return the most bytes that Python has had while all batches were read."""
    tracemalloc.start()
    try:
        with opened(f"{path}::sparse", test_fraction=0, batch_size=500) as data:
            n, order = data.train.n, Order(data.train.n, data.train.block(500), 0)
            with Loader(data.train, order, "float32") as loader:
                for begin in range(0, n, 500):
                    loader.submit(0, begin, min(begin + 500, n))
                    loader.take()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    features = [" ".join(f"{37 * j + k % 31}:0.5" for j in range(1, 30)) for k in range(9)]
    part = "".join(f"{k % 2} {text}\n" for k, text in enumerate(features)) * 2000  # 4.5 MB
    less, more = (peak_of(write_svm(tmp_path / "a.svm", part * parts)) for parts in (3, 9))
    assert (tmp_path / "a.svm").stat().st_size > 36e6
    assert less < 60e6
    assert more < less + 4e6


def test_rows_of_a_matrix() -> None:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(6, 4)) * (rng.random((6, 4)) < 0.4)
    dense[[0, 3]] = 0
    starts = np.concatenate(([0], np.cumsum((dense != 0).sum(1))))
    x = Csr(starts, np.nonzero(dense)[1], dense[dense != 0], 4)
    np.testing.assert_array_equal(x.dense(), dense)
    np.testing.assert_array_equal(x.take(np.array([5, 0, 5, 1])).dense(), dense[[5, 0, 5, 1]])
    np.testing.assert_array_equal(x[1:4].dense(), dense[1:4])
    np.testing.assert_array_equal(join([x[:2], x[2:]]).dense(), dense)
    pairs = np.stack([x.values, -x.values], axis=1)
    np.testing.assert_allclose(x.sums(x.values), dense.sum(1))
    np.testing.assert_allclose(x.sums(pairs)[:, 1], -dense.sum(1))


SVM = "".join(f"{y} 1:{a} 2:{b}\n" for (a, b), y in zip(X.tolist(), Y, strict=True)).encode()
NUMBER, FEATURE = "label '{}' is not a finite number", "feature '{}' is not index:value of a finite"
REFUSED: dict[str, str] = {  # a malformed line, and what is said of it
    **{f"{word} 1:1": NUMBER.format(word) for word in ("one", "nan", "1:1", "/etc/passwd", "٣")},
    **{
        f"1 0:1 {word}": FEATURE.format(word)
        for word in ("2", "x:2", "2:", ":1", "2:3:4", "2:nan", "2:1e39", "2_0:1", "-1:1", "٣:1",
                     "2147483648:1", "2:1_0", "2:0x1", "2:1e", "2:.", "2:--1", '2:__import__("os")')
    },
    "1 1:1e39#no": FEATURE.format("1:1e39"),
    "1 0.2 0.1": FEATURE.format("0.2"),
    "1 1:1\0": "feature",
    "1 " + "9" * (1 << 20): "feature",
    "1 2:1 2:1": "indices are not rising at '2:1'",
    "1 3:1 2:1": "indices are not rising at '2:1'",
}  # fmt: skip


def svm(more: bytes, names: str = "") -> Any:
    return files(f"{{}}/data.svm{names}", {"data.svm": more})


SVMS: list[Case] = [
    *(
        (f"{line[:20]!r}{names}", svm(SVM + f"\n# comment\n{line}\n0 1:1\n".encode(), names),
         f"data.svm, line 11: {re.escape(words)}")
        for line, words in REFUSED.items()
        for names in ("", "::sparse")
    ),
    *(
        case
        for names, most in (("", "at most 16,777,216 in dense"), ("::sparse", "^read"))
        for case in (
            ("as it should be", svm(SVM, names), "^read"),
            ("a comment", svm(SVM + b"# `touch /tmp/mpips-was-here`\n", names), "^read"),
            ("no samples", svm(b"# nothing\n", names), "no samples"),
            ("a label of exabytes", svm(SVM + b"99999999999999999999 1:1\n", names), "label"),
            ("an index of 2 billion", svm(SVM + b"1 2147483647:1\n", names), most),
        )
    ),
    ("compressed", svm(gzip.compress(SVM)), "^read$"),
    ("compressed zeros", svm(FLOOD), "label"),
    ("compressed, cut", svm(FLOOD[:99]), NOT_READ),
    ("compressed, sparse", svm(FLOOD, "::sparse"), "compressed"),
    ("arrays of it", svm(SVM, "::../../etc,passwd"), "none"),
]  # fmt: skip


def test_hostile_files(tmp_path: Path, outside: Outside) -> None:
    attack(SVMS, tmp_path, outside, told)
