"""Codecs: the papers' bounds and references in plain NumPy, sizes, and what is not finite."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpips import codecs
from mpips.codecs import CODECS, Codec, MessageId, State, buffer_for, codec_for, make_codec
from mpips.codecs.topk import TopK
from mpips.kernels.compiled import Kernel

DTYPES = ("float32", "float64")
FEEDBACK = ("topk", "onebit")
LEVELS = {"int8": (127, 512), "int4": (7, 128)}  # levels, and elements of a bucket
ALL: list[Codec] = [*(make_codec(name) for name in CODECS), TopK(ratio=0.1, momentum=0.9, warmup=5)]
IDS = ["-".join(filter(None, (c.name, "momentum" if len(c.state) > 1 else ""))) for c in ALL]
every_codec = pytest.mark.parametrize("codec", ALL, ids=IDS)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)
patient = settings(deadline=None, max_examples=25)
each_of_levels = pytest.mark.parametrize("name", LEVELS)


def vectors(dtype: str, largest: float | None = None) -> st.SearchStrategy[np.ndarray]:
    """Finite vectors across the edges of buckets, with subnormal and huge elements."""
    width = 8 * np.dtype(dtype).itemsize
    bound = float(np.dtype(dtype).type(np.finfo(dtype).max if largest is None else largest))
    elements = st.floats(-bound, bound, width=width)
    sizes = st.sampled_from([0, 1, 2, 7, 8, 9, 511, 512, 513, 1024, 1025, 2500])
    return sizes.flatmap(lambda n: hnp.arrays(dtype, n, elements=elements))


def normal(n: int, dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def sent(
    codec: Codec, x: np.ndarray, state: State | None = None, message_id: MessageId | None = None
) -> np.ndarray:
    """Return what arrives of `x`; only the bytes in use are sent."""
    message, came = (buffer_for(codec.wire_bytes(x.size, x.dtype)) for _ in range(2))
    message[:] = 255
    before, out = x.copy(), np.full_like(x, np.nan)
    kept = codec.fresh_state(x.size, x.dtype) if state is None else state
    used = codec.encode(x, message, kept, message_id or MessageId())
    assert used <= message.size
    np.testing.assert_array_equal(x, before)
    came[:used] = message[:used]
    codec.decode(came, out)
    return out


@both_dtypes
@patient
@given(data=st.data())
def test_fp16_is_numpy_s_but_for_what_is_too_large(dtype: str, data: st.DataObject) -> None:
    x = data.draw(vectors(dtype) | vectors(dtype, 1e5) | vectors(dtype, 1e-4))
    out = sent(make_codec("fp16"), x)
    with np.errstate(over="ignore"):
        half = x.astype("f4").astype("f2")
    expected = np.where(np.isinf(half), np.copysign(65504, x), half.astype(dtype))
    np.testing.assert_array_equal(out, expected.astype(dtype))


def test_fp16_on_every_half_and_between_two() -> None:
    halves = np.arange(1 << 16, dtype="u2").view("f2")
    finite = halves[np.isfinite(halves)].astype("f4")
    codec = make_codec("fp16")
    np.testing.assert_array_equal(sent(codec, finite).view("u4"), finite.view("u4"))
    up = np.nextafter(finite.astype("f2")[np.abs(finite) < 65504], np.float16(np.inf))
    middles = (up.astype("f4") + np.nextafter(up, np.float16(-np.inf)).astype("f4")) / 2
    for x in (middles, np.nextafter(middles, np.float32(9e9)), np.nextafter(middles, -9e9)):
        x = x.astype("f4")
        expected = x.astype("f2").astype("f4")
        np.testing.assert_array_equal(sent(codec, x).view("u4"), expected.view("u4"))


@both_dtypes
@patient
@given(data=st.data())
def test_bf16_rounds_to_nearest_even(dtype: str, data: st.DataObject) -> None:
    between = (np.arange(1 << 16, dtype="u4") << 16 | 0x8000).view("f4")  # of any two neighbours
    ties = between[np.isfinite(between)].astype(dtype)
    for x in (data.draw(vectors(dtype) | vectors(dtype, 1.0)), ties):
        out = sent(make_codec("bf16"), x)
        with np.errstate(over="ignore"):
            words = x.astype("f4").view("u4").astype("u8")
        rest, odd = words & 0xFFFF, (words >> 16) & 1
        up = (rest > 0x8000) | ((rest == 0x8000) & (odd == 1))
        found = np.minimum((words & 0x7FFF0000) + up * 0x10000, 0x7F7F0000).astype("u4").view("f4")
        np.testing.assert_array_equal(np.abs(out), found.astype(dtype))
        np.testing.assert_array_equal(np.signbit(out), np.signbit(x))


@each_of_levels
@both_dtypes
@patient
@given(data=st.data(), number=st.integers(1, 2**40))
def test_a_level_is_one_of_the_two_around(
    name: str, dtype: str, data: st.DataObject, number: int
) -> None:
    x = data.draw(vectors(dtype) | vectors(dtype, 1.0) | vectors(dtype, 1e-38))
    codec, (levels, bucket) = make_codec(name), LEVELS[name]
    out = sent(codec, x, message_id=MessageId(number=number))
    assert np.isfinite(out).all()
    slack = 4 * np.finfo(dtype).eps
    for b in range(0, x.size, bucket):
        part, came = x[b : b + bucket], out[b : b + bucket]
        largest = np.abs(part).max()
        step = largest / x.dtype.type(levels)
        # In halves, as the difference of two huge ones may be beyond the largest.
        error = np.abs(came / 2 - part / 2)
        tiny = np.finfo(dtype).smallest_subnormal
        assert (error <= step / 2 + largest * slack + 2 * tiny).all()
        assert (np.sign(came) * np.sign(part) >= 0).all()
        top = np.abs(part) == largest
        np.testing.assert_array_equal(came[top], part[top])


@each_of_levels
@both_dtypes
def test_levels_are_unbiased(name: str, dtype: str) -> None:
    """The mean over many pushes is x within five of its standard errors, each element's."""
    pushes, codec, (levels, bucket) = 2000, make_codec(name), LEVELS[name]
    x = normal(700, dtype)
    total, squares = np.zeros(700), np.zeros(700)
    for number in range(1, pushes + 1):
        came = sent(codec, x, message_id=MessageId(3, 1, number)).astype("f8")
        total += came
        squares += (came - x) ** 2
    tops = [np.abs(x[b : b + bucket]).max() for b in range(0, 700, bucket)]
    step = np.repeat(tops, bucket)[:700] / levels
    level = np.abs(x) / step
    variance = (level - np.floor(level)) * (1 - level + np.floor(level)) * step**2
    error = np.abs(total / pushes - x)
    assert (error <= 5 * np.sqrt(variance / pushes) + 1e-6 * step).all()
    assert (variance <= step**2 / 4 * (1 + 1e-9)).all()
    assert abs(squares.sum() / pushes / variance.sum() - 1) < 0.03  # as independent draws have it


