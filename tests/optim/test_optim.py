"""Update rules against the papers' equations; schedules and clipping."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from mpips import optim
from mpips.errors import UserError
from mpips.kernels.vectors import addresses_of, sum_rows
from mpips.optim import RULES, Change, Sum, make_rule, schedule

DTYPES = [np.float32, np.float64]
# Of the accumulated change, in the 2-norm, after some fifty steps.
TOLERANCE = {np.float32: 2e-5, np.float64: 1e-13}

HYPER = {
    "sgd": [{}],
    "momentum": [{"momentum": 0.9}, {"momentum": 0.0}, {"momentum": 0.5}],
    "nesterov": [{"momentum": 0.9}, {"momentum": 0.0}, {"momentum": 0.99}],
    "adagrad": [{"eps": 1e-8}, {"eps": 0.1}],
    "rmsprop": [{"decay": 0.9}, {"decay": 0.99, "eps": 1e-3}, {"decay": 0.0}],
    "adam": [{}, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}, {"beta1": 0.0}, {"beta2": 0.9999}],
    "adamw": [{}, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}],
    "amsgrad": [{}, {"beta1": 0.5, "beta2": 0.6, "eps": 1e-3}],
    "nadam": [{}, {"beta1": 0.0, "beta2": 0.9, "eps": 1e-3}],
    "radam": [{"beta2": 0.9}, {"beta1": 0.5, "eps": 1e-3}],
    "adadelta": [{"eps": 1e-6}, {"decay": 0.5, "eps": 1e-3}],
    "lion": [{"beta2": 0.99}, {"beta1": 0.0, "beta2": 0.5}],
}
CASES = [
    pytest.param(name, {**hyper, "weight_decay": decay}, id=f"{name}-{k}-{decay}")
    for name, choices in HYPER.items()
    for k, hyper in enumerate(choices)
    for decay in (0.0, 0.01)
]


# The papers' equations, serial, in float64. Each takes the gradient without decay. -------------


def decayed(w, g, weight_decay):
    return g + weight_decay * w if weight_decay else g  # so that infinite w stay as they are


def moments(g, s, t, beta1, beta2):
    """Update Adam's moments, and return them without their bias."""
    s["m"] = beta1 * s["m"] + (1 - beta1) * g
    s["v"] = beta2 * s["v"] + (1 - beta2) * g**2
    return s["m"] / (1 - beta1**t), s["v"] / (1 - beta2**t)


def paper_sgd(w, g, s, t, lr, weight_decay):
    return w - lr * decayed(w, g, weight_decay)


def paper_momentum(w, g, s, t, lr, weight_decay, momentum=0.9):
    s["velocity"] = momentum * s["velocity"] + decayed(w, g, weight_decay)
    return w - lr * s["velocity"]


def paper_nesterov(w, g, s, t, lr, weight_decay, momentum=0.9):
    g = decayed(w, g, weight_decay)
    s["velocity"] = momentum * s["velocity"] + g
    return w - lr * (g + momentum * s["velocity"])


def paper_adagrad(w, g, s, t, lr, weight_decay, eps=1e-8):
    g = decayed(w, g, weight_decay)
    s["sum"] = s["sum"] + g**2
    return w - lr * g / (np.sqrt(s["sum"]) + eps)


def paper_rmsprop(w, g, s, t, lr, weight_decay, decay=0.9, eps=1e-8):
    g = decayed(w, g, weight_decay)
    s["square"] = decay * s["square"] + (1 - decay) * g**2
    return w - lr * g / (np.sqrt(s["square"]) + eps)


def paper_adam(w, g, s, t, lr, weight_decay, beta1=0.9, beta2=0.999, eps=1e-8):
    m_hat, v_hat = moments(decayed(w, g, weight_decay), s, t, beta1, beta2)
    return w - lr * m_hat / (np.sqrt(v_hat) + eps)


def paper_adamw(w, g, s, t, lr, weight_decay, beta1=0.9, beta2=0.999, eps=1e-8):
    m_hat, v_hat = moments(g, s, t, beta1, beta2)
    change = lr * m_hat / (np.sqrt(v_hat) + eps)
    return w - (change + lr * weight_decay * w if weight_decay else change)


