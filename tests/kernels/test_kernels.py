"""Compiled loops: exactness, NaN and infinity, memory ordering, vectorisation, the cache."""

import fcntl
import hashlib
import itertools
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from launch import python
from numba import njit, typeof

from mpips.kernels import atomics, compiled, compiler, update_rules, vectors
from mpips.kernels import cache as kernel_cache
from mpips.kernels.atomics import find_ahead, meet, meet_and_add, observe, publish
from mpips.kernels.rule_loops import dense, loop_of
from mpips.kernels.vectors import addresses_of

DTYPES = [np.float32, np.float64]
SIZES = [0, 1, 3, 15, 16, 17, 63, 64, 65, 2047, 2048, 2049, 6151]
SPECIALS = [np.nan, np.inf, -np.inf]
every_size = pytest.mark.parametrize(("n", "dtype"), [*itertools.product(SIZES, DTYPES)])


def sample(n, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def places(n):
    """First, last, middle, and both sides of the block and vector edges that exist."""
    return sorted({i for i in (0, 1, n // 2, n - 1, 15, 16, 2047, 2048) if 0 <= i < n})


def llvm(loop, *args):
    function = compiler.dispatcher(loop)
    function.compile(tuple(map(typeof, args)))
    return next(iter(function.inspect_llvm().values()))


def test_publish_and_observe_one_word_only():
    """Of a header that may be strided and read-only."""
    memory = np.full(16, -7, np.int64)
    for index, value in enumerate([0, 1, -1, 2**63 - 1, -(2**63)]):
        publish(memory, index, value)
        assert observe(memory, index) == value
    assert (memory[5:] == -7).all()
    words = memory[5::3]
    publish(words, 2, 5)
    assert (memory[5:] != -7).nonzero()[0].tolist() == [6]
    for index, header in itertools.product((-1, 4, -(2**62)), (words, memory[5:9])):
        with pytest.raises(IndexError, match="outside the header"):
            publish(header, index, 1)
        with pytest.raises(IndexError, match="outside the header"):
            observe(header, index)
    words.flags.writeable = False
    assert observe(words, 2) == 5
    with pytest.raises(Exception, match="read-only header"):
        publish(words, 2, 4)
    with pytest.raises(Exception, match="expected a vector of int64"):
        observe(np.zeros(2, np.uint64), 0)


def test_memory_orders():
    code = llvm(publish, np.zeros(1, np.int64), 0, 1)
    assert re.search(r"store atomic i64 [^\n]* release, align 8\s+fence seq_cst", code)
    code = llvm(observe, np.zeros(1, np.int64), 0)
    assert re.search(r"fence acquire\s+[^\n]*load atomic i64, [^\n]* acquire, align 8", code)
    ordered = loop_of("ordered", "def loop(x: Vector) -> None:\n    store_ordered(x, 0, 1)\n")
    code = llvm(ordered, np.zeros(1, np.int64))
    assert re.search(r"store atomic i64 [^\n]* release, align 8\s+fence release", code)
    code = llvm(meet, np.zeros(1, np.int64), 1, 1)
    assert re.search(r"store atomic i64 %arg.turn,[^\n]* release, align 8", code)
    assert re.search(r"load atomic i64, [^\n]* acquire, align 8", code)


def test_what_is_ahead_is_found_in_turn_and_within_limits():
    pushed = np.array([3, 1, 2], np.int64)
    words, own = addresses_of(pushed[k : k + 1] for k in range(3)), np.array([4, 0, 2], np.int64)
    done, limit = np.zeros(5, np.int64), np.full(5, 9, np.int64)
    found = [find_ahead(words, own, done, limit, first) for first in range(3)]
    assert found == [0, 1, 2]
    done[:] = [1, 7, 2, 7, 2]
    assert [find_ahead(words, own, done, limit, first) for first in range(3)] == [0, 0, 0]
    for limit[4], expected in ((3, 0), (2, -1)):
        assert find_ahead(words, own, done, limit, 0) == expected
    done[0] = 0
    assert [find_ahead(words, own, done, limit, first) for first in range(3)] == [1, 1, 1]
    assert find_ahead(words[:0], own[:0], done, limit, 0) == -1


@pytest.mark.parametrize("looks", [0, 10_000])
def test_a_meeting_waits_for_all_and_not_for_ever(looks):
    mine, first, second = (np.zeros(1, np.int64) for _ in range(3))
    words = addresses_of([mine, first, second])
    assert not meet(words, 1, looks)
    assert mine[0] == 1
    publish(second, 0, 1)
    assert not meet(words, 1, looks)
    publish(first, 0, 2)  # has met, and waits for the next
    assert meet(words, 1, looks)
    assert not meet(words, 2, looks)
    assert [mine[0], first[0], second[0]] == [2, 2, 1]
    assert meet(words[:1], 7, 0), "alone"


def test_who_meets_last_adds_up_what_all_brought():
    mine, other = np.zeros(1, np.int64), np.zeros(1, np.int64)
    words = addresses_of([mine, other])
    rows = np.array([[1.0, 1.0, np.nan], [2.0, 1e16, 0.0], [4.0, -1e16, 0.0]])
    out = np.full(3, -7.0)
    assert not meet_and_add(words, 1, 10, addresses_of(list(rows)), out)
    assert (out == -7.0).all()
    publish(other, 0, 1)
    assert meet_and_add(words, 1, 10, addresses_of(list(rows)), out)
    assert np.array_equal(out, [7.0, 0.0, np.nan], equal_nan=True)
    assert meet_and_add(words, 1, 0, addresses_of(list(rows[::-1])), out)
    assert out[1] == 1.0  # in the order given


# Words of the litmus tests lie on cache lines of their own.
LINE = 8
PATIENCE = 2000


@njit(nogil=True, error_model="numpy")
def join(words, me, turn, looks):
    """Meet; returns whether all have come, however slow the machine, but not for ever."""
    own_first = words.copy()
    own_first[0], own_first[me] = words[me], words[0]
    tries, most = 0, PATIENCE**2 if looks else 100 * PATIENCE**2  # either takes seconds
    while not meet(own_first, turn, looks) and tries < most:
        tries += 1
    return tries < most


@njit(nogil=True, error_model="numpy")
def take_part(words, data, rounds, looks, me):
    """Write one's row, meet, read all rows, meet, and so on; count what was not as expected."""
    wrong = 0
    for i in range(1, rounds + 1):
        data[me, :] = i
        if not join(words, me, 2 * i - 1, looks):
            return -1
        for value in data.flat:
            wrong += value != i
        if not join(words, me, 2 * i, looks):
            return -1
    return wrong


@pytest.mark.parametrize(("threads", "looks"), [(2, 0), (2, 1), (2, 1000), (3, 1000)])
def test_litmus_meetings(threads, looks):
    """What was written before a meeting is read after it, and nothing that is written later."""
    flags = np.zeros(threads * LINE, np.int64)
    words = addresses_of([flags[k * LINE :] for k in range(threads)])
    data = np.zeros((threads, 3 * LINE), np.int64)
    # Who never offers the core waits for the end of a time slice; so do threads without one.
    rounds = (20_000 if threads == 2 else 4000) if looks else 20
    with ThreadPoolExecutor(threads) as pool:
        calls = [pool.submit(take_part, words, data, rounds, looks, me) for me in range(threads)]
    assert [call.result() for call in calls] == [0] * threads
    assert (flags[::LINE] == 2 * rounds).all()


def row_at(values, offset):
    """Put a copy of `values` at an address `offset` elements behind a 64-byte line."""
    room = np.zeros(values.size + 64, values.dtype)
    start = -(room.ctypes.data // room.itemsize) % 16 + offset
    row = room[start : start + values.size]
    row[:] = values
    return row


def serial_sum(rows, weights, begin, n):
    """The sum in the same order and dtype, one operation after the other."""
    out = np.zeros(n, rows[0].dtype)
    for row, weight in zip(rows, weights.astype(out.dtype), strict=True):
        if weight != 0:
            out += weight * row[begin : begin + n]
    return out


@every_size
def test_sum_rows_is_the_serial_sum(dtype, n):
    rows = [row_at(sample(n + 9, dtype, k), k) for k in range(5)]
    weights = np.array([0.25, 0.3, 0.0, -1.7, 1e-3])
    rows[2][:] = np.nan  # nothing of a row of weight 0 is read
    for k, special in zip(places(n), itertools.cycle(SPECIALS), strict=False):
        rows[k % 2][k], rows[3][(k + 3) % n] = special, np.inf
    for begin in (0, 1, 9):
        room = np.full(n + 2, 77, dtype)
        vectors.sum_rows(addresses_of(rows), weights, begin, room[1:-1])
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(room[1:-1], serial_sum(rows, weights, begin, n))
        assert room[0] == room[-1] == 77


@every_size
def test_specials_are_found_wherever_they_are(dtype, n):
    x = sample(n, dtype)
    dst = np.full(n + 2, 7, dtype)
    assert vectors.all_finite(x) is True
    assert vectors.copy_finite(x, dst[1:-1]) is True
    for i, special in itertools.product(places(n), SPECIALS):
        x[i], keep = special, x[i]
        assert vectors.all_finite(x) is False
        assert vectors.copy_finite(x, dst[1:-1]) is False
        assert dst[1:-1].tobytes() == x.tobytes()
        x[i] = keep
    assert dst[0] == dst[-1] == 7
    limits = np.finfo(dtype)
    x[:] = np.resize([limits.max, limits.min, limits.smallest_subnormal, -0.0], n)
    assert vectors.all_finite(x)
    assert vectors.copy_finite(x, dst[1:-1])


@every_size
def test_sum_squares_is_accurate_and_repeatable(dtype, n):
    x = sample(n, dtype)
    total = vectors.sum_squares(x)
    assert type(total) is float
    exact = float(np.sum(x.astype(np.longdouble) ** 2))
    assert abs(total - exact) <= 1e-14 * exact
    assert {vectors.sum_squares(row_at(x, k)) for k in range(17)} == {total}
    large = np.full(n, 1e30, dtype)  # in float64, whatever the dtype
    exact = n * float(dtype(1e30)) ** 2
    assert abs(vectors.sum_squares(large) - exact) <= 1e-13 * exact
    for i, special in itertools.product(places(n), SPECIALS):
        x[i], keep = special, x[i]
        np.testing.assert_array_equal(vectors.sum_squares(x), special**2)
        x[i] = keep


@every_size
def test_scaled_vectors_are_numpy_s(dtype, n):
    x, y = sample(n + 2, dtype), sample(n, dtype, 1)
    for i, special in zip(places(n), itertools.cycle(SPECIALS), strict=False):
        (x[1:-1] if i % 2 else y)[i] = special
    for keep, weight in ((1.0, 1 / 3), (2 / 3, 1 / 3), (0.0, 1.0), (-1.5, np.inf), (np.nan, 0.0)):
        scaled, added = x.copy(), x.copy()
        vectors.scale(scaled[1:-1], keep)
        vectors.add_scaled(added[1:-1], keep, y, weight)
        with np.errstate(invalid="ignore"):
            product = x[1:-1] * dtype(keep)
            np.testing.assert_array_equal(scaled[1:-1], product)
            np.testing.assert_array_equal(added[1:-1], product + dtype(weight) * y)
        for found in (scaled, added):
            assert found[[0, -1]].tobytes() == x[[0, -1]].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [np.uint8, np.float32, np.float64])
def test_take_rows_is_numpy_s_indexing(stored, dtype):
    rows = sample(7 * 33, np.float64).reshape(7, 33)
    rows = (100 * np.abs(rows)).astype(stored)
    numbers, places = np.array([6, 0, 0, 3]), np.array([4, 2, 0, 1])
    out = sample(6 * 33, dtype).reshape(6, 33)
    expected = out.copy()
    expected[places] = rows[numbers].astype(dtype) * dtype(1 / 255)
    vectors.take_rows(rows, numbers, places, 1 / 255, out)
    np.testing.assert_array_equal(out, expected)
    for wrong in ((7, 0), (-1, 0), (0, 6), (0, -1)):
        with pytest.raises(ValueError, match="beyond the rows"):
            vectors.take_rows(rows, *(np.array([0, k]) for k in wrong), 1.0, out)
    with pytest.raises(ValueError, match="one length"):
        vectors.take_rows(rows[:, :-1], numbers, places, 1.0, out)
    np.testing.assert_array_equal(out, expected)


def test_what_loops_refuse():
    out, one = np.full(5, 5.0), addresses_of([np.ones(4)])
    for loop, args, message in (
        (vectors.sum_rows, (one, np.ones(2), 0, out), "one weight a row"),
        (vectors.sum_rows, (one, np.ones(1), -1, out), "begin >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            loop(*args)
        assert (out == 5).all()


@pytest.mark.parametrize(
    ("loop", "count", "numbers"),
    [
        (vectors.copy_finite, 2, 0),
        (lambda x, y: vectors.add_scaled(x, 1.0, y, 1.0), 2, 0),
        (vectors.compensate, 4, 1),
        (vectors.compensate_adaptive, 5, 4),
        *((dense(getattr(update_rules, k)), n, m) for k, n, m in (("sgd", 2, 2), ("adam", 4, 9))),
    ],
)
def test_vectors_of_other_lengths_are_refused(loop, count, numbers):
    for wrong in range(count):
        given = [np.ones(9 if k == wrong else 8) for k in range(count)]
        with pytest.raises(ValueError, match="one length"):
            loop(*given, *[0.5] * numbers)
        assert all((v == 1).all() for v in given)


SINGLE, WORD = np.ones(8, "f4"), np.zeros(1, np.int64)
VECTORISED = {  # what loops take, in single precision
    "sum_rows": [WORD, np.zeros(1), 0, SINGLE],
    "sum_squares": [SINGLE],
    "copy_finite": [SINGLE] * 2,
    "take_rows": [np.zeros((2, 8), np.uint8), WORD, WORD, 0.5, SINGLE.reshape(1, 8)],
    "sgd": [SINGLE] * 2 + [0.5] * 2,
    "adagrad": [SINGLE] * 3 + [0.5] * 3,
    "adam": [SINGLE] * 4 + [0.5] * 9,
}


@pytest.mark.parametrize("name", VECTORISED)
def test_loop_is_vectorised_and_stays_in_float32(name):
    step = getattr(update_rules, name, None)
    code = llvm(dense(step) if step else getattr(vectors, name), *VECTORISED[name])
    assert re.search(r"(load|store) <[^>\n]*\d+ x float>", code)
    if name != "sum_squares":
        assert not re.search(r"fpext <[^>\n]*\d+ x float>", code)
        assert not re.search(r"= f(add|sub|mul|div|neg) (\w+ )*(contract|reassoc|nnan|fast)", code)


CACHE_CHECK = """
import sys
from mpips import codecs, optim
packers = [codecs.make_codec(name) for name in codecs.CODECS]
packers.append(codecs.make_codec("topk", momentum=0.5))
for dtype in ("float32", "float64"):
    for codec in packers:
        codecs.warm(codec, dtype)
    for name in optim.RULES:
        optim.warm(optim.make_rule(name), dtype, rounds=True)
print("numba" in sys.modules)
"""
SCRIPT = """
import numpy as np, sys
from mpips.kernels import cache, vectors
x = np.ones(3, sys.argv[1])
{}vectors.scale(x, 2.0)
print(x[0], "numba" in sys.modules, flush=True)
sys.stdin.read()
"""
SCALE, BUNDLED = (SCRIPT.format(when) for when in ("", "with cache.compiling(str, 'job'): "))


def other_process(cache):
    """Start a process that scales in double precision, prints, and waits for its input."""
    env = {**os.environ, **cache}
    return subprocess.Popen(
        [sys.executable, "-c", SCALE, "f8"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )


def run_python(code, *args, **env):
    return python("-c", code, *args, timeout_s=300, **env).stdout.strip()


def test_a_second_process_compiles_nothing_and_needs_no_compiler():
    if run_python(CACHE_CHECK) == "True":  # the first process ever; it has left all behind
        assert run_python(CACHE_CHECK) == "False"


@pytest.mark.parametrize("form", ["FACTOR", "module.FACTOR", "PAIR[1]", "inner()"])
def test_machine_code_depends_on_what_a_loop_names_and_defines(form, monkeypatch):
    """And on nothing else, such as an address in memory: loops alike have one file."""
    files, read = [], kernel_cache.machine_code
    monkeypatch.setattr(
        kernel_cache, "machine_code", lambda name, made: files.append(name) or read(name, made)
    )
    for factor in (2.0, 3.0, 3.0):
        module = ModuleType("module")
        module.FACTOR = factor
        names, x = {"FACTOR": factor, "module": module, "PAIR": (1.0, factor)}, np.ones(1)
        inner = f"    def inner(): return {factor}\n" * (form == "inner()")
        text = f"def loop(x: Vector) -> None:\n{inner}    x[0] = {form} * x[0]\n"
        loop_of("times", text, **names)(x)
        assert x[0] == factor
    assert files[0] != files[1] == files[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder that others can write, whose place that for temporary files takes."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "mpips").mkdir()
    (folder / "mpips").chmod(0o777)
    (folder / "t").mkdir()
    cache = {"XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder / "t")}
    assert run_python(SCALE, "f8", **cache) == "2.0 True"
    return cache


def code_in(folder):
    return [path for path in Path(folder).rglob("*") if path.name.startswith("scale-")]


def test_a_folder_that_others_can_write_is_left(cache, tmp_path):
    assert not code_in(f"{cache['XDG_CACHE_HOME']}/mpips")
    (path,) = code_in(f"{cache['TMPDIR']}/mpips-{os.geteuid()}")
    assert b"PyEval_SaveThread" in path.read_bytes(), "it lets the GIL go"
    assert run_python(SCALE, "f8", **cache) == "2.0 False"
    (tmp_path / f"mpips-{os.geteuid()}").touch()  # and nothing is kept where there is no other
    env = {**cache, "TMPDIR": str(tmp_path)}
    assert run_python(SCALE, "f8", **env) == "2.0 True"
    assert not code_in(tmp_path)


def test_damaged_machine_code_is_compiled_again(cache):
    """Whoever has done it keeps nobody waiting: the other may be a rank that this one waits for."""
    (path,) = code_in(cache["TMPDIR"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with other_process(cache) as other:
        assert other.stdout.readline() == b"2.0 True\n"
        assert path.read_bytes() == whole
        assert run_python(SCALE, "f4", **cache).startswith("2.0")
        assert other.poll() is None
        other.communicate(timeout=60)
    for each in {*code_in(cache["TMPDIR"])} - {path}:
        each.unlink()


def test_two_processes_compile_a_loop_once(cache):
    """The second waits for the first, as it holds the lock, and finds what that has written."""
    (path,) = code_in(cache["TMPDIR"])
    kept = path.read_bytes()
    path.unlink()
    with path.with_name("lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with other_process(cache) as other:
            time.sleep(1)
            assert other.poll() is None, "it did not wait"
            path.write_bytes(kept)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert other.communicate(timeout=60)[0] == b"2.0 False\n"


def test_a_write_that_fails_leaves_no_file(tmp_path):
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))"
    assert run_python(full + SCALE, "f8", XDG_CACHE_HOME=str(tmp_path)) == "2.0 True"
    (lock,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert lock.name == "lock"
    lock.unlink()
    lock.mkdir()  # nor can a full disk make the lock's file
    assert run_python(SCALE, "f8", XDG_CACHE_HOME=str(tmp_path)) == "2.0 True"


def test_a_job_s_loops_are_read_from_one_file(tmp_path):
    """Without it, or where it is damaged, from files of their own; it is then written again."""
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run_python(BUNDLED, "f8", **env) == "2.0 True"
    (own,), (bundle,) = code_in(tmp_path), tmp_path.rglob("bundle-*")
    code, whole = own.read_bytes(), bundle.read_bytes()
    own.unlink()
    assert run_python(BUNDLED, "f8", **env) == "2.0 False"
    assert not code_in(tmp_path)
    own.write_bytes(code)
    for damaged in (whole[:-1], b"", None):
        bundle.unlink() if damaged is None else bundle.write_bytes(damaged)
        assert run_python(BUNDLED, "f8", **env) == "2.0 False"
        assert bundle.read_bytes() == whole


def test_the_cache_knows_by_which_compiler_loops_were_compiled():
    sources = [
        Path(compiled.__file__).with_name(f"{name}.py") for name in ("compiler", "intrinsics")
    ]
    abi = f"{compiled.ENTRY} {compiled.LINKS} {compiled.N_LINKS}"
    text = b"".join([*(path.read_bytes() for path in sources), abi.encode()])
    found = hashlib.blake2b(text, digest_size=8).hexdigest()
    assert found == kernel_cache.COMPILER, "write this into mpips/kernels/cache.py"


def test_arguments_that_a_loop_cannot_take():
    for dtype in DTYPES:
        vectors.scale(np.ones(3, dtype), 1.0)
    crooked = np.frombuffer(bytes(9), "u1")[1:].view("f8")
    for args, message in (
        ((np.ones(3), "a"), "must be real number, not str"),
        ((np.ones(3),), "scale of 1 arguments, expected 2"),
        (([1.0], 1.0), "scale of list, expected an array"),
        ((np.ones(3, ">f4"), 1.0), "scale of >f4, expected an aligned native array"),
        ((crooked, 1.0), "scale of float64, expected an align"),
    ):
        with pytest.raises(TypeError, match=message):
            vectors.scale(*args)


def test_each_combination_of_dtypes_and_rights_has_a_variant():
    """They call each other: whatever the order, each call finds its own."""
    copy = compiled.kernel()(vectors.copy_finite.function)
    source, frozen = sample(9, np.float32), sample(9, np.float32)
    frozen.flags.writeable = False
    for _ in range(2):
        for src in (source, frozen, source[::2], frozen.astype("f8")):
            dst = np.zeros_like(src)
            assert copy(src, dst) is True
            np.testing.assert_array_equal(dst, src)
    with pytest.raises(Exception, match="readonly"):
        copy(source, frozen)
    assert len(copy.variants) == 4


def test_a_call_keeps_no_reference():
    words = np.array([-(2**63), 7])
    assert publish(words, 0, 2) is None
    before = sys.getrefcount(words), sys.getrefcount(atomics.publish)
    for _ in range(1000):
        publish(words, 0, 2)
        vectors.sum_squares(np.ones(2, "f4"))
    assert (sys.getrefcount(words), sys.getrefcount(atomics.publish)) == before


@every_size
def test_compensation_is_the_paper_s(dtype, n):
    grad, params, origin = (sample(n, dtype, seed) for seed in range(3))
    square = sample(n, dtype, 3) ** 2
    if n > 5:
        grad[n // 2], params[0], origin[n - 1] = SPECIALS
    out, before = np.empty(n, dtype), square.copy()
    with np.errstate(invalid="ignore"):
        vectors.compensate(out, grad, params, origin, 0.3)
        np.testing.assert_array_equal(out, grad + dtype(0.3) * grad * grad * (params - origin))
        vectors.compensate_adaptive(out, grad, params, origin, square, 0.3, 0.9, 0.1, 1e-7)
        expected = dtype(0.9) * before + dtype(0.1) * grad * grad
        np.testing.assert_array_equal(square, expected)
        factor = dtype(0.3) / np.sqrt(expected + dtype(1e-7))
        np.testing.assert_array_equal(out, grad + factor * grad * grad * (params - origin))


REMOTE_APART = """
import ctypes
import numpy as np
from mpips.kernels import compiled, vectors
compiled._linker()
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PRIVATE, ANONYMOUS, NORESERVE, PAGE, GAP, HOLES = 2, 32, 0x4000, 4096, 3 << 30, 40
def reserve(size):
    return libc.mmap(None, size, 0, PRIVATE | ANONYMOUS | NORESERVE, -1, 0)
below = reserve(GAP * HOLES)
while reserve(PAGE) > below:
    pass  # the room above is used up
for k in range(HOLES):
    libc.munmap(below + k * GAP, PAGE)
print(vectors.sum_squares(np.ones(3)))
"""


def test_a_loop_is_loaded_where_free_memory_lies_in_pieces():
    """Single pages, each further from the next than a jump reaches: not for a loop's sections."""
    run_python("import numpy; from mpips.kernels import vectors as v; v.sum_squares(numpy.ones(3))")
    assert run_python(REMOTE_APART) == "3.0"