@each_of_levels
def test_draws_of_levels_differ_everywhere(name: str) -> None:
    """Between elements, buckets, pushes, workers, seeds and places; and they are uniform."""
    codec, (levels, bucket) = make_codec(name), LEVELS[name]
    x = np.full(8 * bucket, 0.5, "f4")
    x[::bucket] = levels  # so that the others are level 0 or 1, each as likely
    changes: list[dict[str, int]] = [{}, {"seed": 1}, {"source": 1}, {"number": 2}, {"begin": 16}]
    message_ids = [MessageId(**change) for change in changes]
    assert len({int(message_id.key) for message_id in message_ids}) == len(message_ids)
    rows = [r for o in message_ids for r in sent(codec, x, message_id=o).reshape(8, -1)[:, 1:] > 0]
    ups = np.array(rows, "f8")
    n = ups.shape[1]
    assert abs(ups.mean() - 0.5) < 5 * 0.5 / np.sqrt(ups.size)
    together = (2 * ups - 1) @ (2 * ups - 1).T / n
    np.fill_diagonal(together, 0)
    assert np.abs(together).max() < 6 / np.sqrt(n)
    shifted = [np.mean((2 * r[:-k] - 1) * (2 * r[k:] - 1)) for r in ups for k in (1, 2, 8)]
    assert np.abs(shifted).max() < 6 / np.sqrt(n)