def paper_amsgrad(w, g, s, t, lr, weight_decay, beta1=0.9, beta2=0.999, eps=1e-8):
    m_hat, _ = moments(decayed(w, g, weight_decay), s, t, beta1, beta2)
    s["largest"] = np.maximum(s["largest"], s["v"])
    return w - lr * m_hat / (np.sqrt(s["largest"] / (1 - beta2**t)) + eps)


def paper_nadam(w, g, s, t, lr, weight_decay, beta1=0.9, beta2=0.999, eps=1e-8):
    g = decayed(w, g, weight_decay)
    _, v_hat = moments(g, s, t, beta1, beta2)
    share = [beta1 * (1 - 0.5 * 0.96 ** (0.004 * i)) for i in range(1, t + 2)]
    mean = (1 - share[-2]) * g / (1 - np.prod(share[:-1]))
    mean += share[-1] * s["m"] / (1 - np.prod(share))
    return w - lr * mean / (np.sqrt(v_hat) + eps)


def paper_radam(w, g, s, t, lr, weight_decay, beta1=0.9, beta2=0.999, eps=1e-8):
    m_hat, _ = moments(decayed(w, g, weight_decay), s, t, beta1, beta2)
    most = 2 / (1 - beta2) - 1
    rho = most - 2 * t * beta2**t / (1 - beta2**t)
    if rho <= 5:
        return w - lr * m_hat
    r = np.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
    return w - lr * m_hat * r * np.sqrt(1 - beta2**t) / (np.sqrt(s["v"]) + eps)


def paper_adadelta(w, g, s, t, lr, weight_decay, decay=0.9, eps=1e-8):
    g = decayed(w, g, weight_decay)
    s["square"] = decay * s["square"] + (1 - decay) * g**2
    change = np.sqrt(s["change_square"] + eps) / np.sqrt(s["square"] + eps) * g
    s["change_square"] = decay * s["change_square"] + (1 - decay) * change**2
    return w - lr * change


def paper_lion(w, g, s, t, lr, weight_decay, beta1=0.9, beta2=0.999):
    sign = np.sign(beta1 * s["m"] + (1 - beta1) * g)
    s["m"] = beta2 * s["m"] + (1 - beta2) * g
    return w - lr * (sign + weight_decay * w if weight_decay else sign)


PAPER = {name.removeprefix("paper_"): f for name, f in globals().items() if "paper_" in name}


