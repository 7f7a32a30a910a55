"""The factors of PowerSGD: what is chosen, and what the loops do."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.codecs.powersgd import Factors, drawn, orthogonalize, product_squares, rebuild
from mpips.layout import Layout, Shard

PATIENT = settings(deadline=None)
DTYPES = ("float32", "float64")


def orthonormal(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what `orthogonalize` makes of a copy, and which columns it lost."""
    out, lost = np.ascontiguousarray(p).copy(), np.zeros(p.shape[1], bool)
    orthogonalize(out, np.full(p.shape[::-1], 7.0), lost)
    return out, lost


def test_large_matrices_are_chosen() -> None:
    shapes = {"a": (3,), "w": (128, 128), "b": (9,), "c": (2, 2), "t": (30, 8, 80), "z": ()}
    found = Factors.of(Layout.of(shapes), "float32", 2)
    matrices = [("w", 3, 128, 128, 0, 0), ("t", 16400, 30, 640, 256, 256)]
    assert [(x.name, x.begin, x.m, x.n, x.p_begin, x.q_begin) for x in found.matrices] == matrices
    assert found.raw == (Shard(0, 3), Shard(16387, 16400), Shard(35600, 35601))
    assert (found.p_size, found.q_size, found.raw_size) == (2 * 158, 2 * 768, 3 + 13 + 1)
    assert found.sent == found.p_size + found.q_size + found.raw_size
    assert found.raw_parts(1, 5) == [(1, Shard(1, 3)), (3, Shard(16387, 16389))]
    assert found.raw_parts(16, 17) == [(16, Shard(35600, 35601))]


def test_what_is_worth_it() -> None:
    for shape, rank, dtype, chosen in (
        ((128, 128), 4, "float32", True),
        ((128, 127), 4, "float32", False),  # less than 64 KB
        ((128, 64), 4, "float64", True),
        ((128, 128), 31, "float32", True),
        ((128, 128), 32, "float32", False),  # factors of half the size
        ((1, 100_000), 1, "float32", False),
        ((100_000,), 1, "float32", False),
        ((0, 5), 1, "float32", False),
    ):
        found = Factors.of(Layout.of({"w": shape}), dtype, rank)
        assert bool(found.matrices) == chosen
        assert found.raw_size == (0 if chosen else math.prod(shape))


@PATIENT
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(0, 90), st.sampled_from(DTYPES))
def test_columns_become_orthonormal(seed: int, r: int, more: int, dtype: str) -> None:
    """Also where they are nearly dependent, and of very different lengths."""
    rng = np.random.default_rng(seed)
    p = rng.standard_normal((r + more, r)) * 10.0 ** rng.integers(-15, 15, r)
    p[:, r // 2] = p[:, 0] * (1 + 1e-9) + 1e-9 * p[:, r // 2]
    out, lost = orthonormal(p.astype(dtype))
    gram = out.astype("f8").T @ out.astype("f8")
    eps = float(np.finfo(dtype).eps)
    assert np.abs(gram - np.diag(~lost)).max() <= 20 * eps
    span = out.astype("f8") @ (out.astype("f8").T @ p.astype(dtype).astype("f8"))
    norms = np.linalg.norm(p.astype(dtype).astype("f8"), axis=0)
    bound = 50 * r * eps + 1e-13  # what a lost column may have had apart
    assert (np.linalg.norm(span - p.astype(dtype), axis=0) <= bound * norms).all()


def test_dependent_columns_are_lost() -> None:
    x = np.random.default_rng(0).standard_normal((50, 2))
    p = np.stack([x[:, 0], 0 * x[:, 0], 3 * x[:, 0], x[:, 1], x[:, 0] - x[:, 1]], 1)
    out, lost = orthonormal(p)
    assert lost.tolist() == [False, True, True, False, True]
    assert not out[:, lost].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_do_not_overflow(dtype: str) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (40, 2)) * np.finfo(dtype).max
    out, lost = orthonormal(x.astype(dtype))
    assert not lost.any()
    assert np.abs(out.T @ out - np.eye(2)).max() <= 20 * np.finfo(dtype).eps
    for bad in (np.nan, np.inf):
        p = np.random.default_rng(0).standard_normal((40, 3)).astype(dtype)
        p[7, 1] = bad
        out, lost = orthonormal(p)
        assert not lost.any()
        assert np.isfinite(out[:, 0]).all()
        assert not np.isfinite(out[7, 1:]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (70, 1024), (50, 2051)])
def test_the_error_is_orthogonal_to_the_columns(dtype: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    m, n = shape
    matrix = rng.standard_normal(shape).astype(dtype)
    p, _ = orthonormal(rng.standard_normal((m, 2)).astype(dtype))
    own, q = p.T @ matrix, rng.standard_normal((2, n)).astype(dtype)
    error, grad = matrix.copy(), np.full(shape, np.nan, dtype)
    rebuild(p, q, own, error, grad)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(grad, p @ q, rtol=0, atol=10 * eps)
    np.testing.assert_allclose(error, matrix - p @ (p.T @ matrix), rtol=0, atol=40 * eps)
    assert np.abs(p.T @ error).max() <= 40 * eps * math.sqrt(m)


def test_rows_give_the_same_bits_however_they_are_cut() -> None:
    rng = np.random.default_rng(2)
    p, q, own = (rng.standard_normal(shape) for shape in ((40, 3), (3, 70), (3, 70)))
    error = rng.standard_normal((40, 70))
    whole, parts = (error.copy(), np.zeros_like(error)), (error.copy(), np.zeros_like(error))
    rebuild(p, q, own, *whole)
    for a, b in pairwise([0, 1, 13, 40]):
        rebuild(p[a:b], q, own, parts[0][a:b], parts[1][a:b])
    assert np.array_equal(whole[0], parts[0])
    assert np.array_equal(whole[1], parts[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_a_product(dtype: str) -> None:
    rng = np.random.default_rng(3)
    p, q = rng.standard_normal((40, 5)).astype(dtype), rng.standard_normal((5, 77)).astype(dtype)
    exact = np.linalg.norm(p.astype("f8") @ q.astype("f8")) ** 2
    assert product_squares(p, q) == pytest.approx(exact, rel=1e-12)


def test_draws_differ_by_seed_round_and_matrix() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    found = [drawn(*key, (2, 50)) for key in keys]
    assert np.array_equal(found[0], drawn(0, 0, 0, (2, 50)))
    assert all(not np.array_equal(found[0], other) for other in found[1:])