def top_reference(v: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k largest magnitudes, the first of equal ones."""
    return np.sort(np.argsort(-np.abs(v), kind="stable")[:k])


@both_dtypes
@patient
@given(data=st.data(), ratio=st.sampled_from([0.01, 0.1, 0.5, 1.0]))
def test_topk_is_its_paper_s(dtype: str, data: st.DataObject, ratio: float) -> None:
    codec = TopK(ratio=ratio)
    half = float(np.finfo(dtype).max) / 2
    x = data.draw(vectors(dtype, half) | vectors(dtype, 1.0))
    y = np.round(x / 4, 0) if x.size else x  # many ties
    for v in (x, y):
        state = codec.fresh_state(v.size, dtype)
        out = sent(codec, v, state)
        k = codec.count(v.size, 1)
        expected = np.zeros_like(v)
        places = top_reference(v, k)
        expected[places] = v[places]
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(state[0], v - expected)
        scale = np.abs(v).max(initial=1)
        left, whole = (np.sum((w.astype("f8") / scale) ** 2) for w in (state[0], v))
        assert left <= (1 - k / max(1, v.size)) * whole * (1 + 1e-6)


@both_dtypes
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_topk_over_many_pushes_is_a_serial_reference(dtype: str, momentum: float) -> None:
    """DGC, algorithm 4, without its clipping."""
    n, codec, counts = 3000, TopK(ratio=0.02, momentum=momentum, warmup=6), []
    state, u, v = codec.fresh_state(n, dtype), np.zeros(n, dtype), np.zeros(n, dtype)
    for number in range(1, 12):
        g, k = normal(n, dtype, number), codec.count(n, number)
        u = np.dtype(dtype).type(momentum) * u + g
        v = v + u
        places, expected = top_reference(v, k), np.zeros(n, dtype)
        expected[places] = v[places]
        u[places] = v[places] = 0
        out = sent(codec, g, state, MessageId(number=number))
        np.testing.assert_allclose(out, expected, rtol=1e-5)
        counts.append(k)
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[6:]) == (n // 4, [60] * 5)


@both_dtypes
@patient
@given(data=st.data())
def test_onebit_sends_the_means_of_both_signs(dtype: str, data: st.DataObject) -> None:
    codec = make_codec("onebit")
    x = data.draw(vectors(dtype) | vectors(dtype, 1.0))
    state = codec.fresh_state(x.size, dtype)
    out = sent(codec, x, state)
    assert np.isfinite(out).all()
    eps = np.finfo(dtype).eps
    for b in range(0, x.size, 1024):
        part = x[b : b + 1024].astype("f8")
        for chosen in (part >= 0, part < 0):
            if chosen.any():
                half = np.mean(part[chosen] / 2 / chosen.sum()) * chosen.sum()  # is finite
                came = out[b : b + 1024][chosen]
                tiny = 1024 * np.finfo(dtype).smallest_subnormal
                sums = 1024 * np.finfo("f8").eps
                bound = (2 * eps + sums) * np.abs(part[chosen]).max() + tiny
                assert np.abs(came.astype("f8") / 2 - half).max() <= bound
    np.testing.assert_array_equal(state[0], x - out)
    scale = np.abs(x).max(initial=1)
    left, whole, came = (np.sum((w / scale).astype("f8") ** 2) for w in (state[0], x, out))
    assert left <= whole - came + 1e-5 * max(whole, 1e-30)


@both_dtypes
@pytest.mark.parametrize("name", FEEDBACK)
def test_feedback_loses_nothing(dtype: str, name: str) -> None:
    """All that was decoded and the residual add up to all that was put in."""
    n, pushes, codec = 5000, 40, make_codec(name)
    state, put, came = codec.fresh_state(n, dtype), np.zeros(n), np.zeros(n)
    for number in range(1, pushes + 1):
        g = normal(n, dtype, number)
        put += g
        came += sent(codec, g, state, MessageId(number=number))
    assert np.abs(came).max() > 0
    np.testing.assert_allclose(came + state[0], put, atol=pushes * 20 * np.finfo(dtype).eps)


def test_sizes_are_exact() -> None:
    x = normal(1 << 18, "float32")
    for name, size in {
        "fp16": 1 << 19,
        "bf16": 1 << 19,
        "int8": (1 << 18) + 512 * 4,
        "int4": (1 << 17) + 2048 * 4,
        "topk": 8 + 2622 * 8,
        "onebit": (1 << 15) + 256 * 8,
    }.items():
        codec = make_codec(name)
        message = buffer_for(codec.wire_bytes(x.size, "float32"))
        used = codec.encode(x, message, codec.fresh_state(x.size, "float32"), MessageId())
        assert used == message.size == size
    small = make_codec("int8")  # slices of less than 64 KB go raw
    sizes = ((16384, "float32", small), (16383, "float32", None), (8192, "float64", small))
    assert all(codec_for(small, n, dtype) is found for n, dtype, found in sizes)
    assert codec_for(make_codec("none"), 1 << 20, "float32") is None


@every_codec
def test_a_message_is_a_function_of_origin_and_state(codec: Codec) -> None:
    message_id, x = MessageId(1, 2, 3, 64), normal(4000, "float32")
    first, second = (sent(codec, x, message_id=message_id) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@every_codec
def test_wrong_lengths_are_refused(codec: Codec) -> None:
    x, size = np.ones(100, "f4"), codec.wire_bytes(100, "f4")
    for bytes_of, elements in ((size - 1, 100), *([(size, 99)] if codec.state else [])):
        with pytest.raises(ValueError, match=codec.name):
            codec.encode(x, buffer_for(bytes_of), codec.fresh_state(elements, "f4"), MessageId())
    with pytest.raises(ValueError, match=codec.name):
        codec.decode(buffer_for(3), x)
    assert (x == 1).all()


def test_a_damaged_message_is_refused() -> None:
    codec, x = TopK(ratio=0.1), normal(100, "float32")
    message = buffer_for(codec.wire_bytes(100, "f4"))
    codec.encode(x, message, codec.fresh_state(100, "f4"), MessageId())
    message[-4:].view("u4")[0] = 100
    with pytest.raises(ValueError, match="position"):
        codec.decode(message, x)
    message[:8].view("i8")[0] = -1
    with pytest.raises(ValueError, match="expected 0 to 10"):
        codec.decode(message, x)


@every_codec
@both_dtypes
def test_what_is_not_finite_stays_visible(codec: Codec, dtype: str) -> None:
    for value, place in itertools.product([np.nan, np.inf, -np.inf], [0, 513, 2999]):
        x = normal(3000, dtype)
        x[place] = value
        out = sent(codec, x)
        assert not np.isfinite(out[place])
        others = np.abs(np.arange(3000) - place) >= 1024
        assert np.isfinite(out[others]).all(), "other buckets are as ever"


@every_codec
@both_dtypes
def test_what_is_huge_or_tiny_stays_finite(codec: Codec, dtype: str) -> None:
    about = np.finfo(dtype)
    for size in (about.max, about.tiny, about.smallest_subnormal):
        x = np.full(3000, size, dtype)
        x[::3] *= -1
        out = sent(codec, x)
        assert np.isfinite(out).all()
        if codec.name == "int8" or size > 1:
            came = out != 0 if codec.name == "topk" else np.full(3000, True)
            assert came.any()
            assert (np.sign(out) == np.sign(x))[came].all()


@every_codec
@both_dtypes
def test_shards_and_chunks_use_the_loops_that_were_compiled(codec: Codec, dtype: str) -> None:
    codecs.warm(codec, dtype)
    module = sys.modules[type(codec).__module__]
    loops = [v for v in vars(module).values() if isinstance(v, Kernel)]
    before = [list(loop.variants) for loop in loops]
    vector = normal(9000, dtype)
    for part in (vector[16:5017], vector[16:].copy(), vector[8992:]):
        state = codec.fresh_state(part.size, dtype)
        sent(codec, part, state)
        sent(codec, part, state, MessageId(number=2))
    assert [list(loop.variants) for loop in loops] == before
