"""Update rules of arrays with settings of their own, of frozen ones, and with an average."""

import numpy as np
import pytest
from launch import ROOT

from mpips.config import Config
from mpips.config.groups import Group
from mpips.errors import UserError
from mpips.kernels.vectors import addresses_of
from mpips.layout import Layout
from mpips.optim import FrozenMask, Sum, common, grouped, leaving_out, make_rule, rule_of
from mpips.optim.rules import Adam, AdamW

NAMED = Layout.of({"a.weight": (2, 3), "a.bias": (2,), "b.bias": (1,), "b.weight": (4,)})
LAYOUT = Layout.of({"a": (2, 3), "b": (2,), "c": (1,), "d": (4,)})
A, B, C, D = LAYOUT.slices().values()
LION = f"{ROOT / 'jobs' / 'lion_rule.py'}:Lion"
N, DECAY = 70, 0.75


def test_ranges_of_the_vector_have_their_settings() -> None:
    rule, plain = AdamW(weight_decay=0.1), AdamW()
    found = grouped(rule, NAMED, [Group("*.bias", weight_decay=0), Group("b.*", lr=0.5)], 2.0)
    assert found.parts(0, 13) == [(0, 6, rule, 1.0), (6, 9, plain, 1.0), (9, 13, rule, 0.25)]
    assert found.parts(4, 8) == [(4, 6, rule, 1.0), (6, 8, plain, 1.0)]
    assert found.parts(9, 9) == []
    assert found.slots == rule.slots
    assert grouped(rule, NAMED, [], 2.0) is rule
    assert rule.parts(3, 8) == [(3, 8, rule, 1.0)]
    for pattern in ("*.bais", "a.bias"):
        groups = [Group("a.*", lr=1), Group(pattern, lr=1)]
        with pytest.raises(UserError, match=f"group '{pattern.replace('*', '.')}', which no array"):
            grouped(rule, NAMED, groups, 2.0)


def test_statistics_change_by_what_is_pushed_whatever_the_rate() -> None:
    found = grouped(AdamW(weight_decay=0.1), NAMED, [Group("*", lr=1)], 2.0, ["b.weight"])
    assert [part[:2] for part in found.parts(8, 13)] == [(8, 9), (9, 13)]
    w, g = np.array([3.0, 4.0]), np.array([1.0, 0.5])
    found.parts(9, 13)[0].rule.apply(w, g, (g, g), 1, 0.0)
    assert w.tolist() == [2, 3.5]


def test_a_rule_has_no_part_for_what_is_left_alone() -> None:
    rule = AdamW(weight_decay=0.1)
    found = leaving_out(rule, (A, C), {})
    assert found.parts(0, 13) == [(6, 8, rule, 1.0), (9, 13, rule, 1.0)]
    assert found.parts(2, 7) == [(6, 7, rule, 1.0)]
    assert found.slots == rule.slots
    assert leaving_out(rule, (A, B, C, D), {}).parts(0, 13) == []
    groups = grouped(rule, LAYOUT, [Group("a", lr=1)], 1.0)
    assert leaving_out(groups, ((13, 13),), {}).ranges == groups.ranges, "an empty array"


def test_groups_stay_and_each_array_counts_for_itself() -> None:
    whole = grouped(Adam(before=9), LAYOUT, [Group("[bc]", lr=0.5)], 1.0)
    one, two = Adam(before=7), Adam(before=9)
    skipped = {A: 2, B: 2, C: 2, D: 0}
    found = leaving_out(whole, (), skipped)
    assert found.parts(0, 13) == [(0, 6, one, 1.0), (6, 9, one, 0.5), (9, 13, two, 1.0)]
    assert leaving_out(whole, (B,), skipped).parts(5, 10) == [
        (5, 6, one, 1.0), (8, 9, one, 0.5), (9, 10, two, 1.0)
    ]  # fmt: skip


def test_updates_are_those_of_a_rule_for_each_array() -> None:
    """Frozen now and then, with the corrections of the bias that each array has by itself."""
    rng, rule = np.random.default_rng(0), make_rule("adamw", weight_decay=0.1)
    leaving, vectors = FrozenMask(rule), np.zeros((3, LAYOUT.size))
    vectors[0] = rng.random(LAYOUT.size)
    own, counts = vectors.copy(), dict.fromkeys((A, B, C, D), 0)
    for step in range(1, 13):
        frozen = (() if step > 9 else (A, C), (A,), (C, D))[step % 3]
        grad = rng.random(LAYOUT.size)
        leaving.leave(frozen)
        for begin, end, by, _ in leaving.rule.parts(0, LAYOUT.size):
            at = slice(begin, end)
            by.apply(vectors[0, at], grad[at], (vectors[1, at], vectors[2, at]), step, 0.1)
        leaving.count()
        for array in {A, B, C, D} - set(frozen):
            at = slice(*array)
            counts[array] += 1
            rule.apply(own[0, at], grad[at], (own[1, at], own[2, at]), counts[array], 0.1)
    np.testing.assert_array_equal(vectors, own)
    assert leaving.skipped == {array: 12 - n for array, n in counts.items() if n < 12}


def test_what_is_common() -> None:
    assert common([(A, B)]) == common([(A, B), (A, B)]) == (A, B)
    assert common([(A, B), (B, C), (B,)]) == (B,)
    assert common([(A, B), ()]) == ()


@pytest.mark.parametrize(
    ("name", "summed"),
    [("sgd", False), ("adam", True), ("amsgrad", False), ("lion", False), (LION, False)],
)
def test_a_rule_with_an_average(name: str, summed: bool) -> None:
    rng, config = np.random.default_rng(2), {"optimizer": name, "weight_decay": 0.01}
    plain = rule_of(Config(**config)).continued(3)
    rule = rule_of(Config(**config, ema=DECAY)).continued(3)
    assert rule.slots == ("ema", *plain.slots)
    params, slots = rng.normal(size=N), tuple(np.full(N, np.nan) for _ in rule.slots)
    rule.init(params, slots)
    assert np.array_equal(slots[0], params)
    alone, mean, state = params.copy(), params.copy(), tuple(np.zeros(N) for _ in plain.slots)
    for t in range(1, 6):
        grad = rng.normal(size=N)
        plain.apply(alone, grad, state, t, 0.1)
        mean = DECAY * mean + (1 - DECAY) * alone
        if summed:
            total = Sum(addresses_of([grad]), np.ones(1), 0, np.empty(30))
            rule.apply_sum(params, total, slots, t, 0.1)
        else:
            rule.apply(params, grad, slots, t, 0.1)
    for mine, his in zip((params, *slots), (alone, mean, *state), strict=True):
        np.testing.assert_allclose(mine, his, rtol=1e-13)


def test_what_is_no_parameter_has_its_newest_value_as_average() -> None:
    layout = Layout.of({"w": (4,), "running_mean": (3,)})
    rule = rule_of(Config(optimizer="momentum", ema=DECAY))
    parts = grouped(rule, layout, (), 0.1, ["running_mean"]).parts(0, 7)
    (_, last) = parts
    params, slots = np.ones(3), (np.zeros(3), np.full(3, 7.0))
    last.rule.apply(params, np.array([0.5, 0, 1]), slots, 1, 0.1)
    assert np.array_equal(params, [0.5, 1, 0])
    assert np.array_equal(slots[0], params)
    assert np.array_equal(slots[1], [7, 7, 7])