def gradients(n, steps, dtype, seed=0):
    """Gradients of very unequal sizes, some exactly 0, and one element that never has any."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((steps, n)) * 10.0 ** rng.integers(-3, 2, n)
    out[rng.random((steps, n)) < 0.1] = 0
    out[:, n // 2] = 0
    return out.astype(dtype)


def start(rule, n, dtype, seed=1):
    params = np.random.default_rng(seed).standard_normal(n).astype(dtype)
    slots = tuple(np.full(n, np.nan, dtype) for _ in rule.slots)
    rule.init(params, slots)
    return params, slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_rule_is_the_paper_s_equation(name, hyper, dtype):
    n, steps = 131, 60
    rule = make_rule(name, **hyper)
    params, slots = start(rule, n, dtype)
    before = params.copy()
    w = before.astype(np.float64)
    state = {slot: np.zeros(n) for slot in rule.slots}
    lr = 1.0 if name == "adadelta" else 0.01  # its changes are small by themselves
    rate = schedule("cosine", lr, total_steps=2 * steps, warmup_steps=5)
    for t, g in enumerate(gradients(n, steps, dtype), 1):
        keep = g.copy()
        rule.apply(params, g, slots, t, rate(t))
        assert g.tobytes() == keep.tobytes()
        w = PAPER[name](w, g.astype(np.float64), state, t, rate(t), **hyper)
    assert np.linalg.norm(params - w) <= TOLERANCE[dtype] * np.linalg.norm(w - before)
    for slot, key in zip(slots, rule.slots, strict=True):
        assert np.linalg.norm(slot - state[key]) <= TOLERANCE[dtype] * np.linalg.norm(state[key])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_blocks_give_the_same_bits_as_the_whole(name, dtype):
    n, steps = 3001, 6
    rule = make_rule(name, weight_decay=0.01)
    whole, whole_slots = start(rule, n, dtype)
    # Beginning one element behind, so that blocks lie at other alignments as well.
    room = [np.zeros(n + 1, dtype) for _ in range(1 + len(rule.slots))]
    parts, *part_slots = (v[1:] for v in room)
    parts[:] = whole
    rule.init(parts, tuple(part_slots))
    rng = np.random.default_rng(7)
    for t, g in enumerate(gradients(n, steps, dtype), 1):
        rule.apply(whole, g, whole_slots, t, 0.01)
        cuts = np.sort(rng.integers(0, n, rng.integers(0, 40)))
        blocks = list(itertools.pairwise([0, *cuts.tolist(), n]))
        for k in rng.permutation(len(blocks)):
            at = slice(*blocks[k])
            rule.apply(parts[at], g[at], tuple(s[at] for s in part_slots), t, 0.01)
        for one, other in zip((whole, *whole_slots), (parts, *part_slots), strict=True):
            assert one.tobytes() == other.tobytes()
    assert all(v[0] == 0 for v in room)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("name", RULES)
def test_specials_propagate_as_in_the_equation_and_stay_in_their_place(name, weight_decay, dtype):
    n, rule = 67, make_rule(name, weight_decay=weight_decay)
    rng = np.random.default_rng(3)
    vectors = [rng.random(n).astype(dtype) for _ in range(2 + len(rule.slots))]
    clean = [v.copy() for v in vectors]
    # Singly in every vector and at every kind of place, then in two vectors at once.
    edges, touched = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66), [40, 41]
    specials = itertools.product(range(len(vectors)), [np.nan, np.inf, -np.inf])
    for i, (k, special) in zip(edges, specials, strict=False):
        vectors[k][i] = special
        touched.append(i)
    vectors[0][40:42], vectors[1][40:42] = np.inf, (np.inf, -np.inf)

    w, g, *slots = (v.astype(np.float64) for v in vectors)
    state = dict(zip(rule.slots, slots, strict=True))
    with np.errstate(invalid="ignore"):
        w = PAPER[name](w, g, state, 3, 0.01, weight_decay=weight_decay)
    for each in (vectors, clean):
        rule.apply(each[0], each[1], tuple(each[2:]), 3, 0.01)
    rest = np.setdiff1d(np.arange(n), touched)
    del vectors[1], clean[1]
    for got, want, alone in zip(vectors, (w, *state.values()), clean, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)  # NaN and infinities must be the same
        assert got[rest].tobytes() == alone[rest].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*RULES, "change"])
@pytest.mark.parametrize("read", [(), (2,), (0, 2), (0, 2, 3), (0, 2, 3, 4)])
def test_a_sum_in_the_same_pass_gives_the_same_bits(name, dtype, read):
    rule = make_rule(name, weight_decay=0.01) if name in RULES else Change()
    n, begin = 3001, 5
    params, slots = start(rule, n, dtype)
    other, other_slots = params.copy(), tuple(slot.copy() for slot in slots)
    weights = np.zeros(5)
    weights[[*read]] = (0.5, 0.3, -0.2, 0.1)[: len(read)]
    for step in range(1, 4):
        rows = gradients(n + begin, len(weights), dtype)
        for row in {0, 1, 2, 3, 4} - {*read}:
            rows[row][:] = np.nan  # a row of weight 0 is not read
        for row in read:
            rows[row][[17, 18]] = 0, -0.0
        rows[2][19], rows[3][2500] = np.inf, np.nan
        grad = np.empty(n, dtype)
        sum_rows(addresses_of(rows), weights, begin, grad)
        rule.apply(params, grad, slots, step, 0.01)
        room = np.full((1, 700, n)[step - 1], np.nan, dtype)
        rule.apply_sum(
            other, Sum(addresses_of(rows), weights, begin, room), other_slots, step, 0.01
        )
        for one, two in zip((params, *slots), (other, *other_slots), strict=True):
            assert one.tobytes() == two.tobytes()


# Making rules -----------------------------------------------------------------------------


def test_make_rule_passes_on_what_the_rule_has():
    rule = make_rule("rmsprop", momentum=0.3, eps=1e-3, weight_decay=0.2, decay=0.8)
    assert rule == RULES["rmsprop"](weight_decay=0.2, decay=0.8, eps=1e-3)
    assert make_rule("sgd", beta1=7.0, momentum=-1.0) == RULES["sgd"]()
    with pytest.raises(UserError, match=r"unknown optimizer 'adm', expected one of ad.*'ad"):
        make_rule("adm")


def test_hyperparameter_out_of_range():
    for name, option, value in (
        ("momentum", "momentum", 1.0),
        ("nesterov", "momentum", -0.1),
        ("adam", "beta2", math.nan),
        ("adam", "eps", -1e-8),
        ("sgd", "weight_decay", math.inf),
        ("rmsprop", "decay", 1.0),
    ):
        with pytest.raises(UserError, match=f"^{option}=.*, expected .*{option}"):
            make_rule(name, **{option: value})


# Schedules and clipping -------------------------------------------------------------------

COSINE = [(1 + math.cos(math.pi * t / 10)) / 2 for t in range(10)]


def test_schedules():
    for name, total_steps, options, expected in (
        ("constant", 5, {}, [1, 1, 1, 1, 1]),
        ("constant", 7, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ("warmup", 7, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ("cosine", 10, {}, [*COSINE, 0, 0]),
        ("cosine", 14, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, *COSINE, 0]),
        *(("cosine", n, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 0]) for n in (0, 1, 4)),
        ("step", 7, {"step_every": 3, "step_factor": 0.5}, [1, 1, 1, 0.5, 0.5, 0.5, 0.25]),
        ("step", 5, {"step_every": 3, "step_factor": 0.5, "warmup_steps": 2}, [0.5, 1, 1, 0.5]),
        ("cosin", 1, {}, "unknown schedule 'cosin', .*did you mean 'cosine'"),
        ("step", 1, {}, "step_every=0, expected step_every >= 1 .*--step-every N"),
        ("warmup", 1, {}, "warmup_steps=0, expected warmup_steps >= 1"),
        ("constant", 1, {"warmup_steps": -1}, "warmup_steps=-1, expected warmup_steps >= 0"),
    ):
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                schedule(name, 2.0, total_steps=total_steps, **options)
            continue
        rate = schedule(name, 2.0, total_steps=total_steps, **options)
        found = [rate(t) / 2 for t in range(1, 1 + len(expected))]
        assert found == pytest.approx(expected, rel=1e-15)


def test_clip_factor():
    cases = {25.0: 1, 24.0: 1, 0.0: 1, 100.0: 0.5, math.inf: 0, math.nan: math.nan}
    for squares, factor in cases.items():
        assert optim.clip_factor(squares, 5.0) == pytest.approx(factor, nan_ok=True)
    assert optim.clip_factor(100.0, 0.0) == 1


WARM_CHECK = """
import numpy as np
from mpips import optim
from mpips.kernels import rule_loops, vectors
rule = optim.make_rule("adam")
optim.warm(rule, "float32", rounds=True)
loops = rule_loops.dense(rule.kernel), rule_loops.summed(rule.kernel), vectors.sum_squares
before = [list(loop.variants) for loop in loops]
w, g, m, v = np.ones((4, 128), "f4")[:, 7:]
rate, slots = optim.schedule("constant", 0.1, total_steps=9), (m, v)
rule.apply(w, g, slots, 5, rate(5))
total = optim.Sum(vectors.addresses_of([g], 1), np.ones(1), 3, np.empty(2, "f4"))
rule.apply_sum(w[3:], total, (m[3:], v[3:]), 6, rate(6))
optim.clip_factor(vectors.sum_squares(w), 1.0)
assert all(before) and before == [list(loop.variants) for loop in loops]
"""


def test_a_warm_run_compiles_nothing_more():
    subprocess.run([sys.executable, "-c", WARM_CHECK], check=True, timeout=120)
